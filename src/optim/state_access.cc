// Whole tensors for callers: gradient, master, moments, gathered over the ranks that hold them.
#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "src/optim/adam_scalars.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"

namespace zerofp8 {

void Engine::Impl::decode_state(BucketState& b, const Segment& s, std::int64_t at, StateKind kind,
                                float* out) {
  const int block = settings.block_size;
  PooledBuffer values = pool.acquire(static_cast<std::size_t>(s.padded) * sizeof(float));
  const auto decode = [&](const View& main, const View& residual, float factor) {
    device->decode_sum({.in = {.part = main, .residual = residual},
                        .factor = factor,
                        .out = values.as<float>(),
                        .elements = s.padded,
                        .block = block});
  };
  switch (kind) {
    case StateKind::kGradient: {
      if (b.gradient.main.codes == nullptr) {
        std::memset(out, 0, static_cast<std::size_t>(s.elements) * sizeof(float));
        return;
      }
      const View rest = b.gradient.residual ? b.gradient.residual.at(at, block) : View{};
      decode(b.gradient.main.at(at, block), rest, b.gradient.factor);
      break;
    }
    case StateKind::kMaster:
      device->join_master({.dtype = b.bucket->dtype,
                           .weight = weight_of(b, s),
                           .master_bits = b.master_bits,
                           .rest = b.master.data() + at * b.master_bits / 8,
                           .values = values.as<float>(),
                           .elements = s.elements});
      break;
    case StateKind::kExpAvg:
      decode(b.exp_avg.at(at, block), {}, 1.0f);
      break;
    case StateKind::kExpAvgSq:
      decode(b.exp_avg_sq.at(at, block), {}, 1.0f);
      break;
  }
  device->download(out, values.data(), static_cast<std::size_t>(s.elements) * sizeof(float));
  if (kind != StateKind::kExpAvgSq || b.exp_avg_sq.storage == Storage::kFp32) return;
  for (std::int64_t i = 0; i < s.elements; ++i) out[i] *= out[i];
}

// The bytes themselves where the host can read them, else a copy in `memory`.
std::span<const std::byte> Engine::Impl::on_host(std::span<const std::byte> data,
                                                 std::vector<std::byte>& memory) {
  if (device->is_host()) return data;
  memory.resize(data.size());
  device->download(memory.data(), data.data(), data.size());
  return memory;
}

std::vector<float> Engine::Impl::full_state(int parameter, StateKind kind) {
  watch_replays();
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    throw ArgumentError("full_state: no parameter " + std::to_string(parameter));
  }
  std::vector<float> values(static_cast<std::size_t>(parameters[parameter].spec.numel()));
  const Partition::Home home = partition.homes[parameter];
  if (home.bucket < 0) return values;
  BucketState& b = buckets[home.bucket];
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

std::vector<OwnState> Engine::Impl::own_state(int parameter, StateKind kind) {
  watch_replays();
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    throw ArgumentError("own_state: no parameter " + std::to_string(parameter));
  }
  if (kind == StateKind::kGradient) {
    throw ArgumentError("own_state: given gradient; allowed: master, exp_avg, exp_avg_sq");
  }
  std::vector<OwnState> own;
  const Partition::Home home = partition.homes[parameter];
  if (home.bucket < 0) return own;
  BucketState& b = buckets[home.bucket];
  for (const Segment& s : b.state_segments) {
    if (s.parameter != parameter) continue;
    own.push_back({s.parameter_offset, std::vector<float>(static_cast<std::size_t>(s.elements))});
    decode_state(b, s, s.offset, kind, own.back().values.data());
  }
  return own;
}

