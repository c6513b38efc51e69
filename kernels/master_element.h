// Masters split into a 16-bit weight and remainder bits beside it.
//
// bf16 weight + n bits (n = 8, 16) is the upper 16+n bits of an FP32 number: n = 16 is the FP32
// master exactly, n = 8 rounds it to nearest (24 bits). The weight is the half-away rounding of the
// master, so the remainder's top bit tells on which side of the weight the master lies.
//
// fp16 weight + n bits is a float of 5 exponent and 10 + n mantissa bits with gradual underflow.
// For n = 16: exact for 2^-17 <= |w| <= 65504, else an error of at most 2^-41; n = 8: 19
// significant bits, error at most 2^-33 below 2^-14. Values that round beyond 65504 become infinity
// (the caller skips).
#pragma once

#include "zerofp8/element.h"

namespace zerofp8::element {

struct SplitWeight {
  std::uint32_t weight;  // 16 bits
  std::uint32_t rest;    // n bits
};

// `wide` holds sign + magnitude in 16 + n bits, right-aligned; the weight rounds half away from
// zero.
template <int kBits>
ZEROFP8_HD SplitWeight split_wide(std::uint32_t wide) {
  const std::uint32_t rest = wide & ((1u << kBits) - 1u);
  return {((wide >> kBits) + (rest >> (kBits - 1))) & 0xFFFFu, rest};
}
template <int kBits>
ZEROFP8_HD std::uint32_t join_wide(std::uint32_t weight, std::uint32_t rest) {
  return ((weight - (rest >> (kBits - 1))) << kBits) | rest;
}

// FP32 -> the wide code of `kDtype` with 16 + kBits bits, round to nearest even.
template <DType kDtype, int kBits>
ZEROFP8_HD std::uint32_t wide_of(float x) {
  const std::uint32_t u = bits_of(x);
  if constexpr (kDtype == DType::kBf16) {
    // One NaN for all: a payload in the remainder would round the weight's bits up, past NaN to
    // zero.
    constexpr std::uint32_t nan = 0x7FC00000u >> (16 - kBits);
    if constexpr (kBits == 16) return (u & kAbsMask) > kInfBits ? nan : u;
    constexpr int drop = kBits == 16 ? 1 : 16 - kBits;
    const std::uint32_t rounded = (u + ((1u << (drop - 1)) - 1u) + ((u >> drop) & 1u)) >> drop;
    return (u & kAbsMask) > kInfBits ? nan : rounded;
  }
  // fp16: 5 exponent bits, kM mantissa bits.
  constexpr int kM = 10 + kBits;
  const std::uint32_t a = u & kAbsMask;
  std::uint32_t normal;
  if (kM >= 23) {
    normal = (a - (112u << 23)) << (kM >= 23 ? kM - 23 : 0);
  } else {
    constexpr int drop = kM >= 23 ? 1 : 23 - kM;
    normal = (a - (112u << 23) + ((1u << (drop - 1)) - 1u) + ((a >> drop) & 1u)) >> drop;
  }
  // Subnormal: |x| in units of 2^-(14 + kM), rounded to nearest even by adding 2^23 where it has
  // fraction bits; at 2^23 and above it is whole already.
  const float units =
      float_of(min_u32(a, 113u << 23)) * float_of(std::uint32_t(127 + 14 + kM) << 23);
  const float rounded = units < 0x1p23f ? (units + 0x1p23f) - 0x1p23f : units;
  const std::uint32_t sub = static_cast<std::uint32_t>(static_cast<std::int32_t>(rounded));
  constexpr std::uint32_t inf = 31u << kM;
  const std::uint32_t limited = min_u32(normal, inf);
  std::uint32_t mag = a < (113u << 23) ? sub : (a >= 0x47800000u ? inf : limited);
  mag = a > kInfBits ? inf + (1u << (kM - 1)) : mag;
  return mag | ((u >> 31) << (15 + kBits));
}

template <DType kDtype, int kBits>
ZEROFP8_HD float float_of_wide(std::uint32_t wide) {
  if constexpr (kDtype == DType::kBf16) return float_of(wide << (16 - kBits));
  constexpr int kM = 10 + kBits;
  const std::uint32_t sign = (wide >> (15 + kBits)) << 31;
  const std::uint32_t mag = wide & ((1u << (15 + kBits)) - 1u);
  // kM > 23 loses nothing: such codes came from FP32 values, whose extra bits are zero.
  const std::uint32_t normal =
      (kM >= 23 ? mag >> (kM >= 23 ? kM - 23 : 0) : mag << (kM >= 23 ? 0 : 23 - kM)) + (112u << 23);
  const float sub = static_cast<float>(static_cast<std::int32_t>(min_u32(mag, 1u << kM))) *
                    float_of(std::uint32_t(127 - 14 - kM) << 23);
  std::uint32_t u = mag < (1u << kM) ? bits_of(sub) : normal;
  u = mag >= (31u << kM) ? (mag == (31u << kM) ? kInfBits : 0x7FC00000u) : u;
  return float_of(u | sign);
}

template <DType kDtype, int kBits>
ZEROFP8_HD SplitWeight split_master(float master) {
  return split_wide<kBits>(wide_of<kDtype, kBits>(master));
}
template <DType kDtype, int kBits>
ZEROFP8_HD float join_master(std::uint32_t weight, std::uint32_t rest) {
  return float_of_wide<kDtype, kBits>(join_wide<kBits>(weight, rest));
}

}  // namespace zerofp8::element
