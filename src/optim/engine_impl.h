// The engine's inside, shared by the files that make up one step. Nothing here is public.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "src/comm/buffer_pool.h"
#include "src/optim/bucket_state.h"
#include "src/optim/checkpoint.h"
#include "src/optim/device_step.h"
#include "src/optim/device_words.h"
#include "src/optim/exact_sum.h"
#include "src/optim/loss_scaler.h"
#include "zerofp8/device.h"
#include "zerofp8/engine.h"

namespace zerofp8 {

// What a StepPart is counted as where it travels as a payload.
inline constexpr DType kPartDType = DType::kFp32;

// Per parameter, the same on every rank that holds it.
struct ParameterState {
  std::uint64_t name_hash = 0;
  std::int64_t step = 0;       // Adam's t: steps in which it had a gradient somewhere
  double guard_c = 0;          // C_t of the guard
  std::int64_t adds = 0;       // gradients added since the last step: feeds the random stream
  std::int64_t flushes = 0;    // sums added to a sharded accumulator: feeds its random stream
  bool ready = false;          // had a gradient in this micro-batch
  bool late = false;           // had another one; on any rank, once that is agreed
  bool used = false;           // had a gradient on this rank since the last step
  bool used_anywhere = false;  // agreed at the boundary
  // A non-finite value since the last step, known at the boundary: in a gradient given to this
  // rank, or in what it received.
  bool bad_source = false, bad_sum = false;
  double factor = 1;        // of this step's gradient, by the trainer
  std::uint64_t edits = 0;  // digest of what the trainer did to it and has to do on all data ranks
};

// One component of one segment as it lies in memory and in a checkpoint.
struct StoredTensor {
  std::string component;  // "weight", "master", "exp_avg", "exp_avg.scale", ...
  std::string dtype;      // safetensors name
  std::byte* data = nullptr;
  std::int64_t elements_per_item = 1;  // 1, or the block size for scales
  std::int64_t item_bytes = 0;
  std::int64_t items(std::int64_t elements) const {
    return (elements + elements_per_item - 1) / elements_per_item;
  }
};

// What all ranks agree on at the boundary.
struct Agreement {
  double norm = 0;
  double clip = 1;
  bool bad = false;
  std::string bad_parameter;
  int bad_rank = -1;
  std::string bad_list;  // up to 8 names, for the error at the floor of the loss scale
};

// What ranks compare before anything is allocated.
struct ComparedTexts {
  std::string settings;                      // the same on all ranks
  std::string parameters;                    // the same on the data ranks of a slice
  std::map<std::string, std::string> named;  // by reduce group: experts differ between data ranks
  std::map<std::string, std::string> tied;   // by tied name
};

struct Engine::Impl {
  Settings settings;
  std::vector<Parameter> parameters;
  Groups groups;
  EngineOptions options;
  Partition partition;
  Plan plan;
  std::shared_ptr<Device> device;  // what follows may hold memory of it
  BufferPool pool{device->allocator()};
  std::unique_ptr<DeviceWords> words;
  std::unique_ptr<DeviceStep> device_step;  // of capturable engines; else null
  // Where the device's memory is not what a communicator takes: the same ranks, staged.
  std::map<Communicator*, std::unique_ptr<Communicator>> staged;
  std::unique_ptr<Communicator> shard_comm, replica_comm;   // of hybrid sharding
  std::unique_ptr<Communicator> in_node_comm, across_comm;  // of the two-level reduce-scatter
  // Sharded accumulators: whether a micro-batch is open is agreed on while some ranks have begun to
  // send buckets on the other communicators and the rest have not.
  std::unique_ptr<Communicator> micro_batch_comm;
  std::vector<Communicator*> reduce_comms;  // distinct, in the same order on every rank
  std::vector<BucketState> buckets;
  std::vector<ParameterState> states;
  std::vector<AdamOptions> hyper;
  LossScaler scaler;
  std::int64_t applied = 0, skipped = 0;
  std::int64_t micro_batches = 0;  // since the last step
  bool open_micro_batch = false;   // gradients since the last end_micro_batch
  int next_flush = 0;              // sharded: first bucket that this micro-batch has not flushed
  bool reduced = false;
  bool told_of_counts = false;  // that ranks had different numbers of micro-batches
  double trainer_scale = 1;  // of this step's gradients, by a loss scaler of the trainer
  Agreement agreed;
  WireBytes wire_before;
  // Of the step that was queued last since the start or a load, without what the device knows.
  std::optional<StepReport> queued;
  std::uint64_t part_bytes = 0;  // of StepParts since the last step
  // What a captured step repeats, if there is one.
  struct Captured {
    StepReport queued;
    std::vector<bool> used;     // parameters with a gradient
    std::vector<double> beta1;  // per group
    std::vector<bool> known;    // parameters that were written from outside before it
    std::vector<bool> written;  // others that were written from outside since
    bool told = false;          // of such
  };
  std::optional<Captured> captured;
  std::int64_t steps_at_start = 0;  // or at the last load
  std::int64_t steps_told = 0;      // of which fetch_report() has logged and thrown what there was
  // By parameter: this rank's weights as the last update left them; empty unless weight_changed().
  std::vector<Buffer> kept_weights;
  std::vector<bool> kept_is_old;  // does not go with the state
  std::vector<bool> written;      // from outside, so far; the same on all ranks
  bool told_of_writes = false;
  bool told_of_saves = false;

