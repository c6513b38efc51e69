// Where a float64 number falls in an exact, order-independent sum: three words of 32 bits added to
// 64-bit limbs (a small Kulisch accumulator: U. Kulisch, Computer Arithmetic and Validity, 2008),
// wide enough for sums of squares of FP32 numbers: bits 2^-352 .. 2^351.
#pragma once

#include <cstdint>
#include <cstring>

#include "zerofp8/element.h"

namespace zerofp8 {

struct ExactLimbs {
  static constexpr int kLimbs = 22;
  static constexpr int kLowest = -352;       // exponent of the lowest bit
  static constexpr int kWords = kLimbs + 1;  // the last one is not zero after an overflow
};

struct ExactTerm {
  int limb = -1;  // of words[0]; -1: nothing to add, kLimbs: too large
  std::uint32_t words[3] = {};
};

namespace element {

// `x` finite and >= 0. What lies below 2^-352 is dropped (no square of an FP32 number does).
ZEROFP8_HD ExactTerm exact_term(double x) {
  ExactTerm term;
  std::uint64_t u;
  memcpy(&u, &x, sizeof u);
  const int biased = static_cast<int>(u >> 52);
  if (biased == 0) return term;  // zero; a float64 subnormal is far below 2^-352
  std::uint64_t mantissa = (u & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
  int shift = biased - 1075 - ExactLimbs::kLowest;
  if (shift < 0) {
    if (shift <= -53) return term;
    mantissa >>= -shift;
    shift = 0;
  }
  const int limb = shift / 32;
  if (limb > ExactLimbs::kLimbs - 3) {
    term.limb = ExactLimbs::kLimbs;
    return term;
  }
  const std::uint64_t low = (mantissa & 0xFFFFFFFFu) << (shift % 32);
  const std::uint64_t high = (mantissa >> 32) << (shift % 32);
  const std::uint64_t middle = (low >> 32) + (high & 0xFFFFFFFFu);
  term.limb = limb;
  term.words[0] = static_cast<std::uint32_t>(low);
  term.words[1] = static_cast<std::uint32_t>(middle);
  term.words[2] = static_cast<std::uint32_t>((high >> 32) + (middle >> 32));
  return term;
}

}  // namespace element

// Of kWords words: one more summand (on the host; finite, >= 0; up to 2^31 of them between two
// carries), and every limb below the top back into [0, 2^32).
inline void add_exactly(std::int64_t* words, double x) {
  const ExactTerm term = element::exact_term(x);
  if (term.limb < 0) return;
  if (term.limb == ExactLimbs::kLimbs) {
    words[ExactLimbs::kLimbs] = 1;
    return;
  }
  for (int i = 0; i < 3; ++i) words[term.limb + i] += term.words[i];
}
ZEROFP8_HD void carry_exactly(std::int64_t* words) {
#if defined(__CUDACC__)
#pragma unroll 1  // unrolled, it would spill
#endif
  for (int i = 0; i + 1 < ExactLimbs::kLimbs; ++i) {
    words[i + 1] += words[i] >> 32;
    words[i] &= 0xFFFFFFFF;
  }
}

}  // namespace zerofp8
