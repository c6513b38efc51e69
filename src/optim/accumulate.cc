// From micro-batch gradients to accumulators.
#include <fmt/format.h>

#include <algorithm>

#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

// Up to this many micro-batches, rounding to nearest is the more accurate one; above it, sums that
// are rounded to nearest stop growing (docs/numerics.md, "Accumulator").
constexpr std::int64_t kNearestMicroBatches = 16;

// `before`: additions since the last step. They count too, because callers may accumulate by hand
// more often than the config says.
Rounding accumulator_rounding(const Settings& settings, Storage storage, std::int64_t before) {
  if (storage == Storage::kFp32) return Rounding::kNearest;
  const bool many =
      settings.batch.accumulation_steps > kNearestMicroBatches || before >= kNearestMicroBatches;
  return many ? Rounding::kStochastic : Rounding::kNearest;
}

}  // namespace

void Engine::Impl::add_gradient(int parameter, const void* gradient, DType dtype) {
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    throw ArgumentError("add_gradient: parameter " + std::to_string(parameter) + " of " +
                        std::to_string(parameters.size()));
  }
  if (reduced) {
    throw ArgumentError("add_gradient: gradients were reduced already; call step() first");
  }
  if (!plain_storage(dtype)) {
    throw ArgumentError("add_gradient: given " + std::string(to_string(dtype)) +
                        "; allowed: fp32, bf16, fp16");
  }
  const Partition::Home home = partition.homes[parameter];
  if (const std::string fault =
          home.bucket < 0 || gradient == nullptr ? std::string() : device->fault_of(gradient);
      !fault.empty()) {
    throw ArgumentError(fmt::format(
        "add_gradient: the gradient of parameter \"{}\" {}; the engine runs on {}: pass one there",
        parameters[parameter].spec.name, fault, device->name()));
  }
  if (gradient == nullptr && home.bucket >= 0) {
    throw ArgumentError("add_gradient: the gradient of parameter \"" +
                        parameters[parameter].spec.name + "\" is null");
  }
  ParameterState& state = states[parameter];
  open_micro_batch = true;
  state.used = true;
  if (home.bucket < 0) return;  // no elements
  BucketState& b = buckets[home.bucket];
  if (!settings.accumulation_sharded) {
    add_slice(b, parameter, b.accumulator_layout, b.accumulator.data(), gradient, dtype);
    ++state.adds;
    return;
  }
  // A second gradient in one micro-batch travels apart, even if its bucket is still here: whether
  // it is depends on the bucket's size, and the sums must not.
  PooledBuffer& memory = state.ready ? b.late : b.staging;
  make_staging(b, memory);
  add_slice(b, parameter, b.staging_layout, memory.data(), gradient, dtype);
  ++state.adds;
  state.late = state.ready;
  if (state.late) return;
  state.ready = true;
  ++b.parameters_ready;
  // Buckets leave in index order on every rank, as soon as all of their parameters had a gradient.
  while (next_flush < static_cast<int>(buckets.size()) &&
         buckets[next_flush].parameters_ready ==
             static_cast<int>(buckets[next_flush].bucket->placements.size())) {
    flush(buckets[next_flush++]);
  }
}

void Engine::Impl::add_slice(BucketState& b, int parameter, const PartLayout& layout, void* memory,
                             const void* gradient, DType dtype) {
  const Placement& place = b.bucket->placements[partition.homes[parameter].placement];
  const Storage storage = *plain_storage(dtype);
  const ParameterState& state = states[parameter];
  const Rounding rounding = accumulator_rounding(settings, layout.storage, state.adds);
  const RandomKeyBase key{settings.seed,
                          use_of(Purpose::kAccumulator, static_cast<std::uint32_t>(state.adds)),
                          static_cast<std::uint64_t>(data_rank()), state.name_hash};
  const std::uint64_t* step = device_step ? device_step->applied() : nullptr;
  for (std::int64_t from = place.offset; from < place.offset + place.padded;) {
    const int part = static_cast<int>(from / layout.part_elements);
    const std::int64_t at = from - part * layout.part_elements;
    const std::int64_t to =
        std::min(place.offset + place.padded, (part + 1) * layout.part_elements);
    const std::int64_t first = from - place.offset;
    char* in = static_cast<char*>(const_cast<void*>(gradient)) + first * bytes_of(dtype);
    device->accumulate({.acc = layout.view(memory, part, at),
                        .residual = layout.residual_view(memory, part, at),
                        .gradient = {storage, in, nullptr},
                        .sum = {},
                        .elements = std::min(to - from, place.elements - first),
                        .block = layout.block,
                        .rounding = rounding,
                        .stream = stream(key, first, step),
                        .amax = words->given(parameter)});
    from = to;
  }
}

void Engine::Impl::make_staging(const BucketState& b, PooledBuffer& memory) {
  if (memory) return;
  memory = pool.acquire(static_cast<std::size_t>(b.staging_layout.bytes()));
  device->zero(memory.data(), static_cast<std::size_t>(b.staging_layout.bytes()));
}

