// Short loops over one block, shared by the CPU kernels: decode a View into FP32 scratch, encode
// scratch into a View, draw random bits. Compiled once per instruction set; everything is forced
// inline or local, so that an object exports its table only. Blocks are whole granules of 32
// elements: loops of that constant length become straight vector code without tails.
#pragma once

#include <cstddef>

#include "kernels/adam_element.h"
#include "kernels/codec.h"
#include "kernels/master_element.h"
#include "zerofp8/element.h"
#include "zerofp8/ops.h"
#include "zerofp8/random.h"

#define ZEROFP8_INLINE static inline __attribute__((always_inline))

namespace zerofp8::cpu {

using namespace zerofp8::element;  // NOLINT: kernels are made of element functions

inline constexpr int kMaxBlock = 256;
using Scratch = float[kMaxBlock];
using Draws = std::uint32_t[kMaxBlock];

// Calls f(i) for i in [0, n), n a multiple of kGranule; 64 at a time, a full vector of 8-bit codes
// with AVX-512, where n allows.
template <class F>
ZEROFP8_INLINE void each(int n, const F& f) {
  int begin = 0;
  for (; begin + 2 * kGranule <= n; begin += 2 * kGranule) {
    for (int i = begin; i < begin + 2 * kGranule; ++i) f(i);
  }
  if (begin < n) {
    for (int i = begin; i < begin + kGranule; ++i) f(i);
  }
}
#define ZEROFP8_EACH [&](int i) __attribute__((always_inline))

ZEROFP8_INLINE std::uint32_t block_amax(const float* x, int n) {
  // One flat loop, reduced across lanes once at its end.
  std::uint32_t amax = 0;
  for (int i = 0; i < n / kGranule * kGranule; ++i) amax = max_u32(amax, bits_of(x[i]) & kAbsMask);
  return amax;
}

ZEROFP8_INLINE void add_block(float* __restrict sum, const float* __restrict x, int n) {
  each(
      n, ZEROFP8_EACH { sum[i] += x[i]; });
}

ZEROFP8_INLINE void draw(Draws out, int n, std::uint64_t key, std::uint64_t offset) {
  for (int g = 0; g < n / kGranule; ++g) {
    const std::uint32_t base = granule_key(key, offset / kGranule + static_cast<unsigned>(g));
    std::uint32_t* lane = out + g * kGranule;
    for (std::uint32_t i = 0; i < kGranule; ++i) lane[i] = lane_bits(base, i);
  }
}

template <DType kDtype, class Code>
ZEROFP8_INLINE void decode_codes(const void* codes, float scale, float* __restrict out, int n) {
  const Code* __restrict in = static_cast<const Code*>(codes);
  each(
      n, ZEROFP8_EACH { out[i] = decode<kDtype>(in[i]) * scale; });
}

ZEROFP8_INLINE void decode_block(const View& in, float* __restrict out, int n) {
  switch (in.storage) {
    case Storage::kFp32:
      __builtin_memcpy(out, in.codes, static_cast<std::size_t>(n) * sizeof(float));
      break;
    case Storage::kBf16:
      decode_codes<DType::kBf16, std::uint16_t>(in.codes, 1.0f, out, n);
      break;
    case Storage::kFp16:
      decode_codes<DType::kFp16, std::uint16_t>(in.codes, 1.0f, out, n);
      break;
    case Storage::kFp16Block:
      decode_codes<DType::kFp16, std::uint16_t>(in.codes, *in.scales, out, n);
      break;
    case Storage::kE4m3Block:
      decode_codes<DType::kE4m3, std::uint8_t>(in.codes, *in.scales, out, n);
      break;
    case Storage::kE5m2Block:
      decode_codes<DType::kE5m2, std::uint8_t>(in.codes, *in.scales, out, n);
      break;
    case Storage::kUe4m4Block:
      decode_codes<DType::kUe4m4, std::uint8_t>(in.codes, *in.scales, out, n);
      break;
  }
}

// `shift`: 16 takes the draw's upper 16 bits, 0 the lower ones, so that one draw serves two
// encodings.
template <class Codec, class Code>
ZEROFP8_INLINE void encode_loop(const float* __restrict x, float inverse, Code* __restrict out,
                                int n, Rounding rounding, const std::uint32_t* __restrict draws,
                                int shift) {
  if (rounding == Rounding::kNearest) {
    each(
        n, ZEROFP8_EACH { out[i] = static_cast<Code>(Codec::nearest(x[i] * inverse)); });
  } else if (rounding == Rounding::kStochastic) {
    each(
        n, ZEROFP8_EACH {
          out[i] =
              static_cast<Code>(Codec::stochastic(x[i] * inverse, (draws[i] >> shift) & 0xFFFFu));
        });
  } else {
    each(
        n, ZEROFP8_EACH {
          out[i] = static_cast<Code>(Codec::mixed(x[i] * inverse, (draws[i] >> shift) & 0xFFFFu));
        });
  }
}

// A block with an infinity or a NaN: rare, so kept small and out of the way.
template <DType kDtype, class Code>
static __attribute__((noinline, cold)) void encode_non_finite(const float* x, float inverse,
                                                              Code* out, int n, Rounding rounding,
                                                              const std::uint32_t* draws,
                                                              int shift) {
  encode_loop<Codec<kDtype, false>>(x, inverse, out, n, rounding, draws, shift);
}

// Encodes one block with its own fresh scale. `amax`: bits of max |x| of the block.
template <DType kDtype, class Code>
ZEROFP8_INLINE void encode_scaled(const float* x, std::uint32_t amax, BlockScale s, const View& out,
                                  int n, Rounding rounding, const std::uint32_t* draws, int shift) {
  Code* codes = static_cast<Code*>(out.codes);
  *out.scales = s.scale;
  if (amax < kInfBits) {
    encode_loop<Codec<kDtype, true>>(x, s.inverse, codes, n, rounding, draws, shift);
  } else {
    encode_non_finite<kDtype>(x, s.inverse, codes, n, rounding, draws, shift);
  }
}

// `amax` is read where `out` has a scale. `high`: which half of the draws.
ZEROFP8_INLINE void encode_block(const float* x, std::uint32_t amax, const View& out, int n,
                                 Rounding rounding, const std::uint32_t* draws, bool high) {
  const int shift = high ? 16 : 0;
  auto* codes16 = static_cast<std::uint16_t*>(out.codes);
  switch (out.storage) {
    case Storage::kFp32:
      __builtin_memcpy(out.codes, x, static_cast<std::size_t>(n) * sizeof(float));
      break;
    case Storage::kBf16:
      encode_loop<Codec<DType::kBf16, false>>(x, 1.0f, codes16, n, rounding, draws, shift);
      break;
    case Storage::kFp16:
      encode_loop<PlainFp16>(x, 1.0f, codes16, n, rounding, draws, shift);
      break;
    case Storage::kFp16Block:
      encode_scaled<DType::kFp16, std::uint16_t>(x, amax, fp16_block_scale(amax), out, n, rounding,
                                                 draws, shift);
      break;
    case Storage::kE4m3Block:
      encode_scaled<DType::kE4m3, std::uint8_t>(x, amax, fp8_block_scale<DType::kE4m3>(amax), out,
                                                n, rounding, draws, shift);
      break;
    case Storage::kE5m2Block:
      encode_scaled<DType::kE5m2, std::uint8_t>(x, amax, fp8_block_scale<DType::kE5m2>(amax), out,
                                                n, rounding, draws, shift);
      break;
    case Storage::kUe4m4Block:
      encode_scaled<DType::kUe4m4, std::uint8_t>(x, amax, fp8_block_scale<DType::kUe4m4>(amax), out,
                                                 n, rounding, draws, shift);
      break;
  }
}

}  // namespace zerofp8::cpu
