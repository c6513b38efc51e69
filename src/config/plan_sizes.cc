// The arithmetic that plan and engine share: stored bytes, message bytes, and who keeps what.
#include <fmt/format.h>

#include <algorithm>

#include "zerofp8/error.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

bool is_block_scaled(Component component, DType dtype) {
  switch (component) {
    case Component::kAccumulator:
    case Component::kExpAvg:
    case Component::kExpAvgSq:
      return is_fp8(dtype) || dtype == DType::kFp16;
    case Component::kReducedGradient:
    case Component::kMaster:
    case Component::kTransient:
      return false;
  }
  return false;
}

std::int64_t stored_bytes(Component component, DType dtype, std::int64_t elements, int block_size) {
  std::int64_t bytes = elements * bytes_of(dtype);
  if (is_block_scaled(component, dtype)) bytes += round_up(elements, block_size) / block_size * 4;
  return bytes;
}

int master_bytes(MasterWeights master, DType weight) {
  if (weight == DType::kFp32) return 0;
  constexpr int kBytes[] = {0, 1, 2, 4};
  return kBytes[static_cast<int>(master)];
}

int reduction_ranks(const Settings& s) {
  return s.stage == 0 ? s.launch.data_ranks : s.shard_ranks.value;
}

bool is_hybrid(const Settings& s) { return s.stage > 0 && s.shard_ranks < s.launch.data_ranks; }

bool is_two_level(const Settings& s) { return s.ranks_per_node > 1; }

bool moments_are_quantised(const Settings& s) {
  return s.exp_avg != DType::kFp32 || s.exp_avg_sq != DType::kFp32;
}

bool reduced_gradient_needs_buffer(const Settings& s) {
  // A sharded accumulator already holds reduced gradients, but the sum over replicas is FP32.
  if (s.accumulation_sharded) return is_hybrid(s);
  if (s.accumulation == DType::kFp32) return false;  // the reduced shard overwrites it
  // One rank whose wire format is the accumulator's: nothing changes on the way. fp16 does change,
  // its accumulator has block scales and its wire has not.
  const bool unchanged = s.gradient_wire.value == s.accumulation.value;
  return !(s.launch.data_ranks == 1 && unchanged && s.accumulation != DType::kFp16);
}

std::int64_t gradient_message_bytes(const Settings& s, std::int64_t elements) {
  std::int64_t bytes = elements * bytes_of(s.gradient_wire);
  if (!is_fp8(s.gradient_wire)) return bytes;
  bytes += round_up(elements, s.block_size) / s.block_size * 4;
  // Only an accumulator that is sent as it is takes its residual along: a sharded one is fed by the
  // wire, another format is encoded anew from the sum of both, and so is a node's sum.
  const bool as_it_is =
      !s.accumulation_sharded && !is_two_level(s) && s.gradient_wire.value == s.accumulation.value;
  return s.error_feedback && as_it_is ? 2 * bytes : bytes;
}

TemporaryBytes temporary_bytes(const Settings& s, const ModelSize& size) {
  const std::int64_t ranks = reduction_ranks(s);
  if (ranks == 1) return {};
  const std::int64_t bucket = std::min(size.local_elements, s.reduce_bucket_size.value);
  const std::int64_t nodes = ranks / s.ranks_per_node;
  const std::int64_t messages = nodes * gradient_message_bytes(s, bucket / ranks);
  TemporaryBytes bytes{.per_bucket = messages};  // received
  // A local accumulator in the wire's own format is sent from where it is.
  const bool in_place = !s.accumulation_sharded && !is_two_level(s) &&
                        s.gradient_wire.value == s.accumulation.value &&
                        s.accumulation != DType::kFp16;
  if (!in_place) bytes.per_bucket += messages;
  // A micro-batch is summed in FP32 before it is encoded for a sharded accumulator.
  if (s.accumulation_sharded && s.gradient_wire != DType::kFp32) bytes.per_bucket += 4 * bucket;
  if (is_two_level(s)) bytes.per_bucket += 2 * bucket * bytes_of(s.in_node_wire);
  const std::int64_t gathered = std::min(size.local_elements, s.allgather_bucket_size.value);
  if (s.stage > 0 && s.shard_ranks > 1) bytes.weights = gathered * bytes_of(s.weight_wire);
  return bytes;
}

ModelSize uniform_size(std::int64_t parameters, const Settings& s) {
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  if (parameters < 1 || parameters > kMost) {
    throw ArgumentError(fmt::format("{} parameters: must be between 1 and 2^50", parameters));
  }
  const std::int64_t unit = std::int64_t{reduction_ranks(s)} * s.block_size * kShardBlocks;
  ModelSize size{.parameters = parameters, .local_elements = round_up(parameters, unit)};
  size.shard_elements = size.local_elements / s.shard_ranks;
  size.buckets = (size.local_elements - 1) / s.reduce_bucket_size + 1;
  return size;
}

}  // namespace zerofp8