void Engine::Impl::flush(BucketState& b, bool late) {
  finish_flush(b);
  PooledBuffer& memory = late ? b.late : b.staging;
  make_staging(b, memory);  // no gradient here, but other ranks may have one
  b.sending = std::move(memory);
  b.sending_late = late;
  memory = {};
  b.in_flight =
      std::make_unique<ReduceScatter>(b.reduce_ranks, *device, pool, b.staging_layout,
                                      b.sending.data(), wire_storage(settings.gradient_wire));
  if (!settings.overlap_comm) finish_flush(b);
}

void Engine::Impl::finish_flush(BucketState& b) {
  if (!b.in_flight) return;
  b.in_flight->wait();
  const PartLayout& layout = b.accumulator_layout;
  for (const Segment& s : b.shard_segments) {
    const ParameterState& state = states[s.parameter];
    if (b.sending_late && !state.late) continue;  // a zero would be rounded in, too
    const Rounding rounding = accumulator_rounding(settings, layout.storage, state.flushes);
    // Owned by one rank: the random stream does not depend on which.
    const RandomKeyBase key{
        settings.seed, use_of(Purpose::kAccumulator, static_cast<std::uint32_t>(state.flushes)), 0,
        state.name_hash};
    const std::uint64_t* step = device_step ? device_step->applied() : nullptr;
    device->accumulate({.acc = layout.view(b.accumulator.data(), 0, s.offset),
                        .residual = layout.residual_view(b.accumulator.data(), 0, s.offset),
                        .gradient = {},
                        .sum = b.in_flight->received(s.offset),
                        .elements = s.padded,
                        .block = layout.block,
                        .rounding = rounding,
                        .stream = stream(key, s.parameter_offset, step),
                        .amax = words->received(s.parameter)});
  }
  for (const Placement& p : b.bucket->placements) {
    ParameterState& state = states[p.parameter];
    if (!b.sending_late || state.late) ++state.flushes;
  }
  b.in_flight.reset();
  b.sending = {};
}

// All ranks flush what is late on any of them. One number tells that nothing is, which is usual.
void Engine::Impl::flush_late_gradients() {
  for (Communicator* comm : reduce_comms) {
    std::vector<std::int32_t> late(states.size(), 0);
    std::int32_t any = 0;
    for (std::size_t i = 0; i < states.size(); ++i) {
      late[i] = states[i].late && reduce_comm_of(static_cast<int>(i)) == comm;
      any |= late[i];
    }
    comm->all_reduce(std::span(&any, 1), ReduceOp::kMax);
    if (any == 0) continue;
    comm->all_reduce(std::span<std::int32_t>(late), ReduceOp::kMax);
    for (std::size_t i = 0; i < states.size(); ++i) states[i].late = states[i].late || late[i] != 0;
    for (BucketState& b : buckets) {
      const auto& placed = b.bucket->placements;
      const bool due = std::any_of(placed.begin(), placed.end(), [&](const Placement& p) {
        return late[static_cast<std::size_t>(p.parameter)] != 0;
      });
      if (due) flush(b, true);
    }
  }
}

void Engine::Impl::end_micro_batch() {
  ++micro_batches;
  open_micro_batch = false;
  if (!settings.accumulation_sharded) return;
  while (next_flush < static_cast<int>(buckets.size())) flush(buckets[next_flush++]);
  flush_late_gradients();
  send_across_nodes();
  for (BucketState& b : buckets) {
    finish_flush(b);
    b.parameters_ready = 0;
  }
  for (ParameterState& state : states) state.ready = state.late = false;
  next_flush = 0;
}

// With a sharded accumulator the end of a micro-batch is collective: it is due on every rank if any
// rank has gradients, e.g. of a parameter that only some ranks use.
void Engine::Impl::end_open_micro_batch() {
  std::int32_t open = open_micro_batch;
  if (micro_batch_comm) micro_batch_comm->all_reduce(std::span(&open, 1), ReduceOp::kMax);
  if (open != 0) end_micro_batch();
}

void Engine::Impl::clear_gradients() {
  for (BucketState& b : buckets) device->zero(b.accumulator.data(), b.accumulator.size());
  words->start_step();
  forget_gradients();
}

// The host's part of it.
void Engine::Impl::forget_gradients() {
  for (BucketState& b : buckets) {
    b.in_flight.reset();
    b.staging = {};
    b.late = {};
    b.sending = {};
    b.parameters_ready = 0;
    b.gradient = {};
  }
  for (ParameterState& state : states) {
    state.adds = state.flushes = 0;
    state.used = state.used_anywhere = state.ready = state.late = false;
    state.bad_source = state.bad_sum = false;
    state.factor = 1;
    state.edits = 0;
  }
  micro_batches = 0;
  open_micro_batch = false;
  next_flush = 0;
  reduced = false;
  trainer_scale = 1;
}

}  // namespace zerofp8