void Engine::Impl::set_full_state(int parameter, StateKind kind, std::span<const float> values) {
  watch_replays();
  const auto fail = [](const std::string& text) { throw ArgumentError("set_full_state: " + text); };
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    fail("no parameter " + std::to_string(parameter));
  }
  const Parameter& p = parameters[static_cast<std::size_t>(parameter)];
  if (kind == StateKind::kGradient) fail("given a gradient; allowed: master, exp_avg, exp_avg_sq");
  if (static_cast<std::int64_t>(values.size()) != p.spec.numel()) {
    fail(fmt::format("given {} numbers for parameter \"{}\"; allowed: {}", values.size(),
                     p.spec.name, p.spec.numel()));
  }
  const Partition::Home home = partition.homes[static_cast<std::size_t>(parameter)];
  if (home.bucket < 0) return;
  BucketState& b = buckets[static_cast<std::size_t>(home.bucket)];
  const bool root = kind == StateKind::kExpAvgSq && b.exp_avg_sq.storage != Storage::kFp32;
  std::vector<float> stored(values.begin(), values.end());
  if (kind == StateKind::kExpAvgSq) {
    for (float& x : stored) {
      if (!(x >= 0)) fail(fmt::format("given {} in exp_avg_sq of \"{}\"", x, p.spec.name));
      if (root) x = std::sqrt(x);
    }
  }
  if (kind == StateKind::kMaster) {
    set_masters(b, parameter, stored);
    return;
  }
  const View& to = kind == StateKind::kExpAvg ? b.exp_avg : b.exp_avg_sq;
  for (const Segment& s : b.state_segments) {
    if (s.parameter != parameter) continue;
    const auto bytes = static_cast<std::size_t>(s.padded) * sizeof(float);
    PooledBuffer memory = pool.acquire(bytes);
    device->zero(memory.data(), bytes);
    device->upload(memory.data(), stored.data() + s.parameter_offset,
                   static_cast<std::size_t>(s.elements) * sizeof(float));
    device->recode({.in = {.part = {Storage::kFp32, memory.data(), nullptr}, .residual = {}},
                    .out = to.at(s.offset, settings.block_size),
                    .elements = s.padded,
                    .block = settings.block_size,
                    .stream = {}});
  }
  device->synchronize();
}

// Weights of the whole parameter, remainders of this rank's range.
void Engine::Impl::set_masters(BucketState& b, int parameter, std::span<const float> values) {
  const auto n = static_cast<std::int64_t>(values.size());
  PooledBuffer memory = pool.acquire(values.size_bytes());
  device->upload(memory.data(), values.data(), values.size_bytes());
  // Remainders of all of it, of which the range's are copied. 4 bytes hold any.
  PooledBuffer rest = pool.acquire(values.size_bytes());
  device->split_master({.dtype = b.bucket->dtype,
                        .weight = parameters[static_cast<std::size_t>(parameter)].weight,
                        .master_bits = b.master_bits,
                        .rest = rest.data(),
                        .values = memory.as<float>(),
                        .elements = n});
  for (const Segment& s : b.state_segments) {
    if (s.parameter != parameter || b.master_bits == 0) continue;
    device->copy(b.master.data() + s.offset * b.master_bits / 8,
                 rest.data() + s.parameter_offset * b.master_bits / 8,
                 static_cast<std::size_t>(s.elements * b.master_bits / 8));
  }
  device->synchronize();
  keep_weights();
  scan_fp16_weights();
}

// The guard's C_t follows from t alone: as if all steps had been made with these betas.
void Engine::Impl::set_step(int parameter, std::int64_t step) {
  if (parameter < 0 || parameter >= static_cast<int>(states.size()) || step < 0) {
    throw ArgumentError(fmt::format("set_step: given parameter {} and step {}", parameter, step));
  }
  read_counters();
  ParameterState& state = states[static_cast<std::size_t>(parameter)];
  const AdamOptions& h =
      hyper[static_cast<std::size_t>(parameters[static_cast<std::size_t>(parameter)].spec.group)];
  state.step = 0;
  state.guard_c = 0;
  while (state.step < step) advance(h, state.step, state.guard_c);
  write_counters();
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

StateCounters Engine::Impl::counters() {
  read_counters();
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
  write_counters();
  // The weights that belong to this come apart. A captured step writes to the copies: they stay.
  kept_is_old.assign(kept_is_old.size(), true);
  scan_fp16_weights();
}

}  // namespace zerofp8
