// Building an engine: buckets, the ranges of this rank, and the memory for both.
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <set>

#include "src/comm/staged_communicator.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

Storage accumulator_storage(DType dtype) {
  return dtype == DType::kFp16 ? Storage::kFp16Block : wire_storage(dtype);
}

Storage moment_storage(DType dtype) {
  return dtype == DType::kUe4m4 ? Storage::kUe4m4Block : accumulator_storage(dtype);
}

int master_bits(MasterWeights master, DType weight) { return master_bytes(master, weight) * 8; }

}  // namespace

// What payloads go through: the communicator itself, or one that stages them.
Communicator* Engine::Impl::payload(Communicator* comm) {
  if (comm == nullptr || device->is_host() || comm->on_device()) return comm;
  std::unique_ptr<Communicator>& made = staged[comm];
  if (made == nullptr) made = std::make_unique<StagedCommunicator>(*comm, *device);
  return made.get();
}

void Engine::Impl::set_ranges(BucketState& b) const {
  b.shard_begin = b.shard_comm->rank() * b.bucket->shard_elements;
  b.shard_end = b.shard_begin + b.bucket->shard_elements;
  const bool everything = settings.stage == 0;
  b.state_begin = everything ? 0 : b.shard_begin;
  b.state_end = everything ? b.bucket->elements : b.shard_end;
  b.shard_segments = segments_in(*b.bucket, b.shard_begin, b.shard_end);
  b.state_segments = segments_in(*b.bucket, b.state_begin, b.state_end);
}

void Engine::Impl::make_buckets() {
  states.resize(parameters.size());
  ModelSize size;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i].spec;
    // Tied copies share their random stream, so that they stay equal.
    states[i].name_hash = hash_name(spec.tied.empty() ? spec.name : spec.tied);
    size.parameters += spec.numel();
    if (spec.dtype != settings.weight) size.fp32_parameters += spec.numel();
  }
  buckets.resize(partition.buckets.size());
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    BucketState& b = buckets[i];
    b.bucket = &partition.buckets[i];
    const bool named = !b.bucket->reduce_group.empty();
    const ReduceGroup group = named ? groups.reduce.at(b.bucket->reduce_group) : ReduceGroup{};
    b.reduce_comm = named ? group.comm : groups.data;
    b.shard_comm = payload(!named && shard_comm ? shard_comm.get() : b.reduce_comm);
    b.reduce_ranks = {b.shard_comm};
    if (!named && in_node_comm) {
      b.reduce_ranks = {payload(across_comm.get()), payload(in_node_comm.get()),
                        wire_storage(settings.in_node_wire)};
    }
    b.replica_comm = !named ? payload(replica_comm.get()) : nullptr;
    b.first_replica = b.replica_comm == nullptr || b.replica_comm->rank() == 0;
    b.tied_comm = b.bucket->tied.empty() ? nullptr : payload(groups.tied.at(b.bucket->tied));
    b.divisor = group.divisor > 0 ? group.divisor : b.reduce_comm->size();
    set_ranges(b);
    size.local_elements += b.bucket->elements;
    size.shard_elements += b.state_elements();
    if (b.bucket->dtype != settings.weight) size.shard_elements_fp32_weights += b.state_elements();
    if (b.bucket->fp32_moments) size.shard_elements_fp32_moments += b.state_elements();
    if (b.tied_comm != nullptr) {
      size.tied_elements += b.state_elements();
      size.tied_ranks = std::max(size.tied_ranks, b.tied_comm->size());
    }
  }
  size.buckets = static_cast<std::int64_t>(buckets.size());
  plan = make_plan(settings, size, options.loss_is_divided);
  allocate_all();
  connect();
  kept_weights.resize(parameters.size());
  kept_is_old.resize(parameters.size());
  written.resize(parameters.size());
  reset_masters();
}

