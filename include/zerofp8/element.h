// Element functions of the number formats: the one text of each codec, compiled for the host (base,
// x86-64-v3, x86-64-v4) and, by nvcc, for devices. Branch-free, explicit fma, no library calls.
//
//   std::uint32_t code = encode_nearest<DType::kE4m3>(x);     // x already divided by the block's
//   scale float back = decode<DType::kE4m3>(code);
//
// Conventions (sources: see dtype.h):
//  - finite values beyond the largest finite one saturate; NaN stays NaN; an infinity becomes the
//    format's infinity, or NaN where it has none: never the largest finite value;
//  - nearest is round-to-nearest-even; stochastic rounds up with the probability of the remainder,
//    from 16 random bits r16 taken at the middle of their interval (bias at most 2^-17 ulp);
//  - no intermediate is an fp32 subnormal unless the input is one, so nothing here depends on
//    flush-to-zero modes except for inputs below 2^-126.
#pragma once

#include <cstdint>
#include <cstring>

#include "zerofp8/dtype.h"

#if defined(__CUDACC__)
#define ZEROFP8_HD __host__ __device__ __forceinline__
#else
#define ZEROFP8_HD static inline __attribute__((always_inline))
#endif

namespace zerofp8::element {

inline constexpr std::uint32_t kAbsMask = 0x7FFFFFFFu;
inline constexpr std::uint32_t kInfBits = 0x7F800000u;

ZEROFP8_HD std::uint32_t bits_of(float x) {
  std::uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
ZEROFP8_HD float float_of(std::uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}
ZEROFP8_HD std::uint32_t min_u32(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
ZEROFP8_HD std::uint32_t max_u32(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

ZEROFP8_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
ZEROFP8_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
ZEROFP8_HD float sqrt_rn(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

// A format with 8 or 16 bits, `kM` mantissa bits and exponent bias `kBias`, seen from fp32.
template <DType kDtype>
struct Mini {
  static constexpr const FormatInfo& kInfo = kFormats[static_cast<int>(kDtype)];
  static constexpr int kM = kInfo.mantissa_bits;
  static constexpr int kBias = kInfo.bias;
  static constexpr int kShift = 23 - kM;  // fp32 mantissa bits dropped
  static constexpr std::uint32_t kSignBit = kInfo.has_sign ? 1u << (kInfo.bytes * 8 - 1) : 0u;
  static constexpr int kSignShift = 32 - kInfo.bytes * 8;  // to the sign of fp32
  static constexpr std::uint32_t kRebias = std::uint32_t(127 - kBias) << 23;
  static constexpr std::uint32_t kMinNormal = std::uint32_t(128 - kBias)
                                              << 23;      // fp32 bits of 2^(1-bias)
  static constexpr std::uint32_t kNormalCode = 1u << kM;  // first normal code
  // Largest finite code: all ones for UE4M4, one below NaN for E4M3, one below infinity otherwise.
  static constexpr std::uint32_t kMaxCode =
      kDtype == DType::kUe4m4  ? 0xFFu
      : kDtype == DType::kE4m3 ? 0x7Eu
                               : ((1u << (kInfo.exponent_bits + kM)) - kNormalCode - 1u);
  static constexpr std::uint32_t kMaxBits = (kMaxCode << kShift) + kRebias;
  static constexpr std::uint32_t kNanCode = kDtype == DType::kE4m3 ? 0x7Fu
                                            : kDtype == DType::kUe4m4
                                                ? 0xFFu
                                                : kMaxCode + 1u + kNormalCode / 2u;
  static constexpr std::uint32_t kInfCode = kInfo.has_infinity ? kMaxCode + 1u : kNanCode;
  // 1.5 * 2^23 ulps of the subnormals: adding it rounds a float to a whole number of them.
  static constexpr std::uint32_t kMagic =
      (std::uint32_t(127 + 23 + 1 - kBias - kM) << 23) | 0x400000u;
};

// Magnitude code of a saturated, finite, non-negative fp32 magnitude given as bits.
template <DType kDtype>
ZEROFP8_HD std::uint32_t magnitude_nearest(std::uint32_t sat) {
  using F = Mini<kDtype>;
  constexpr std::uint32_t half = (1u << (F::kShift - 1)) - 1u;
  const std::uint32_t normal = (sat + half + ((sat >> F::kShift) & 1u) - F::kRebias) >> F::kShift;
  const std::uint32_t sub = bits_of(float_of(sat) + float_of(F::kMagic)) - F::kMagic;
  return sat < F::kMinNormal ? sub : normal;
}

// Stochastic below the smallest normal value: floor(x / ulp + u) in fixed point with 17 fraction
// bits, u = (2 r16 + 1) / 2^17. In floating point the sum of a large fp16 subnormal and a draw
// would itself be rounded and could move a representable value.
template <DType kDtype>
ZEROFP8_HD std::uint32_t magnitude_stochastic_subnormal(std::uint32_t sat, std::uint32_t r16) {
  using F = Mini<kDtype>;
  const float fixed_one = float_of(std::uint32_t(127 + 17 - (1 - F::kBias - F::kM)) << 23);
  const float fixed = float_of(min_u32(sat, F::kMinNormal)) * fixed_one;  // below 2^28
  return (static_cast<std::uint32_t>(static_cast<std::int32_t>(fixed)) + 2u * r16 + 1u) >> 17;
}

template <DType kDtype>
ZEROFP8_HD std::uint32_t magnitude_stochastic(std::uint32_t sat, std::uint32_t r16) {
  using F = Mini<kDtype>;
  // 16 random bits stretched (or cut) to the number of dropped bits, at the middle of their
  // interval.
  constexpr int up = F::kShift - 16;
  const std::uint32_t dither = up > 0 ? (r16 << (up > 0 ? up : 0)) | (1u << (up > 0 ? up - 1 : 0))
                                      : r16 >> (up < 0 ? -up : 0);
  const std::uint32_t normal = (sat + dither - F::kRebias) >> F::kShift;
  const std::uint32_t sub = magnitude_stochastic_subnormal<kDtype>(sat, r16);
  return min_u32(sat < F::kMinNormal ? sub : normal, F::kMaxCode);
}

template <DType kDtype>
ZEROFP8_HD std::uint32_t finish_code(std::uint32_t u, std::uint32_t magnitude) {
  using F = Mini<kDtype>;
  const std::uint32_t a = u & kAbsMask;
  const std::uint32_t finite =
      a < kInfBits ? magnitude : (a == kInfBits ? F::kInfCode : F::kNanCode);
  return finite | ((u >> F::kSignShift) & F::kSignBit);
}

// bf16 is the upper half of fp32: no saturation (an overflow of rounding is infinity, as in IEEE
// 754).
ZEROFP8_HD std::uint32_t encode_bf16_nearest(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (u & kAbsMask) > kInfBits ? ((u >> 16) | 0x40u) : rounded;
}
ZEROFP8_HD std::uint32_t encode_bf16_stochastic(float x, std::uint32_t r16) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t rounded = (u + r16) >> 16;
  return (u & kAbsMask) >= kInfBits ? ((u >> 16) | ((u & 0x7FFFFFu) != 0u ? 0x40u : 0u)) : rounded;
}

template <DType kDtype>
ZEROFP8_HD std::uint32_t encode_nearest(float x) {
  if constexpr (kDtype == DType::kBf16) return encode_bf16_nearest(x);
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sat = min_u32(u & kAbsMask, Mini<kDtype>::kMaxBits);
  return finish_code<kDtype>(u, magnitude_nearest<kDtype>(sat));
}
template <DType kDtype>
ZEROFP8_HD std::uint32_t encode_stochastic(float x, std::uint32_t r16) {
  if constexpr (kDtype == DType::kBf16) return encode_bf16_stochastic(x, r16);
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sat = min_u32(u & kAbsMask, Mini<kDtype>::kMaxBits);
  return finish_code<kDtype>(u, magnitude_stochastic<kDtype>(sat, r16));
}
// Nearest for normal codes, stochastic below: first moments, whose subnormals would never decay.
template <DType kDtype>
ZEROFP8_HD std::uint32_t encode_mixed(float x, std::uint32_t r16) {
  if constexpr (kDtype == DType::kBf16)
    return encode_bf16_nearest(x);  // no gradual underflow to stall
  using F = Mini<kDtype>;
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sat = min_u32(u & kAbsMask, F::kMaxBits);
  const std::uint32_t magnitude = sat < F::kMinNormal
                                      ? magnitude_stochastic_subnormal<kDtype>(sat, r16)
                                      : magnitude_nearest<kDtype>(sat);
  return finish_code<kDtype>(u, magnitude);
}

template <DType kDtype>
ZEROFP8_HD float decode(std::uint32_t code) {
  if constexpr (kDtype == DType::kBf16) return float_of(code << 16);
  using F = Mini<kDtype>;
  const std::uint32_t mag = F::kSignBit ? code & (F::kSignBit - 1u) : code;
  const std::uint32_t sign = (code & F::kSignBit) << F::kSignShift;
  const std::uint32_t normal = (mag << F::kShift) + F::kRebias;
  // Subnormal: 2^(1-bias) * (1 + mag / 2^M) - 2^(1-bias), exact and without fp32 subnormals.
  const float min_normal = float_of(F::kMinNormal);
  const std::uint32_t sub = bits_of(float_of((mag << F::kShift) + F::kMinNormal) - min_normal);
  std::uint32_t u = mag < F::kNormalCode ? sub : normal;
  if constexpr (kDtype == DType::kE4m3) u = mag == 0x7Fu ? 0x7FC00000u : u;
  if constexpr (F::kInfo.has_infinity) {
    u = mag > F::kMaxCode ? (mag == F::kInfCode ? kInfBits : 0x7FC00000u) : u;
  }
  return float_of(u | sign);
}

// Plain IEEE fp16 for weights and wire: rounding beyond 65504 gives infinity, not saturation.
ZEROFP8_HD std::uint32_t encode_fp16_ieee(float x) {
  const std::uint32_t a = bits_of(x) & kAbsMask;
  const std::uint32_t code = encode_nearest<DType::kFp16>(x);
  const std::uint32_t overflow = a >= 0x477FF000u && a <= kInfBits;  // 65520 rounds to infinity
  return overflow ? ((code & 0x8000u) | 0x7C00u) : code;
}

// Stochastic rounding into IEEE fp16: whatever lies beyond 65504 is infinity, never 65504.
ZEROFP8_HD std::uint32_t encode_fp16_ieee_stochastic(float x, std::uint32_t r16) {
  const std::uint32_t a = bits_of(x) & kAbsMask;
  const std::uint32_t code = encode_stochastic<DType::kFp16>(x, r16);
  return a > 0x477FE000u && a <= kInfBits ? ((code & 0x8000u) | 0x7C00u) : code;
}

// Scale of one block and its inverse; x * inverse is what gets encoded, code value * scale comes
// back.
struct BlockScale {
  float scale;
  float inverse;
};

// FP8 formats: scale = amax / max_finite (FP32, from this block's own amax). amax is floored so
// that the inverse stays at most 2^127 (an all-zero block encodes to zeros at any scale), and kept
// a little below FLT_MAX so that max_finite * scale does not round to infinity.
template <DType kDtype>
ZEROFP8_HD BlockScale fp8_block_scale(std::uint32_t amax_bits) {
  const float max_finite = float_of(Mini<kDtype>::kMaxBits);
  const float floor_amax = max_finite * 0x1p-127f;
  const std::uint32_t limited = amax_bits < kInfBits ? min_u32(amax_bits, 0x7F7FFFFCu) : amax_bits;
  const float amax = float_of(max_u32(limited, bits_of(floor_amax)));
  return {div_rn(amax, max_finite), div_rn(max_finite, amax)};
}

// fp16 blocks: a power of two that brings amax into (2^14, 2^15]; above 2^127 into (2^15, 2^16),
// where saturation at 65504 keeps FLT_MAX from coming back as infinity.
ZEROFP8_HD BlockScale fp16_block_scale(std::uint32_t amax_bits) {
  const std::uint32_t ceil_exponent = min_u32(max_u32((amax_bits + 0x7FFFFFu) >> 23, 16u), 254u);
  return {float_of((ceil_exponent - 15u) << 23), float_of((269u - ceil_exponent) << 23)};
}

}  // namespace zerofp8::element
