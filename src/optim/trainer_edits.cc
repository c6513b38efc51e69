// What a trainer does to gradients after backward: some are thrown away, some are scaled.
#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {

using element::mix64;

ParameterState& Engine::Impl::editable(int parameter, const char* call) {
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    throw ArgumentError(fmt::format("{}: no parameter {}", call, parameter));
  }
  if (device_step && (reduced || settings.accumulation_sharded)) {
    throw ArgumentError(fmt::format(
        "{}: the gradient of parameter \"{}\" is part of a step that is decided on the device; "
        "allowed: engines that are not capturable",
        call, parameters[static_cast<std::size_t>(parameter)].spec.name));
  }
  return states[static_cast<std::size_t>(parameter)];
}

// Codes and scales: zero bytes are zeros in every storage.
void Engine::Impl::zero_gradient(const View& view, std::int64_t elements) {
  if (!view) return;
  device->zero(view.codes, static_cast<std::size_t>(elements * bytes_of(view.storage)));
  if (view.scales == nullptr) return;
  device->zero(view.scales,
               static_cast<std::size_t>(elements / settings.block_size) * sizeof(float));
}

void Engine::Impl::discard_gradient(int parameter, bool keep_zeros) {
  ParameterState& state = editable(parameter, "discard_gradient");
  const Partition::Home home = partition.homes[static_cast<std::size_t>(parameter)];
  const bool everywhere = reduced || settings.accumulation_sharded;
  if (settings.accumulation_sharded && !reduced && open_micro_batch) {
    throw ArgumentError(
        "discard_gradient: a micro-batch is open, whose gradients may be on their way; call "
        "end_micro_batch() before");
  }
  if (everywhere) {
    state.edits = mix64(
        state.edits ^ static_cast<std::uint64_t>(4 * micro_batches + 2 * reduced + keep_zeros + 1));
  }
  state.used = state.used && keep_zeros;
  state.used_anywhere = state.used_anywhere && keep_zeros;
  state.factor = 1;
  if (home.bucket < 0) return;
  BucketState& b = buckets[static_cast<std::size_t>(home.bucket)];
  const int block = settings.block_size;
  if (reduced) {
    for (const Segment& s : b.state_segments) {
      if (s.parameter != parameter) continue;
      zero_gradient(b.gradient.main.at(s.offset, block), s.padded);
      if (b.gradient.residual) zero_gradient(b.gradient.residual.at(s.offset, block), s.padded);
    }
    return;
  }
  // As if there had been none: the next one is rounded as the first.
  state.adds = state.flushes = 0;
  device->zero(words->given(parameter), sizeof(std::uint32_t));
  device->zero(words->received(parameter), sizeof(std::uint32_t));
  const PartLayout& layout = b.accumulator_layout;
  const auto zero = [&](int part, std::int64_t at, std::int64_t elements) {
    zero_gradient(layout.view(b.accumulator.data(), part, at), elements);
    zero_gradient(layout.residual_view(b.accumulator.data(), part, at), elements);
  };
  if (settings.accumulation_sharded) {
    for (const Segment& s : b.shard_segments) {
      if (s.parameter == parameter) zero(0, s.offset, s.padded);
    }
    return;
  }
  const Placement& place = b.bucket->placements[static_cast<std::size_t>(home.placement)];
  for (std::int64_t from = place.offset; from < place.offset + place.padded;) {
    const int part = static_cast<int>(from / layout.part_elements);
    const std::int64_t to =
        std::min(place.offset + place.padded, (part + 1) * layout.part_elements);
    zero(part, from - part * layout.part_elements, to - from);
    from = to;
  }
}

void Engine::Impl::scale_gradient(int parameter, double factor) {
  ParameterState& state = editable(parameter, "scale_gradient");
  if (!reduced) {
    throw ArgumentError(
        "scale_gradient: nothing is reduced; call reduce_gradients() before, and step() after it");
  }
  if (!std::isfinite(factor)) {
    throw ArgumentError(fmt::format("scale_gradient: given {}; allowed: a finite number", factor));
  }
  state.factor *= factor;
}

// 0 where nothing was done, which is usual.
std::uint64_t Engine::Impl::digest_of_edits() const {
  std::uint64_t digest = 0;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const ParameterState& s = states[i];
    if (s.factor == 1 && s.edits == 0) continue;
    digest = mix64(digest ^ mix64(i ^ mix64(s.edits ^ std::bit_cast<std::uint64_t>(s.factor))));
  }
  return digest;
}

// Called by all data ranks: the first parameter that data rank 0 and `other` treated differently.
std::string Engine::Impl::edits_that_differ(std::size_t other) const {
  struct Edit {
    double factor;
    std::uint64_t edits;
  };
  std::vector<Edit> mine;
  for (const ParameterState& s : states) mine.push_back({s.factor, s.edits});
  const std::size_t n = mine.size();
  std::vector<Edit> all(n * static_cast<std::size_t>(groups.data->size()));
  groups.data->gather_control(std::as_bytes(std::span(mine)),
                              std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < n; ++i) {
    const Edit& a = all[i];
    const Edit& b = all[other * n + i];
    const std::string& name = parameters[i].spec.name;
    if (a.edits != b.edits) {
      return fmt::format(
          "ranks disagree on this step: the gradient of parameter \"{}\" was discarded on one of "
          "data ranks 0 and {} only, or after another micro-batch; discard it on all of them",
          name, other);
    }
    if (a.factor != b.factor) {
      return fmt::format(
          "ranks disagree on this step: the gradient of parameter \"{}\" was multiplied by {} on "
          "data rank 0 and by {} on data rank {}; clip or scale alike on all of them",
          name, a.factor, b.factor, other);
    }
  }
  return "ranks disagree on what was done to this step's gradients";
}

// Copies of a tied parameter would drift apart.
std::string Engine::Impl::tied_edits_that_differ() const {
  std::map<std::string, const BucketState*> tied;
  for (const BucketState& b : buckets) {
    if (b.tied_comm != nullptr) tied[b.bucket->tied] = &b;
  }
  std::string fault;
  for (const auto& [name, b] : tied) {
    const int parameter = b->bucket->placements.front().parameter;
    const ParameterState& s = states[static_cast<std::size_t>(parameter)];
    const auto edits = static_cast<double>(s.edits >> 12);  // exact
    std::vector<double> ends{s.factor, -s.factor, edits, -edits};
    b->tied_comm->all_reduce(std::span(ends), ReduceOp::kMax);
    if (fault.empty() && (ends[0] != -ends[1] || ends[2] != -ends[3])) {
      fault = fmt::format(
          "the holders of the tied parameter \"{}\" disagree on this step: its gradient was "
          "multiplied by numbers from {} to {}, or discarded on some; do the same on all of them",
          name, -ends[1], ends[0]);
    }
  }
  return fault;
}

}  // namespace zerofp8
