// Weights that were written from outside, and the masters that have to follow them.
#include <fmt/format.h>

#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"

namespace zerofp8 {

std::byte* Engine::Impl::weight_of(const BucketState& b, const Segment& s) const {
  return static_cast<std::byte*>(parameters[s.parameter].weight) +
         s.parameter_offset * bytes_of(b.bucket->dtype);
}

// The masters of a segment become what the weights are.
void Engine::Impl::reset_masters(BucketState& b, const Segment& s) {
  std::byte* master = b.master.data() + s.offset * b.master_bits / 8;
  if (b.master_bits == 32) {
    device->join_master({.dtype = b.bucket->dtype,
                         .weight = weight_of(b, s),
                         .values = reinterpret_cast<float*>(master),
                         .elements = s.elements});
  } else {  // remainder bits
    device->zero(master, static_cast<std::size_t>(s.elements * b.master_bits / 8));
  }
}

void Engine::Impl::reset_masters() {
  for (BucketState& b : buckets) {
    if (b.master_bits == 0) continue;
    for (const Segment& s : b.state_segments) reset_masters(b, s);
  }
  keep_weights();
  scan_fp16_weights();
}

// The first time a parameter is written to, all of its masters follow: which elements were changed
// is not known. From then on a copy of this rank's range tells, so that a loop that clamps, renorms
// or swaps weights does not take the masters of what it leaves alone.
void Engine::Impl::weight_changed(int parameter) {
  if (parameter < 0 || parameter >= static_cast<int>(parameters.size())) {
    throw ArgumentError("weight_changed: no parameter " + std::to_string(parameter));
  }
  const Partition::Home home = partition.homes[parameter];
  if (home.bucket < 0) return;
  BucketState& b = buckets[home.bucket];
  const auto bytes = static_cast<std::size_t>(bytes_of(b.bucket->dtype));
  for (const Segment& s : b.state_segments) {
    if (s.parameter != parameter) continue;
    note_fp16_weights(b, s);
    if (b.master_bits == 0) continue;
    Buffer& kept = kept_weights[parameter];
    const std::size_t size = static_cast<std::size_t>(s.elements) * bytes;
    if (kept.data() == nullptr || kept_is_old[static_cast<std::size_t>(parameter)]) {
      if (device->is_capturing()) {  // each replay would take all masters
        throw DeviceError(
            fmt::format("parameter \"{}\" was written from outside the optimizer since the last "
                        "step, and the next "
                        "one is being captured; make one ordinary step, then capture",
                        parameters[static_cast<std::size_t>(parameter)].spec.name));
      }
      if (kept.data() == nullptr) kept = Buffer(device->allocator(), Component::kTransient, size);
      reset_masters(b, s);
      device->copy(kept.data(), weight_of(b, s), size);
    } else {
      device->follow_weights({.dtype = b.bucket->dtype,
                              .weight = weight_of(b, s),
                              .kept = kept.data(),
                              .master_bits = b.master_bits,
                              .master = b.master.data() + s.offset * b.master_bits / 8,
                              .elements = s.elements});
    }
  }
  kept_is_old[static_cast<std::size_t>(parameter)] = false;
  written[static_cast<std::size_t>(parameter)] = true;
  if (b.master_bits != 0) tell_of_writes_between_replays(parameter);
  if (b.master_bits != 0 && !told_of_writes && data_rank() == 0) {
    told_of_writes = true;
    log(fmt::format(
        "zerofp8: parameter \"{}\" was written from outside the optimizer; master weights follow, "
        "and a copy of its weights is kept from now on (told once, for the first such parameter)",
        parameters[parameter].spec.name));
  }
}

// A captured step does not keep up a copy that was made after the capture.
void Engine::Impl::tell_of_writes_between_replays(int parameter) {
  const auto i = static_cast<std::size_t>(parameter);
  if (!captured || captured->known[i]) return;
  if (captured->written[i] && !captured->told) {
    captured->told = true;
    log(fmt::format(
        "zerofp8: parameter \"{}\" is written from outside the optimizer between replays of a step "
        "that was captured before the first such write: all of its masters follow each time; "
        "capture the step again, and those of untouched elements stay (told once)",
        parameters[i].spec.name));
  }
  captured->written[i] = true;
}

// After an update: what was written from outside before may be again.
void Engine::Impl::keep_weights() {
  for (BucketState& b : buckets) {
    for (const Segment& s : b.state_segments) {
      Buffer& kept = kept_weights[s.parameter];
      if (kept.data() == nullptr) continue;
      if (!device->is_capturing()) kept_is_old[static_cast<std::size_t>(s.parameter)] = false;
      device->copy(kept.data(), weight_of(b, s),
                   static_cast<std::size_t>(s.elements * bytes_of(b.bucket->dtype)));
    }
  }
}

// max |w| of a segment, into the word of the largest; other dtypes than fp16 have no need of it.
void Engine::Impl::note_fp16_weights(const BucketState& b, const Segment& s) {
  if (b.bucket->dtype != DType::kFp16) return;
  device->join_master({.dtype = DType::kFp16,
                       .weight = weight_of(b, s),
                       .elements = s.elements,
                       .amax = words->weight()});
}

// max |w| of this rank's fp16 weights: where the bound on overflow starts from.
void Engine::Impl::scan_fp16_weights() {
  words->forget_weights();
  for (const BucketState& b : buckets) {
    for (const Segment& s : b.state_segments) note_fp16_weights(b, s);
  }
}

}  // namespace zerofp8
