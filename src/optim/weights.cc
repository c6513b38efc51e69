// Weights that were written from outside, and the masters that have to follow them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"

namespace zerofp8 {

std::byte* Engine::Impl::weight_of(const BucketState& b, const Segment& s) const {
  return static_cast<std::byte*>(parameters[s.parameter].weight) +
         s.parameter_offset * bytes_of(b.bucket->dtype);
}

// The masters of elements [begin, begin + n) of a segment become what the weights are.
void Engine::Impl::reset_masters(BucketState& b, const Segment& s, std::int64_t begin,
                                 std::int64_t n) {
  std::byte* master = b.master.data() + (s.offset + begin) * b.master_bits / 8;
  if (b.master_bits == 32) {
    const std::byte* weight = weight_of(b, s) + begin * bytes_of(b.bucket->dtype);
    ops->join_master(b.bucket->dtype, weight, 0, nullptr, reinterpret_cast<float*>(master), n);
  } else {  // remainder bits
    std::memset(master, 0, static_cast<std::size_t>(n * b.master_bits / 8));
  }
}

void Engine::Impl::reset_masters() {
  for (BucketState& b : buckets) {
    if (b.master_bits == 0) continue;
    for (const Segment& s : b.state_segments) reset_masters(b, s, 0, s.elements);
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
    max_weight = std::max(max_weight, largest_fp16_weight(b, s));
    if (b.master_bits == 0) continue;
    Buffer& kept = kept_weights[parameter];
    const std::byte* now = weight_of(b, s);
    if (kept.data() == nullptr) {
      kept = Buffer(allocator, Component::kTransient, static_cast<std::size_t>(s.elements) * bytes);
      reset_masters(b, s, 0, s.elements);
    } else {
      for (std::int64_t i = 0; i < s.elements; ++i) {
        const auto at = static_cast<std::size_t>(i) * bytes;
        if (std::memcmp(now + at, kept.data() + at, bytes) != 0) reset_masters(b, s, i, 1);
      }
    }
    std::memcpy(kept.data(), now, static_cast<std::size_t>(s.elements) * bytes);
  }
  if (b.master_bits != 0 && !told_of_writes && data_rank() == 0) {
    told_of_writes = true;
    log(fmt::format(
        "zerofp8: parameter \"{}\" was written from outside the optimizer; master weights follow, "
        "and a copy of its weights is kept from now on (told once, for the first such parameter)",
        parameters[parameter].spec.name));
  }
}

// After an update: what was written from outside before may be again.
void Engine::Impl::keep_weights() {
  for (BucketState& b : buckets) {
    for (const Segment& s : b.state_segments) {
      Buffer& kept = kept_weights[s.parameter];
      if (kept.data() == nullptr) continue;
      std::memcpy(kept.data(), weight_of(b, s),
                  static_cast<std::size_t>(s.elements * bytes_of(b.bucket->dtype)));
    }
  }
}

// max |w| of a segment of fp16 weights; 0 for other dtypes.
float Engine::Impl::largest_fp16_weight(const BucketState& b, const Segment& s) const {
  if (b.bucket->dtype != DType::kFp16) return 0;
  std::vector<float> values(static_cast<std::size_t>(s.elements));
  ops->join_master(DType::kFp16, weight_of(b, s), 0, nullptr, values.data(), s.elements);
  float largest = 0;
  for (const float x : values) largest = std::max(largest, std::abs(x));
  return largest;
}

// max |w| of this rank's fp16 weights: where the bound on overflow starts from.
void Engine::Impl::scan_fp16_weights() {
  max_weight = 0;
  for (const BucketState& b : buckets) {
    for (const Segment& s : b.state_segments) {
      max_weight = std::max(max_weight, largest_fp16_weight(b, s));
    }
  }
}

}  // namespace zerofp8
