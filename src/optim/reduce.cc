// At the boundary: from accumulators to the averaged gradient of this rank's state range.
#include <algorithm>
#include <string>

#include "src/optim/engine_impl.h"

namespace zerofp8 {
// 1 / (divisor * A * loss scales) in float64, rounded once. A = 1 where the trainer divided its
// loss.
float Engine::Impl::gradient_factor(const BucketState& b) const {
  const double a =
      options.loss_is_divided ? 1.0 : static_cast<double>(settings.batch.accumulation_steps);
  return static_cast<float>(1.0 / (b.divisor * a * scaler.scale() * trainer_scale));
}

// FP32 memory of the state range: the reduced buffer, or the FP32 accumulator itself.
float* BucketState::reduced_values() {
  if (!reduced.empty()) return reduced.as<float>();
  if (accumulator_layout.storage != Storage::kFp32) return nullptr;
  if (accumulator_layout.parts == 1) return accumulator.as<float>();
  return accumulator.as<float>() + state_begin;  // FP32 parts lie side by side
}

void Engine::Impl::start_reduction(BucketState& b) {
  if (b.direct || settings.accumulation_sharded) return;
  b.in_flight =
      std::make_unique<ReduceScatter>(b.reduce_ranks, *device, pool, b.accumulator_layout,
                                      b.accumulator.data(), wire_storage(settings.gradient_wire));
}

// Two-level: one bucket is added up while others are on their way.
void Engine::Impl::send_across_nodes() {
  for (BucketState& b : buckets) {
    if (b.in_flight) b.in_flight->send_across();
  }
}

// Sums the received parts (local accumulator) or decodes the shard (sharded one) into FP32.
void Engine::Impl::sum_shard(BucketState& b, float factor, float* out) {
  if (b.in_flight) b.in_flight->wait();
  const PartLayout& layout = b.accumulator_layout;
  for (const Segment& s : b.shard_segments) {
    const Summands own{.part = layout.view(b.accumulator.data(), 0, s.offset),
                       .residual = layout.residual_view(b.accumulator.data(), 0, s.offset)};
    device->decode_sum({.in = b.in_flight ? b.in_flight->received(s.offset) : own,
                        .factor = factor,
                        .out = out + s.offset,
                        .elements = s.padded,
                        .block = layout.block,
                        .amax = words->received(s.parameter)});
  }
  b.in_flight.reset();
}

// Hybrid sharding: ranks that hold the same shard add theirs in rank order.
void Engine::Impl::sum_over(BucketState& b, Communicator& comm, std::int64_t elements, float factor,
                            float* values, std::string_view label) {
  const std::size_t bytes = static_cast<std::size_t>(elements) * sizeof(float);
  PooledBuffer all = pool.acquire(bytes * static_cast<std::size_t>(comm.size()));
  comm.all_gather({reinterpret_cast<const std::byte*>(values), bytes},
                  {all.data(), bytes * static_cast<std::size_t>(comm.size())},
                  payload_of(DType::kFp32, label))
      ->wait();
  device->decode_sum({.in = {.part = {Storage::kFp32, all.data(), nullptr},
                             .residual = {},
                             .count = comm.size(),
                             .part_bytes = static_cast<std::int64_t>(bytes)},
                      .factor = factor,
                      .out = values,
                      .elements = elements,
                      .block = b.accumulator_layout.block});
}

void Engine::Impl::finish_reduction(BucketState& b) {
  const float factor = gradient_factor(b);
  if (b.direct) {
    b.gradient = {b.accumulator_layout.view(b.accumulator.data(), 0),
                  b.accumulator_layout.residual_view(b.accumulator.data(), 0), factor};
    return;
  }
  float* values = b.reduced_values();
  float* shard = values + (b.shard_begin - b.state_begin);
  const std::int64_t n = b.shard_end - b.shard_begin;
  sum_shard(b, b.replica_comm != nullptr ? 1.0f : factor, shard);
  if (b.replica_comm != nullptr) {
    sum_over(b, *b.replica_comm, n, factor, shard, "gradient sum over shard groups");
  }
  if (b.state_elements() != n) {  // stage 0: every rank updates everything
    const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
    b.shard_comm
        ->all_gather({reinterpret_cast<const std::byte*>(shard), bytes},
                     {reinterpret_cast<std::byte*>(values),
                      static_cast<std::size_t>(b.state_elements()) * sizeof(float)},
                     payload_of(DType::kFp32, "reduced gradient all-gather"))
        ->wait();
  }
  b.gradient = {{Storage::kFp32, values, nullptr}, {}, 1.0f};
}

// Copies of a tied parameter on other stages: added in stage order, by name so that all stages
// agree.
void Engine::Impl::sum_tied() {
  std::map<std::string, BucketState*> tied;
  for (BucketState& b : buckets) {
    if (b.tied_comm != nullptr) tied[b.bucket->tied] = &b;
  }
  for (auto& [name, b] : tied) {
    sum_over(*b, *b->tied_comm, b->state_elements(), 1.0f, b->reduced_values(),
             "tied gradient sum over stages");
  }
}

void Engine::Impl::reduce_gradients() {
  if (reduced) return;
  end_open_micro_batch();
  agree_on_use();  // before sums take the place of what was accumulated
  for (BucketState& b : buckets) {
    start_reduction(b);
    if (!settings.overlap_comm) finish_reduction(b);
  }
  if (settings.overlap_comm) {
    send_across_nodes();
    for (BucketState& b : buckets) finish_reduction(b);
  }
  sum_tied();
  device_step ? agree_on_device() : agree();
  reduced = true;
}

}  // namespace zerofp8
