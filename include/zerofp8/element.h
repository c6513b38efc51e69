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
//    from 16 random bits r16 taken at the middle of their interval (bias at most 2^-17 ulp; for
//    fp16, which needs 13 bits only, 2^-14 ulp among subnormals);
//  - no intermediate is an fp32 subnormal unless the input is one, so nothing here depends on
//    flush-to-zero modes except for inputs below 2^-126;
//  - a choice between two expressions is made by min or max where one of them is always the
//  smaller: a
//    compare and a blend less in vector code.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "zerofp8/dtype.h"

#if defined(__CUDACC__)
#define ZEROFP8_HD static __host__ __device__ __forceinline__
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

template <DType kDtype>
using CodeOf = std::conditional_t<bytes_of(kDtype) == 1, std::uint8_t, std::uint16_t>;

// A format with 8 or 16 bits, `kM` mantissa bits and exponent bias `kBias`, seen from fp32.
template <DType kDtype>
struct Mini {
  static constexpr FormatInfo kInfo = kFormats[static_cast<int>(kDtype)];
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
  // Added to a power of two 2^E: 2^(E + kShift), whose last place is the format's step at 2^E, with
  // low bits that cancel those of kMinNormal >> kShift in the lowest 8 or 16 bits.
  static constexpr std::uint32_t kCodeMask = (1u << (kInfo.bytes * 8)) - 1u;
  static constexpr std::uint32_t kStep =
      (std::uint32_t(kShift) << 23) | ((0u - (kMinNormal >> kShift)) & kCodeMask);
  static_assert(kStep % 2 == 0, "ties must go to the even code");
};

// Magnitude code of a saturated, finite, non-negative fp32 magnitude given as bits; bits above the
// code are garbage. One FP32 addition rounds to a whole number of steps, those of 2^E or of the
// subnormals: the sum's low bits count them, and (E >> kShift) counts the codes of lower exponents.
template <DType kDtype>
ZEROFP8_HD std::uint32_t magnitude_nearest(std::uint32_t sat) {
  using F = Mini<kDtype>;
  const std::uint32_t power = max_u32(sat & kInfBits, F::kMinNormal);
  return bits_of(float_of(sat) + float_of(power + F::kStep)) + (power >> F::kShift);
}

// The magnitude in units of 2^-kShift codes, plus a dither in [0, 2^kShift), in whole codes. Below
// the smallest normal value: the mantissa of sat + 2^(1 - bias). Each of the two expressions is the
// larger one where it holds. The dither: 16 random bits stretched, at the middle of their interval,
// or cut to the number of dropped bits. Never passes the largest code: what is saturated has no
// remainder.
template <DType kDtype>
ZEROFP8_HD std::uint32_t magnitude_stochastic(std::uint32_t sat, std::uint32_t r16) {
  using F = Mini<kDtype>;
  constexpr int up = F::kShift - 16;
  constexpr std::uint32_t middle = up > 0 ? 1u << (up > 0 ? up - 1 : 0) : 0u;
  // 2^31 keeps both above zero, for an unsigned maximum; it is cut off with the code's upper bits.
  constexpr std::uint32_t offset = 0x80000000u + middle;
  const std::uint32_t fixed =
      max_u32(sat + (offset - F::kRebias),
              bits_of(float_of(sat) + float_of(F::kMinNormal)) + (offset - F::kMinNormal));
  const std::uint32_t dither = up > 0 ? r16 << (up > 0 ? up : 0) : r16 >> (up < 0 ? -up : 0);
  return (fixed + dither) >> F::kShift;
}

// A subnormal moves by up to half a step before it's rounded to nearest: by u - 1/2. The sum is
// exact: at most 1023 steps of fp16 and 13 bits of u, or 15 steps and 17 bits.
template <DType kDtype>
ZEROFP8_HD std::uint32_t magnitude_mixed(std::uint32_t sat, std::uint32_t r16) {
  using F = Mini<kDtype>;
  constexpr int cut = F::kM > 6 ? 4 : 0;
  constexpr std::uint32_t step = std::uint32_t(127 + 1 - F::kBias - F::kM) << 23;
  const std::uint32_t one_plus_u = (((r16 >> cut) * 2u + 1u) << (6 + cut)) | step;
  const float shift = float_of(one_plus_u) - 1.5f * float_of(step);
  const float moved = float_of(sat) + (sat < F::kMinNormal ? shift : 0.0f);
  const std::uint32_t power = max_u32(sat & kInfBits, F::kMinNormal);
  return bits_of(moved + float_of(power + F::kStep)) + (power >> F::kShift);
}

