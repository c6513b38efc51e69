// The engine: accumulates gradients, reduces them, updates sharded Adam state, gathers weights.
//
//   Engine engine(settings, parameters, {.data = world.get()});
//   for each micro-batch:
//     for each parameter: engine.add_gradient(i, grad, DType::kBf16);    // any order, any number
//     of times engine.end_micro_batch();
//   StepReport report = engine.step();          // collective over data (and model) groups
//   if (!report.applied) ...                    // skipped on every rank alike; nothing was changed
//
// Weights are updated in place in the caller's storage. They have to be the same on all data ranks
// at the start (broadcast them, or use one seed): they are not compared. All calls that communicate
// (the constructor, end_micro_batch with a sharded accumulator, step, save, load, full_*) are made
// by all ranks in the same order. An Engine is used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zerofp8/buffer.h"
#include "zerofp8/communicator.h"
#include "zerofp8/config.h"
#include "zerofp8/device.h"
#include "zerofp8/partition.h"
#include "zerofp8/plan.h"

namespace zerofp8 {

struct Parameter {
  ParameterSpec spec;
  // Contiguous, spec.dtype, spec.numel() elements, in memory of the engine's device; outlives the
  // engine.
  void* weight = nullptr;
};

struct ReduceGroup {
  Communicator* comm = nullptr;
  double divisor = 0;  // gradients are divided by it; 0 = the size of the group
};

// Who talks to whom. Communicators outlive the engine; the engine must be their only user while it
// runs.
struct Groups {
  Communicator* data = nullptr;   // data-parallel ranks of this model slice
  Communicator* model = nullptr;  // pipeline x tensor ranks of one data rank; null = one slice
  std::map<std::string, ReduceGroup> reduce;  // named reduce groups of ParameterSpec::reduce_group
  std::map<std::string, Communicator*> tied;  // by ParameterSpec::tied: its holders, in stage order
};

struct EngineOptions {
  std::vector<AdamOptions>
      groups;                    // hyper-parameters per parameter group; empty = one, from settings
  bool loss_is_divided = false;  // true: the trainer already divided the loss by A
  // Decides steps in device memory, so that enqueue_step() never waits for the device and a CUDA
  // graph can capture it (see there). Not with fp16. The bits are the same.
  bool capturable = false;
  int threads = 1;  // of this rank, for kernels on the CPU; never changes bits
  // Where state and kernels are; null: the CPU. Weights and gradients are in its memory, too, and
  // it belongs to this engine alone. Communicators may take host memory: then what travels is
  // copied there and back.
  std::shared_ptr<Device> device;
  // One line per event worth a log entry (a skipped step, a warning); called on rank 0 of `data`
  // only. Default: stderr.
  std::function<void(const std::string&)> log;
};

struct StepReport {
  bool applied = false;
  std::int64_t step = 0;           // applied steps so far
  std::int64_t skipped_steps = 0;  // skipped steps so far
  std::int64_t micro_batches = 0;  // of this step
  double grad_norm = 0;            // of the averaged, unscaled gradient, before clipping
  double clip_coefficient = 1;
  double clipped_norm = 0;
  double loss_scale = 1;  // that this step's gradients carried
  double next_loss_scale = 1;
  WireBytes wire;                      // sent by this rank since the previous step
  std::string bad_parameter;           // first parameter with a non-finite gradient; empty if none
  int bad_rank = -1;                   // its data rank
  std::string skip_reason;             // why nothing was applied; empty if applied
  std::int64_t unused_parameters = 0;  // without a gradient on any rank: not touched
};

// One piece of this rank's state as it lies in memory: codes, scales or remainder bits of a run of
// elements of one parameter, in memory of the engine's device. Valid as long as the engine.
struct StatePiece {
  int parameter = 0;
  std::string name;   // "exp_avg@0", "exp_avg.scale@0", "master@128", ...: component@first element
  std::string dtype;  // safetensors' name: "F32", "U8", ...
  std::span<std::byte> bytes;
};

// What else a state consists of. The same on all ranks of a slice.
struct StateCounters {
  std::int64_t applied = 0, skipped = 0;
  double loss_scale = 1;
  std::int64_t clean_steps = 0;
  int hysteresis_left = 0;
  std::vector<std::int64_t> steps;  // Adam's t per parameter
  std::vector<double> guard_c;      // C_t of the guard per parameter
};

enum class StateKind : std::uint8_t { kGradient, kMaster, kExpAvg, kExpAvgSq };
enum class NormKind : std::uint8_t { kTwo, kInfinity };

// What this rank holds of a parameter's state: a run of elements as FP32.
struct OwnState {
  std::int64_t offset = 0;  // first element, in the parameter
  std::vector<float> values;
};

class Engine {
 public:
  // Compares config, names, shapes and order over all ranks before anything is allocated. Throws
  // ConfigError, ArgumentError or CommError, the same on every rank.
  Engine(const Settings& settings, std::vector<Parameter> parameters, const Groups& groups,
         EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds spec.numel() contiguous elements to the parameter's gradient. dtype: fp32, bf16 or fp16.
  // On a device the kernel is queued on its stream: the gradient stays as it is until it has run.
  // A parameter may get any number of gradients per micro-batch: they add up.
  void add_gradient(int parameter, const void* gradient, DType dtype);
  // Ends a micro-batch; with a sharded accumulator this is where its gradients are reduced.
  void end_micro_batch();
  // Reduces what was accumulated and agrees on norm and non-finite values; step() does it if it was
  // not called. Between the two, full_state(kGradient) and grad_norm() tell of this step's
  // gradient.
  void reduce_gradients();
  double grad_norm() const;
  // L2 norm, or largest magnitude, of each parameter's averaged gradient before clipping, in the
  // order of parameters(); NaN where it is not finite. Of a tensor slice where the parameter is
  // cut. Between reduce_gradients() and step(); collective over the data ranks.
  std::vector<double> gradient_norms(NormKind kind = NormKind::kTwo);
  // The accumulation boundary: reduce, agree, clip, update, gather. Implies end_micro_batch if
  // gradients were added since the last one. Throws NumericError when a dynamic loss scale is at
  // its floor and gradients are still not finite.
  StepReport step();
  // Capturable engines: step() in two halves. The first one queues everything and waits for nothing
  // on the device; the second one waits and tells of the step that ran last. ArgumentError if ranks
  // disagreed, with nothing changed; CommError if a communicator has failed meanwhile: weights may
  // be anything then, and training goes on from a checkpoint.
  //
  // Gradients, end_micro_batch() and enqueue_step() may be captured into a CUDA graph: after one or
  // more whole steps outside of it (which allocate), with a gradient for the same parameters and on
  // all ranks alike; communicators have to move device memory (NCCL). Each replay is one step. One
  // graph per engine. Call write_groups() before each replay: it sends what group() was set to
  // since, restores what a step outside of the graph has changed, and looks after the replays
  // before it. A skipped step gathers weights, too, because the host does not know.
  void enqueue_step();
  std::optional<StepReport> fetch_report();  // nullopt: no step since the start or a load
  void write_groups();
  // Throws away what was accumulated since the last step. With a sharded accumulator: collective.
  void discard_gradients();
  // The same for one parameter, as if this rank had given it no gradient since the last step; with
  // `keep_zeros` as if it had given it zeros, so that weight decay and moments go on. With
  // a sharded accumulator (then between micro-batches only), or after reduce_gradients(), all data
  // ranks have to do the same: step() throws ArgumentError where they have not, with nothing
  // changed. After the reduction, the norm and what was not finite stay as they were agreed on.
  // Capturable engines: with a local accumulator and before the reduction only.
  void discard_gradient(int parameter, bool keep_zeros = false);
  // Multiplies one parameter's averaged gradient in this step's update, on top of earlier calls:
  // what a trainer that clips by itself does to it. Between reduce_gradients() and step(); the same
  // on all data ranks and all holders of a tied parameter, which is compared as above. Norms and
  // full_state() are without it. Not for capturable engines.
  void scale_gradient(int parameter, double factor);

  // Multiply the loss by it before backward. 1 unless fp16 is on.
  double loss_scale() const;
  // For trainers with a loss scaler of their own: the gradients of this step carry this factor,
  // too. Before reduce_gradients(), the same on all ranks; 1 again after the step. Throws
  // ArgumentError for a factor that is not a positive number.
  void set_trainer_loss_scale(double scale);
  AdamOptions& group(int index);  // lr, betas, eps, weight decay of the next step
  int group_count() const;
  std::int64_t applied_steps() const;
  std::int64_t skipped_steps() const;
  std::int64_t step_of(int parameter) const;  // Adam's t

  const Settings& settings() const;
  const Plan& plan() const;
  const Partition& partition() const;
  const std::vector<Parameter>& parameters() const;
  const Allocator& allocator() const;  // of the device
  Device& device() const;

  // Call after weights were written from outside (weights-only load): masters follow them, moments
  // stay.
  void weights_changed();
  // The same for one parameter of which perhaps only some elements were written, e.g. by a clamp in
  // each step: from the second call on, the masters of elements that kept their bits stay.
  void weight_changed(int parameter);
  // For callers that can find something wrong on one rank only: throws ArgumentError on all ranks
  // if any of them gives a text that is not empty. Collective.
  void raise_on_all_ranks(const std::string& error);

  // The whole tensor, on every rank, as FP32 (collective). kGradient: the averaged gradient,
  // between reduce_gradients() and step(); kExpAvgSq: v, also where its root is stored.
  std::vector<float> full_state(int parameter, StateKind kind);
  // This rank's part of it, in order of offset; not collective, and not for gradients.
  std::vector<OwnState> own_state(int parameter, StateKind kind);
  // The other way: the whole tensor as FP32, given on every rank, of which each keeps its part,
  // rounded to nearest. kMaster sets the weight, too; kExpAvgSq: v, also where its root is stored.
  // Between steps only. Throws ArgumentError for another size, kGradient, or v < 0.
  void set_full_state(int parameter, StateKind kind, std::span<const float> values);
  // Adam's t of one parameter, for state that comes from elsewhere; the same on all ranks.
  void set_step(int parameter, std::int64_t step);

  // This rank's part of the state, for callers that keep it in a file of their own: fill the pieces
  // and give the counters back on the same number of ranks. Weights are not among the pieces.
  // Between steps only.
  std::vector<StatePiece> state_pieces();
  // A piece's bytes to host memory and back; piece.bytes.size() of them.
  void read_piece(const StatePiece& piece, void* host);
  void write_piece(const StatePiece& piece, const void* host);
  StateCounters counters() const;
  void restore_counters(const StateCounters& counters);

  // Saves the state as a new folder ROOT/step-NNNNNNNN: safetensors shards and JSON indices,
  // written to a temporary name, synced, renamed; then ROOT/latest names it. A kill at any time
  // leaves the last complete checkpoint as it was. Collective; not within a micro-batch, and
  // between two of them without what was accumulated since the last step, which is logged. Throws
  // CheckpointError, the same on every rank.
  void save(const std::string& root);
  // Loads what ROOT/latest names (or ROOT itself, if it is one checkpoint), saved on any number of
  // data ranks. Everything is checked before anything is overwritten. Hyper-parameters of the
  // groups, loss scale, counters and weights come back too; a static loss scale is the config's.
  // Between steps only. Throws CheckpointError, the same on every rank.
  void load(const std::string& root);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace zerofp8