// Communicators of device memory connect ranks when they first exchange something, and hold the
// host until both are there. In the middle of a micro-batch one of them may be waiting elsewhere.
void Engine::Impl::connect() {
  std::set<Communicator*> seen;
  const auto exchange = [&](Communicator* comm) {
    if (comm == nullptr || staged.count(comm) != 0 || !comm->on_device()) return;
    if (comm->size() == 1 || !seen.insert(comm).second) return;
    const auto bytes = static_cast<std::size_t>(comm->size());
    PooledBuffer send = pool.acquire(bytes), recv = pool.acquire(bytes);
    device->zero(send.data(), bytes);
    const CallOptions call = payload_of(DType::kE4m3, "connecting");
    comm->all_to_all({send.data(), bytes}, {recv.data(), bytes}, call)->wait();
    comm->all_gather({send.data(), 1}, {recv.data(), bytes}, call)->wait();
  };
  for (Communicator* comm :
       {groups.data, shard_comm.get(), replica_comm.get(), in_node_comm.get(), across_comm.get()}) {
    exchange(comm);
  }
  if (device_step) exchange(groups.model);
  for (const auto& [name, group] : groups.reduce) exchange(group.comm);
  for (const auto& [name, comm] : groups.tied) exchange(comm);
}

// What one rank has no memory for stops all of them.
void Engine::Impl::allocate_all() {
  std::string error;
  try {
    words = std::make_unique<DeviceWords>(*device, parameters.size());
    for (BucketState& b : buckets) allocate(b);
    if (options.capturable) make_device_step();
  } catch (const DeviceError& e) {
    error = out_of_memory(e.what());
  } catch (const std::bad_alloc&) {
    error = out_of_memory("no memory was left");
  }
  error = first_error(groups.data, groups.model, error);
  if (error.empty()) return;
  buckets.clear();
  throw DeviceError(error);
}

std::string Engine::Impl::out_of_memory(const std::string& what) const {
  std::optional<std::size_t> free;
  try {
    free = device->free_bytes();
  } catch (const DeviceError&) {  // what has failed before is told
  }
  std::string text = fmt::format("the optimizer's state does not fit on {} of data rank {}: {}; ",
                                 device->name(), data_rank(), what);
  text += free ? fmt::format("{} bytes are free; the plan needs", *free) : "the plan needs";
  std::int64_t total = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.place == "caller" || row.bytes == 0) continue;
    text += fmt::format(" {} {} bytes ({}),", row.name, row.bytes, row.dtype);
    total += row.bytes;
  }
  return text + fmt::format(
                    " together {}, and buffers for what travels; raise /zerofp8/opt_level or the "
                    "stage, use more ranks, or lower /zero_optimization/reduce_bucket_size",
                    total);
}

void Engine::Impl::allocate(BucketState& b) {
  const int block = settings.block_size;
  const std::int64_t n = b.state_elements();
  const Storage acc = accumulator_storage(settings.accumulation);
  const bool sharded = settings.accumulation_sharded;
  const int ranks = b.shard_comm->size();
  b.accumulator_layout = {acc, settings.error_feedback, sharded ? 1 : ranks, block,
                          b.bucket->shard_elements};
  b.staging_layout = {Storage::kFp32, false, ranks, block, b.bucket->shard_elements};
  b.accumulator = Buffer(device->allocator(), Component::kAccumulator,
                         static_cast<std::size_t>(b.accumulator_layout.bytes()));
  const bool fixed = b.tied_comm == nullptr && b.replica_comm == nullptr;
  b.direct = fixed && (sharded || (ranks == 1 && acc == wire_storage(settings.gradient_wire)));
  if (!b.direct && (sharded || acc != Storage::kFp32)) {
    b.reduced = Buffer(device->allocator(), Component::kReducedGradient,
                       static_cast<std::size_t>(n) * sizeof(float));
  }
  const DType m = b.bucket->fp32_moments ? DType::kFp32 : settings.exp_avg.value;
  const DType v = b.bucket->fp32_moments ? DType::kFp32 : settings.exp_avg_sq.value;
  const auto moment = [&](Component component, DType dtype, Buffer& memory) {
    memory = Buffer(device->allocator(), component,
                    static_cast<std::size_t>(stored_bytes(component, dtype, n, block)));
    const PartLayout layout{moment_storage(dtype), false, 1, block, n};
    return layout.view(memory.data(), 0);
  };
  b.exp_avg = moment(Component::kExpAvg, m, b.exp_avg_memory);
  b.exp_avg_sq = moment(Component::kExpAvgSq, v, b.exp_avg_sq_memory);
  b.master_bits = master_bits(settings.master, b.bucket->dtype);
  b.master = Buffer(device->allocator(), Component::kMaster,
                    static_cast<std::size_t>(n * b.master_bits / 8));
}

}  // namespace zerofp8