  // engine_setup.cc
  Impl(const Settings& s, std::vector<Parameter> p, const Groups& g, EngineOptions o);
  void check_arguments() const;
  void check_parameter(const Parameter& p) const;
  void check_overlaps() const;
  void check_memory_of(const std::string& what, const Communicator* comm) const;
  void check_ranks_agree() const;
  ComparedTexts compared_texts() const;
  void make_groups();
  void make_buckets();
  void set_ranges(BucketState& b) const;
  void allocate(BucketState& b);
  void allocate_all();
  std::string out_of_memory(const std::string& what) const;
  Communicator* payload(Communicator* comm);
  void connect();
  void log(const std::string& line) const;

  // accumulate.cc
  void add_gradient(int parameter, const void* gradient, DType dtype);
  void add_slice(BucketState& b, int parameter, const PartLayout& layout, void* memory,
                 const void* gradient, DType dtype);
  void end_micro_batch();
  void end_open_micro_batch();
  void make_staging(const BucketState& b, PooledBuffer& memory);
  void flush(BucketState& b, bool late = false);
  void finish_flush(BucketState& b);
  void flush_late_gradients();
  void clear_gradients();
  void forget_gradients();

  // reduce.cc
  void reduce_gradients();
  void start_reduction(BucketState& b);
  void send_across_nodes();
  void finish_reduction(BucketState& b);
  void sum_shard(BucketState& b, float factor, float* out);
  CallOptions payload_of(DType dtype, std::string_view label) const {
    return {.dtype = dtype, .stream = device->stream(), .label = label};
  }
  void sum_over(BucketState& b, Communicator& comm, std::int64_t elements, float factor,
                float* values, std::string_view label);
  void sum_tied();
  float gradient_factor(const BucketState& b) const;

  // boundary.cc
  void agree();
  void count_squares();
  void add_squares(const BucketState& b, const Segment& s, std::int64_t* limbs,
                   std::uint32_t* amax);
  ExactSum local_sum_squares();
  std::vector<double> gradient_norms(NormKind kind);
  std::vector<Communicator*> payload_comms() const;
  std::string failure_on_device() const;
  void agree_on_use();
  void look_at_counts(const std::vector<std::int64_t>& counts);
  bool agree_on_update(bool overflow);
  void name_bad_parameters(int rank, int slice);

  // trainer_edits.cc
  ParameterState& editable(int parameter, const char* call);
  void zero_gradient(const View& view, std::int64_t elements);
  void discard_gradient(int parameter, bool keep_zeros);
  void scale_gradient(int parameter, double factor);
  std::uint64_t digest_of_edits() const;
  std::string edits_that_differ(std::size_t other) const;
  std::string tied_edits_that_differ() const;

  // update.cc
  void adam_segment(BucketState& b, const Segment& segment, bool commit);
  AdamScalars scalars_for(const BucketState& b, int parameter) const;
  void update_weights(bool commit);
  bool weights_would_overflow();
  bool apply(StepReport& report);
  void gather_weights(BucketState& b);
  std::string reason_to_skip(StepSkip skip, const StepReport& report) const;  // empty: none
  void log_skip(const StepReport& report) const;
  RandomStream stream(const RandomKeyBase& base, std::int64_t offset,
                      const std::uint64_t* step) const;
  StepReport step();
  WireBytes wire_total() const;

  // queued_step.cc
  void make_device_step();
  void check_capturable(const std::string& call) const;
  std::string fault_of_groups() const;
  void send_groups();
  void before_replay();
  std::vector<bool> used_parameters() const;
  void refuse_within_capture(const std::string& call) const;
  void watch_replays();
  void gather_parts(Communicator* comm, const StepPart* mine, StepPart* all);
  void agree_on_device();
  double norm_on_device();
  void enqueue_step();
  void queue_step();
  std::optional<StepReport> fetch_report();
  std::string name_of(int parameter, int bad_rank, int bad_slice) const;
  StepState read_counters();
  void write_counters();

  // weights.cc
  std::byte* weight_of(const BucketState& b, const Segment& s) const;
  void reset_masters(BucketState& b, const Segment& s);
  void reset_masters();
  void weight_changed(int parameter);
  void tell_of_writes_between_replays(int parameter);
  void keep_weights();
  void note_fp16_weights(const BucketState& b, const Segment& s);
  void scan_fp16_weights();

  // state_access.cc
  std::vector<float> full_state(int parameter, StateKind kind);
  std::vector<OwnState> own_state(int parameter, StateKind kind);
  void set_full_state(int parameter, StateKind kind, std::span<const float> values);
  void set_masters(BucketState& b, int parameter, std::span<const float> values);
  void set_step(int parameter, std::int64_t step);
  void decode_state(BucketState& b, const Segment& s, std::int64_t at, StateKind kind, float* out);
  std::span<const std::byte> on_host(std::span<const std::byte> data,
                                     std::vector<std::byte>& memory);
  std::vector<StatePiece> state_pieces();
  StateCounters counters();
  void restore_counters(const StateCounters& counters);

  // checkpoint_save.cc, checkpoint_load.cc
  std::vector<StoredTensor> stored_tensors(BucketState& b, const Segment& s, std::int64_t at);
  CheckpointFormat checkpoint_format() const;
  void refuse_within_step(const std::string& call, bool between_is_fine = false) const;
  int model_rank() const { return groups.model == nullptr ? 0 : groups.model->rank(); }
  ModelIndex write_shard(const std::string& folder, const std::string& id);
  void write_indices(const std::string& folder, const ModelIndex& mine);
  void save(const std::string& root);
  std::set<std::string> names_on_all_ranks() const;
  void load(const std::string& root);

  Communicator* reduce_comm_of(int parameter) const;
  int data_rank() const { return groups.data->rank(); }
};

}  // namespace zerofp8
