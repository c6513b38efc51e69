// A sum of non-negative float64 numbers without rounding, so that the norm has the same bits for
// any order, number of ranks and layout. Up to 2^31 additions; see kernels/exact_limbs.h.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "kernels/exact_limbs.h"

namespace zerofp8 {

class ExactSum {
 public:
  static constexpr int kLimbs = ExactLimbs::kLimbs;
  static constexpr int kLowest = ExactLimbs::kLowest;
  using Limbs = std::array<std::int64_t, kLimbs>;

  ExactSum() = default;
  // From the words that a device has summed.
  explicit ExactSum(const std::int64_t* words) : overflow_(words[kLimbs] != 0) {
    for (int i = 0; i < kLimbs; ++i) limbs_[i] = words[i];
    carry();
  }

  // `x` finite and >= 0.
  void add(double x) {
    const ExactTerm term = element::exact_term(x);
    if (term.limb < 0) return;
    if (term.limb == kLimbs) {
      overflow_ = 1;
      return;
    }
    for (int i = 0; i < 3; ++i) limbs_[term.limb + i] += term.words[i];
    if (++pending_ == (1u << 29)) carry();
  }

  void add(const ExactSum& other) {
    carry();
    ExactSum normal = other;
    normal.carry();
    for (int i = 0; i < kLimbs; ++i) limbs_[i] += normal.limbs_[i];
    overflow_ |= normal.overflow_;
    carry();
  }

  // Within one unit in the last place of float64, and the same bits for the same set of summands.
  double value() const {
    if (overflow_) return INFINITY;
    ExactSum normal = *this;
    normal.carry();
    double sum = 0;
    for (int i = 0; i < kLimbs;
         ++i) {  // ascending: the high limbs absorb the rounding of the low ones
      sum += std::ldexp(static_cast<double>(normal.limbs_[i]), kLowest + 32 * i);
    }
    return sum;
  }

 private:
  // Brings every limb below the top into [0, 2^32).
  void carry() {
    for (int i = 0; i + 1 < kLimbs; ++i) {
      limbs_[i + 1] += limbs_[i] >> 32;
      limbs_[i] &= 0xFFFFFFFF;
    }
    pending_ = 0;
  }

  Limbs limbs_{};
  std::uint32_t pending_ = 0;
  std::uint32_t overflow_ = 0;
};

}  // namespace zerofp8
