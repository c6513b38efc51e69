// What kernels leave in device memory for the host, which fetches all of it at once at the
// boundary: the largest values of gradients and sums per parameter, the norm's exact sum, and the
// largest fp16 weight so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/exact_limbs.h"
#include "src/optim/exact_sum.h"
#include "zerofp8/device.h"

namespace zerofp8 {

class DeviceWords {
 public:
  DeviceWords(Device& device, std::size_t parameters)
      : device_(device),
        parameters_(parameters),
        host_(2 * kLimbBytes + (2 * parameters + 2) * sizeof(std::uint32_t)),
        memory_(device.allocator(), Component::kTransient, host_.size()) {
    device_.zero(memory_.data(), memory_.size());
  }

  // In device memory. Maxima are of |x|, as bits.
  std::int64_t* norm() { return memory_.as<std::int64_t>(); }
  std::int64_t* not_counted() { return norm() + ExactLimbs::kWords; }  // sums that nobody asks for
  std::uint32_t* given(int parameter) { return maxima() + 2 + 2 * parameter; }
  std::uint32_t* received(int parameter) { return given(parameter) + 1; }
  std::uint32_t* weight() { return maxima(); }
  std::uint32_t* next_weight() { return maxima() + 1; }  // of a pass that only looks

  // A new step: all but the weights.
  void start_step() {
    device_.zero(memory_.data(), 2 * kLimbBytes);
    device_.zero(given(0), 2 * parameters_ * sizeof(std::uint32_t));
  }
  void forget_weights() { device_.zero(weight(), sizeof(std::uint32_t)); }
  void forget_next_weights() { device_.zero(next_weight(), sizeof(std::uint32_t)); }

  void fetch() { device_.download(host_.data(), memory_.data(), host_.size()); }
  // As of the last fetch.
  ExactSum sum() const {
    std::int64_t words[ExactLimbs::kWords];
    std::memcpy(words, host_.data(), sizeof words);
    return ExactSum(words);
  }
  bool bad_given(std::size_t parameter) const { return not_finite(word(2 + 2 * parameter)); }
  bool bad_received(std::size_t parameter) const { return not_finite(word(3 + 2 * parameter)); }
  float largest_weight() const { return value(word(0)); }
  float largest_next_weight() const { return value(word(1)); }

 private:
  static constexpr std::size_t kLimbBytes = ExactLimbs::kWords * sizeof(std::int64_t);

  std::uint32_t* maxima() {
    return reinterpret_cast<std::uint32_t*>(memory_.data() + 2 * kLimbBytes);
  }
  std::uint32_t word(std::size_t i) const {
    std::uint32_t bits;
    std::memcpy(&bits, host_.data() + 2 * kLimbBytes + i * sizeof bits, sizeof bits);
    return bits;
  }
  static float value(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

  Device& device_;
  std::size_t parameters_;
  std::vector<std::byte> host_;
  Buffer memory_;
};

}  // namespace zerofp8
