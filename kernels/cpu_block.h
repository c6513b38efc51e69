// Short loops over one block, shared by the CPU kernels: decode a View into FP32 scratch, encode
// scratch into a View, draw random bits. Compiled once per instruction set; everything is forced
// inline so that an object exports its table only.
#pragma once

#include "kernels/adam_element.h"
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

ZEROFP8_INLINE std::uint32_t block_amax(const float* x, int n) {
  std::uint32_t amax = 0;
  for (int i = 0; i < n; ++i) amax = max_u32(amax, bits_of(x[i]) & kAbsMask);
  return amax;
}

ZEROFP8_INLINE void draw(Draws out, int n, std::uint64_t key, std::uint64_t offset) {
  for (int g = 0; g < n / kGranule; ++g) {
    const std::uint32_t base = granule_key(key, offset / kGranule + static_cast<unsigned>(g));
    std::uint32_t* lane = out + g * kGranule;
    for (std::uint32_t i = 0; i < kGranule; ++i) lane[i] = lane_bits(base, i);
  }
}

template <DType kDtype, class Code>
ZEROFP8_INLINE void decode_codes(const void* codes, float scale, float* out, int n) {
  const Code* in = static_cast<const Code*>(codes);
  for (int i = 0; i < n; ++i) out[i] = decode<kDtype>(in[i]) * scale;
}

ZEROFP8_INLINE void decode_block(const View& in, float* __restrict out, int n) {
  switch (in.storage) {
    case Storage::kFp32:
      for (int i = 0; i < n; ++i) out[i] = static_cast<const float*>(in.codes)[i];
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

ZEROFP8_INLINE BlockScale scale_for(Storage storage, std::uint32_t amax) {
  switch (storage) {
    case Storage::kFp16Block:
      return fp16_block_scale(amax);
    case Storage::kE4m3Block:
      return fp8_block_scale<DType::kE4m3>(amax);
    case Storage::kE5m2Block:
      return fp8_block_scale<DType::kE5m2>(amax);
    case Storage::kUe4m4Block:
      return fp8_block_scale<DType::kUe4m4>(amax);
    default:
      return {1.0f, 1.0f};
  }
}

// `high`: the draw's upper 16 bits, else the lower ones; so that one draw serves two encodings.
template <DType kDtype, class Code>
ZEROFP8_INLINE void encode_codes(const float* x, float inverse, void* codes, int n,
                                 Rounding rounding, const Draws draws, bool high) {
  Code* out = static_cast<Code*>(codes);
  const int shift = high ? 16 : 0;
  if (rounding == Rounding::kNearest) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<Code>(encode_nearest<kDtype>(x[i] * inverse));
  } else if (rounding == Rounding::kStochastic) {
    for (int i = 0; i < n; ++i) {
      out[i] = static_cast<Code>(
          encode_stochastic<kDtype>(x[i] * inverse, (draws[i] >> shift) & 0xFFFFu));
    }
  } else {
    for (int i = 0; i < n; ++i) {
      out[i] =
          static_cast<Code>(encode_mixed<kDtype>(x[i] * inverse, (draws[i] >> shift) & 0xFFFFu));
    }
  }
}

ZEROFP8_INLINE void encode_plain_fp16(const float* x, std::uint16_t* out, int n, Rounding rounding,
                                      const Draws draws, bool high) {
  const int shift = high ? 16 : 0;
  if (rounding == Rounding::kStochastic) {
    for (int i = 0; i < n; ++i) {
      out[i] = static_cast<std::uint16_t>(
          encode_fp16_ieee_stochastic(x[i], (draws[i] >> shift) & 0xFFFFu));
    }
  } else {
    for (int i = 0; i < n; ++i) out[i] = static_cast<std::uint16_t>(encode_fp16_ieee(x[i]));
  }
}

// Encodes one block with its own fresh scale. `amax`: bits of max |x| of the block.
ZEROFP8_INLINE void encode_block(const float* __restrict x, std::uint32_t amax, const View& out,
                                 int n, Rounding rounding, const Draws draws, bool high) {
  const BlockScale s = scale_for(out.storage, amax);
  if (is_block(out.storage)) *out.scales = s.scale;
  switch (out.storage) {
    case Storage::kFp32:
      for (int i = 0; i < n; ++i) static_cast<float*>(out.codes)[i] = x[i];
      break;
    case Storage::kBf16:
      encode_codes<DType::kBf16, std::uint16_t>(x, 1.0f, out.codes, n, rounding, draws, high);
      break;
    case Storage::kFp16:
      encode_plain_fp16(x, static_cast<std::uint16_t*>(out.codes), n, rounding, draws, high);
      break;
    case Storage::kFp16Block:
      encode_codes<DType::kFp16, std::uint16_t>(x, s.inverse, out.codes, n, rounding, draws, high);
      break;
    case Storage::kE4m3Block:
      encode_codes<DType::kE4m3, std::uint8_t>(x, s.inverse, out.codes, n, rounding, draws, high);
      break;
    case Storage::kE5m2Block:
      encode_codes<DType::kE5m2, std::uint8_t>(x, s.inverse, out.codes, n, rounding, draws, high);
      break;
    case Storage::kUe4m4Block:
      encode_codes<DType::kUe4m4, std::uint8_t>(x, s.inverse, out.codes, n, rounding, draws, high);
      break;
  }
}

}  // namespace zerofp8::cpu
