// Whole tensors for callers: gradient, master, moments, gathered over the ranks that hold them.
#include <fmt/format.h>

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
    case StateKind::kMaster:
      ops->join_master(b.bucket->dtype, weight_of(b, s), b.master_bits,
                       b.master.data() + at * b.master_bits / 8, values.data(), s.elements);
      break;
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

std::vector<StatePiece> Engine::Impl::state_pieces() {
  std::vector<StatePiece> pieces;
  for (BucketState& b : buckets) {
    for (const Segment& s : b.state_segments) {
      for (const StoredTensor& t : stored_tensors(b, s, s.offset)) {
        if (t.component == "weight") continue;
        const auto bytes = static_cast<std::size_t>(t.items(s.elements) * t.item_bytes);
        pieces.push_back({s.parameter, fmt::format("{}@{}", t.component, s.parameter_offset),
                          t.dtype, std::span(t.data, bytes)});
      }
    }
  }
  return pieces;
}

StateCounters Engine::Impl::counters() const {
  const LossScaler::State state = scaler.state();
  StateCounters c{applied, skipped, state.scale, state.clean_steps, state.hysteresis_left, {}, {}};
  for (const ParameterState& p : states) {
    c.steps.push_back(p.step);
    c.guard_c.push_back(p.guard_c);
  }
  return c;
}

void Engine::Impl::restore_counters(const StateCounters& c) {
  if (c.steps.size() != states.size() || c.guard_c.size() != states.size()) {
    throw ArgumentError(fmt::format("restore_counters: given {} parameters; allowed: {}",
                                    c.steps.size(), states.size()));
  }
  applied = c.applied;
  skipped = c.skipped;
  scaler.restore({c.loss_scale, c.clean_steps, c.hysteresis_left});
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i].step = c.steps[i];
    states[i].guard_c = c.guard_c[i];
  }
  for (Buffer& kept : kept_weights) kept.reset();  // the weights that belong to this come apart
  scan_fp16_weights();
}

}  // namespace zerofp8