// `kFinite`: the caller knows that x is finite, two or three instructions less.
template <DType kDtype, bool kFinite>
ZEROFP8_HD CodeOf<kDtype> finish_code(std::uint32_t u, std::uint32_t magnitude) {
  using F = Mini<kDtype>;
  const std::uint32_t a = u & kAbsMask;
  const std::uint32_t code =
      kFinite || a < kInfBits ? magnitude : (a == kInfBits ? F::kInfCode : F::kNanCode);
  // A choice, not an or of shifted bits: g++ would narrow both sides to bytes one by one.
  return static_cast<CodeOf<kDtype>>(static_cast<std::int32_t>(u) < 0 ? code | F::kSignBit : code);
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

template <DType kDtype, bool kFinite = false>
ZEROFP8_HD CodeOf<kDtype> encode_nearest(float x) {
  if constexpr (kDtype == DType::kBf16) return static_cast<std::uint16_t>(encode_bf16_nearest(x));
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sat = min_u32(u & kAbsMask, Mini<kDtype>::kMaxBits);
  return finish_code<kDtype, kFinite>(u, magnitude_nearest<kDtype>(sat));
}
template <DType kDtype, bool kFinite = false>
ZEROFP8_HD CodeOf<kDtype> encode_stochastic(float x, std::uint32_t r16) {
  if constexpr (kDtype == DType::kBf16)
    return static_cast<std::uint16_t>(encode_bf16_stochastic(x, r16));
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sat = min_u32(u & kAbsMask, Mini<kDtype>::kMaxBits);
  return finish_code<kDtype, kFinite>(u, magnitude_stochastic<kDtype>(sat, r16));
}
// Nearest for normal codes, stochastic below: first moments, whose subnormals would never decay.
template <DType kDtype, bool kFinite = false>
ZEROFP8_HD CodeOf<kDtype> encode_mixed(float x, std::uint32_t r16) {
  if constexpr (kDtype == DType::kBf16)
    return static_cast<std::uint16_t>(encode_bf16_nearest(x));  // no gradual underflow to stall
  using F = Mini<kDtype>;
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sat = min_u32(u & kAbsMask, F::kMaxBits);
  return finish_code<kDtype, kFinite>(u, magnitude_mixed<kDtype>(sat, r16));
}

template <DType kDtype>
ZEROFP8_HD float decode(std::uint32_t code) {
  if constexpr (kDtype == DType::kBf16) return float_of(code << 16);
  using F = Mini<kDtype>;
  // One shift of the whole code, so that it's widened once: sign on top, then the magnitude.
  const std::uint32_t top = code << F::kSignShift;
  const std::uint32_t mag =
      F::kSignBit ? (top & kAbsMask) >> (F::kSignShift - F::kShift) : code << F::kShift;
  // Normal, and subnormal as 2^(1-bias) * (1 + mag / 2^M) - 2^(1-bias), exact and without fp32
  // subnormals. Each is the smaller one where it holds.
  const std::uint32_t normal = mag + F::kRebias;
  const std::uint32_t sub = bits_of(float_of(mag + F::kMinNormal) - float_of(F::kMinNormal));
  std::uint32_t u = min_u32(normal, sub);
  if constexpr (kDtype == DType::kE4m3) u = mag == 0x7Fu << F::kShift ? 0x7FC00000u : u;
  // The top exponent of IEEE formats: on to fp32's.
  if constexpr (F::kInfo.has_infinity) u += mag >= F::kInfCode << F::kShift ? F::kRebias : 0u;
  return float_of(F::kSignBit ? u | (top & ~kAbsMask) : u);
}

// Plain IEEE fp16 for weights and wire: beyond 65504 comes infinity, not saturation. 2^16 encodes
// as the code of infinity.
ZEROFP8_HD std::uint16_t finish_fp16_ieee(std::uint32_t u, std::uint32_t magnitude) {
  const std::uint32_t code = (u & kAbsMask) > kInfBits ? Mini<DType::kFp16>::kNanCode : magnitude;
  return static_cast<std::uint16_t>(static_cast<std::int32_t>(u) < 0 ? code | 0x8000u : code);
}
ZEROFP8_HD std::uint16_t encode_fp16_ieee(float x) {
  const std::uint32_t sat = min_u32(bits_of(x) & kAbsMask, 0x47800000u);
  return finish_fp16_ieee(bits_of(x), magnitude_nearest<DType::kFp16>(sat));
}
// Whatever lies beyond 65504 is infinity.
ZEROFP8_HD std::uint16_t encode_fp16_ieee_stochastic(float x, std::uint32_t r16) {
  const std::uint32_t a = bits_of(x) & kAbsMask;
  const std::uint32_t sat = a > 0x477FE000u ? 0x47800000u : a;
  return finish_fp16_ieee(bits_of(x), magnitude_stochastic<DType::kFp16>(sat, r16));
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
