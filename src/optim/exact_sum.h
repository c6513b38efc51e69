// A sum of non-negative float64 numbers without rounding, so that the norm has the same bits for
// any order, number of ranks and layout; see kernels/exact_limbs.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/step_element.h"

namespace zerofp8 {

class ExactSum {
 public:
  ExactSum() = default;
  // From the words that a device has summed.
  explicit ExactSum(const std::int64_t* words) {
    std::copy_n(words, words_.size(), words_.begin());
    carry_exactly(words_.data());
  }

  // `x` finite and >= 0.
  void add(double x) {
    add_exactly(words_.data(), x);
    carry_exactly(words_.data());
  }

  void add(const ExactSum& other) {
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] += other.words_[i];
    carry_exactly(words_.data());
  }

  // Within one unit in the last place of float64, and the same bits for the same set of summands.
  double value() const { return element::exact_value(words_.data()); }

 private:
  std::array<std::int64_t, ExactLimbs::kWords> words_{};  // carried
};

}  // namespace zerofp8
