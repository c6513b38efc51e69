// Whole tensors for callers: gradient, master, moments, gathered over the ranks that hold them.
#include <cstring>

#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"

namespace zerofp8 {

void Engine::Impl::decode_state(const BucketState& b, const Segment& s, std::int64_t at,
                                StateKind kind, float* out) {
  const int block = settings.block_size;
  std::vector<float> values(static_cast<std::size_t>(s.padded));
  switch (kind) {
    case StateKind::kGradient: {
      if (b.gradient.main.codes == nullptr) break;
      const View rest = b.gradient.residual ? b.gradient.residual.at(at, block) : View{};
      const View main = b.gradient.main.at(at, block);
      ops->decode_sum(&main, rest ? &rest : nullptr, 1, b.gradient.factor, values.data(), s.padded,
                      block);
      break;
    }
    case StateKind::kMaster: {
      const auto* weight = static_cast<const std::byte*>(parameters[s.parameter].weight) +
                           s.parameter_offset * bytes_of(b.bucket->dtype);
      ops->join_master(b.bucket->dtype, weight, b.master_bits,
                       b.master.data() + at * b.master_bits / 8, values.data(), s.elements);
      break;
    }
    case StateKind::kExpAvg:
      ops->decode(b.exp_avg.at(at, block), values.data(), s.padded, block);
      break;
    case StateKind::kExpAvgSq: {
      ops->decode(b.exp_avg_sq.at(at, block), values.data(), s.padded, block);
      if (b.exp_avg_sq.storage == Storage::kFp32) break;
      for (float& r : values) r *= r;
      break;
    }
  }
  std::memcpy(out, values.data(), static_cast<std::size_t>(s.elements) * sizeof(float));
}

std::vector<float> Engine::Impl::full_state(int parameter, StateKind kind) {
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    throw ArgumentError("full_state: no parameter " + std::to_string(parameter));
  }
  std::vector<float> values(static_cast<std::size_t>(parameters[parameter].spec.numel()));
  const Partition::Home home = partition.homes[parameter];
  if (home.bucket < 0) return values;
  const BucketState& b = buckets[home.bucket];
  // Each element from one owner only, so that adding integers (zeros elsewhere) copies bits.
  if (b.first_replica) {
    for (const Segment& s : b.shard_segments) {
      if (s.parameter != parameter) continue;
      decode_state(b, s, s.offset + b.shard_begin - b.state_begin, kind,
                   values.data() + s.parameter_offset);
    }
  }
  static_assert(sizeof(float) == sizeof(std::int32_t));
  std::vector<std::int32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  b.reduce_comm->all_reduce(std::span<std::int32_t>(bits), ReduceOp::kSum);
  std::memcpy(values.data(), bits.data(), values.size() * sizeof(float));
  return values;
}

}  // namespace zerofp8
