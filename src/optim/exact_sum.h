// A sum of non-negative float64 numbers without rounding, so that the norm has the same bits for
// any order, number of ranks and layout. Fixed-point limbs of 32 bits in 64-bit words (a small
// Kulisch accumulator: U. Kulisch, Computer Arithmetic and Validity, 2008), wide enough for 2^31
// additions of sums of squares of FP32 numbers: bits 2^-352 .. 2^351.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace zerofp8 {

class ExactSum {
 public:
  static constexpr int kLimbs = 22;
  static constexpr int kLowest = -352;  // exponent of the lowest bit
  using Limbs = std::array<std::int64_t, kLimbs>;

  // `x` finite and >= 0. What lies below 2^-352 is dropped (no square of an FP32 number does).
  void add(double x) {
    std::uint64_t u;
    std::memcpy(&u, &x, sizeof u);
    const int biased = static_cast<int>(u >> 52);
    if (biased == 0) return;  // zero; a float64 subnormal is far below 2^-352
    std::uint64_t mantissa = (u & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
    int shift = biased - 1075 - kLowest;
    if (shift < 0) {
      if (shift <= -53) return;
      mantissa >>= -shift;
      shift = 0;
    }
    const int limb = shift / 32;
    const int bit = shift % 32;
    if (limb > kLimbs - 3) {
      overflow_ = 1;
      return;
    }
    const std::uint64_t low = (mantissa & 0xFFFFFFFFu) << bit;
    const std::uint64_t high = (mantissa >> 32) << bit;
    limbs_[limb] += static_cast<std::int64_t>(low & 0xFFFFFFFFu);
    limbs_[limb + 1] += static_cast<std::int64_t>((low >> 32) + (high & 0xFFFFFFFFu));
    limbs_[limb + 2] += static_cast<std::int64_t>(high >> 32);
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
