// What one thread of a device does with its 16 elements of a block, in element functions. A block
// of n elements is worked on by n / 16 neighbouring threads, its lanes, which meet once per
// rounding to find the block's maximum. Compiled by nvcc, and by the host's compiler for tests that
// run the lanes of a warp one after the other.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels/adam_element.h"
#include "kernels/codec.h"
#include "kernels/launch_args.h"
#include "kernels/master_element.h"
#include "zerofp8/element.h"
#include "zerofp8/ops.h"
#include "zerofp8/random.h"

#if defined(__CUDACC__)
#define ZEROFP8_UNROLL _Pragma("unroll")
#else
#define ZEROFP8_UNROLL
#endif

namespace zerofp8::lane {

using namespace zerofp8::element;  // NOLINT: lanes are made of element functions

inline constexpr int kElements = 16;

// Where a lane's elements begin, and how many of them the caller's memory has.
struct Position {
  std::int64_t first = 0;
  std::int64_t block = 0;  // index of the block
  bool leads = false;      // writes the block's scale
};
ZEROFP8_HD Position position(std::int64_t lane, int block) {
  const int lanes = block / kElements;  // a power of two
  const auto log2 = lanes == 2 ? 1 : lanes == 4 ? 2 : lanes == 8 ? 3 : 4;
  return {lane * kElements, lane >> log2, (lane & (lanes - 1)) == 0};
}
ZEROFP8_HD int valid(std::int64_t first, std::int64_t elements) {
  const std::int64_t left = elements - first;
  return left >= kElements ? kElements : left > 0 ? static_cast<int>(left) : 0;
}

// 16 bytes at once; both sides aligned.
ZEROFP8_HD void load16(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  const uint4 data = *static_cast<const uint4*>(from);
  memcpy(to, &data, 16);
#else
  memcpy(to, from, 16);
#endif
}
ZEROFP8_HD void store16(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  uint4 data;
  memcpy(&data, from, 16);
  *static_cast<uint4*>(to) = data;
#else
  memcpy(to, from, 16);
#endif
}
ZEROFP8_HD void store16_of(void* to, const void* from) {
  char data[16];
  load16(data, from);
  store16(to, data);
}
ZEROFP8_HD bool aligned16(const void* p) {
  return (reinterpret_cast<std::uintptr_t>(p) & 15u) == 0;
}

// Which storages there may be in a place: a kernel has no code for the others.
using Storages = unsigned;
template <class... S>
constexpr Storages set_of(S... storages) {
  return ((1u << static_cast<unsigned>(storages)) | ...);
}
constexpr bool has(Storages set, Storage storage) {
  return (set >> static_cast<unsigned>(storage) & 1u) != 0;
}
inline constexpr Storages kAnyStorage = ~0u;
inline constexpr Storages kPlain = set_of(Storage::kFp32, Storage::kBf16, Storage::kFp16);
ZEROFP8_HD void other_storage() {
#if !defined(__CUDA_ARCH__)
  std::abort();  // on the host, where tests would see it
#endif
}

// Whose memory: the engine's is aligned and padded, so its lanes are always whole; the caller's is
// aligned to its type and ends anywhere.
enum class Owner : std::uint8_t { kEngine, kCaller };

template <Owner kOwner, class Code>
ZEROFP8_HD void load_codes(const Code* in, int count, Code* out) {
  if (kOwner == Owner::kEngine || (count == kElements && aligned16(in))) {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; i += static_cast<int>(16 / sizeof(Code)))
      load16(out + i, in + i);
  } else {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) out[i] = i < count ? in[i] : Code{};
  }
}
template <Owner kOwner, class Code>
ZEROFP8_HD void store_codes(Code* out, int count, const Code* in) {
  if (kOwner == Owner::kEngine || (count == kElements && aligned16(out))) {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; i += static_cast<int>(16 / sizeof(Code)))
      store16(out + i, in + i);
  } else {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) out[i] = in[i];
    }
  }
}

template <Owner kOwner, DType kDtype, class Code>
ZEROFP8_HD void decode_codes(const void* codes, std::int64_t first, int count, float scale,
                             float* x) {
  alignas(16) Code in[kElements];
  load_codes<kOwner>(static_cast<const Code*>(codes) + first, count, in);
  ZEROFP8_UNROLL
  for (int i = 0; i < kElements; ++i) x[i] = decode<kDtype>(in[i]) * scale;
}

// x = the lane's elements of `in`, zeros from `count` on (plain numbers of a caller; blocks are
// always the engine's).
template <Owner kOwner, Storages kMay = kAnyStorage>
ZEROFP8_HD void decode_lane(const View& in, const Position& at, int count, float* x) {
  const float scale = in.scales != nullptr ? in.scales[at.block] : 1.0f;
  switch (in.storage) {
    case Storage::kFp32:
      if constexpr (has(kMay, Storage::kFp32))
        return load_codes<kOwner>(static_cast<const float*>(in.codes) + at.first, count, x);
      break;
    case Storage::kBf16:
      if constexpr (has(kMay, Storage::kBf16))
        return decode_codes<kOwner, DType::kBf16, std::uint16_t>(in.codes, at.first, count, scale,
                                                                 x);
      break;
    case Storage::kFp16:
      if constexpr (has(kMay, Storage::kFp16))
        return decode_codes<kOwner, DType::kFp16, std::uint16_t>(in.codes, at.first, count, scale,
                                                                 x);
      break;
    case Storage::kFp16Block:
      if constexpr (has(kMay, Storage::kFp16Block))
        return decode_codes<Owner::kEngine, DType::kFp16, std::uint16_t>(in.codes, at.first,
                                                                         kElements, scale, x);
      break;
    case Storage::kE4m3Block:
      if constexpr (has(kMay, Storage::kE4m3Block))
        return decode_codes<Owner::kEngine, DType::kE4m3, std::uint8_t>(in.codes, at.first,
                                                                        kElements, scale, x);
      break;
    case Storage::kE5m2Block:
      if constexpr (has(kMay, Storage::kE5m2Block))
        return decode_codes<Owner::kEngine, DType::kE5m2, std::uint8_t>(in.codes, at.first,
                                                                        kElements, scale, x);
      break;
    case Storage::kUe4m4Block:
      if constexpr (has(kMay, Storage::kUe4m4Block))
        return decode_codes<Owner::kEngine, DType::kUe4m4, std::uint8_t>(in.codes, at.first,
                                                                         kElements, scale, x);
      break;
  }
  other_storage();
}
// One element, for kernels whose threads take columns.
ZEROFP8_HD float decode_one(const View& in, std::int64_t i, std::int64_t block_index) {
  const auto* codes8 = static_cast<const std::uint8_t*>(in.codes);
  const auto* codes16 = static_cast<const std::uint16_t*>(in.codes);
  const float scale = in.scales != nullptr ? in.scales[block_index] : 1.0f;
  switch (in.storage) {
    case Storage::kFp32:
      return static_cast<const float*>(in.codes)[i];
    case Storage::kBf16:
      return decode<DType::kBf16>(codes16[i]) * scale;
    case Storage::kFp16:
    case Storage::kFp16Block:
      return decode<DType::kFp16>(codes16[i]) * scale;
    case Storage::kE4m3Block:
      return decode<DType::kE4m3>(codes8[i]) * scale;
    case Storage::kE5m2Block:
      return decode<DType::kE5m2>(codes8[i]) * scale;
    case Storage::kUe4m4Block:
      return decode<DType::kUe4m4>(codes8[i]) * scale;
  }
  return 0.0f;
}

// x = decode(view) + decode(residual), the latter if there is one.
template <Owner kOwner = Owner::kEngine>
ZEROFP8_HD void decode_with_residual(const View& view, const View& residual, const Position& at,
                                     int count, float* x) {
  decode_lane<kOwner>(view, at, count, x);
  if (residual.codes == nullptr) return;
  float rest[kElements] = {};
  decode_lane<Owner::kEngine>(residual, at, kElements, rest);
  ZEROFP8_UNROLL
  for (int i = 0; i < kElements; ++i) x[i] += rest[i];
}

ZEROFP8_HD std::uint32_t max_abs(const float* x) {
  std::uint32_t amax = 0;
  ZEROFP8_UNROLL
  for (int i = 0; i < kElements; ++i) amax = max_u32(amax, bits_of(x[i]) & kAbsMask);
  return amax;
}

// Random bits of a lane's elements. The two halves of one draw serve two encodings.
struct Draws {
  std::uint32_t base = 0, lane = 0;
  int shift = 16;  // 16: the upper half, 0: the lower one
};
ZEROFP8_HD Draws draws(std::uint64_t key, std::uint64_t offset, std::int64_t first) {
  const std::uint64_t at = offset + static_cast<std::uint64_t>(first);
  return {granule_key(key, at / kGranule), static_cast<std::uint32_t>(at % kGranule), 16};
}
ZEROFP8_HD Draws draws(const RandomStream& stream, std::int64_t first) {
  return draws(key_of(stream), stream.offset, first);
}
ZEROFP8_HD Draws lower_half(const Draws& d) { return {d.base, d.lane, 0}; }
ZEROFP8_HD std::uint32_t r16(const Draws& d, int i) {
  return (lane_bits(d.base, d.lane + static_cast<std::uint32_t>(i)) >> d.shift) & 0xFFFFu;
}

template <class Codec, class Code>
ZEROFP8_HD void encode_codes(const float* x, float inverse, Rounding rounding, const Draws& random,
                             Code* out) {
  if (rounding == Rounding::kNearest) {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) out[i] = static_cast<Code>(Codec::nearest(x[i] * inverse));
  } else if (rounding == Rounding::kStochastic) {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) {
      out[i] = static_cast<Code>(Codec::stochastic(x[i] * inverse, r16(random, i)));
    }
  } else {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) {
      out[i] = static_cast<Code>(Codec::mixed(x[i] * inverse, r16(random, i)));
    }
  }
}

// Encodes, stores, and leaves in `back` (unless null) what decoding gives.
template <Owner kOwner, DType kDtype, class Code, class Codec>
ZEROFP8_HD void encode_and_store(const float* x, BlockScale scale, const View& out,
                                 const Position& at, int count, Rounding rounding,
                                 const Draws& random, float* back) {
  alignas(16) Code codes[kElements];
  encode_codes<Codec>(x, scale.inverse, rounding, random, codes);
  if (back != nullptr) {
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) back[i] = decode<kDtype>(codes[i]) * scale.scale;
  }
  store_codes<kOwner>(static_cast<Code*>(out.codes) + at.first, count, codes);
  if (out.scales != nullptr && at.leads) out.scales[at.block] = scale.scale;
}

// `amax`: of the block. Stores `count` elements to the caller's memory, all of them to the
// engine's.
template <Owner kOwner = Owner::kEngine, Storages kMay = kAnyStorage>
ZEROFP8_HD void encode_lane(const float* x, std::uint32_t amax, const View& out, const Position& at,
                            int count, Rounding rounding, const Draws& random,
                            float* back = nullptr) {
  constexpr BlockScale kOne{1.0f, 1.0f};
  constexpr Owner kEngine = Owner::kEngine;
  switch (out.storage) {
    case Storage::kFp32:
      if constexpr (has(kMay, Storage::kFp32)) {
        for (int i = 0; back != nullptr && i < kElements; ++i) back[i] = x[i];
        return store_codes<kOwner>(static_cast<float*>(out.codes) + at.first, count, x);
      }
      break;
    case Storage::kBf16:
      if constexpr (has(kMay, Storage::kBf16))
        return encode_and_store<kOwner, DType::kBf16, std::uint16_t, Codec<DType::kBf16, false>>(
            x, kOne, out, at, count, rounding, random, back);
      break;
    case Storage::kFp16:
      if constexpr (has(kMay, Storage::kFp16))
        return encode_and_store<kOwner, DType::kFp16, std::uint16_t, PlainFp16>(
            x, kOne, out, at, count, rounding, random, back);
      break;
    case Storage::kFp16Block:
      if constexpr (has(kMay, Storage::kFp16Block))
        return encode_and_store<kEngine, DType::kFp16, std::uint16_t, Codec<DType::kFp16, false>>(
            x, fp16_block_scale(amax), out, at, kElements, rounding, random, back);
      break;
    case Storage::kE4m3Block:
      if constexpr (has(kMay, Storage::kE4m3Block))
        return encode_and_store<kEngine, DType::kE4m3, std::uint8_t, Codec<DType::kE4m3, false>>(
            x, fp8_block_scale<DType::kE4m3>(amax), out, at, kElements, rounding, random, back);
      break;
    case Storage::kE5m2Block:
      if constexpr (has(kMay, Storage::kE5m2Block))
        return encode_and_store<kEngine, DType::kE5m2, std::uint8_t, Codec<DType::kE5m2, false>>(
            x, fp8_block_scale<DType::kE5m2>(amax), out, at, kElements, rounding, random, back);
      break;
    case Storage::kUe4m4Block:
      if constexpr (has(kMay, Storage::kUe4m4Block))
        return encode_and_store<kEngine, DType::kUe4m4, std::uint8_t, Codec<DType::kUe4m4, false>>(
            x, fp8_block_scale<DType::kUe4m4>(amax), out, at, kElements, rounding, random, back);
      break;
  }
  other_storage();
}

template <Owner kRest, DType kDtype, int kBits, class Rest>
ZEROFP8_HD void join_lane(const void* weight, const void* rest, std::int64_t first, int count,
                          float* p) {
  alignas(16) std::uint16_t w[kElements];
  alignas(16) Rest r[kElements];
  load_codes<Owner::kCaller>(static_cast<const std::uint16_t*>(weight) + first, count, w);
  load_codes<kRest>(static_cast<const Rest*>(rest) + first, count, r);
  ZEROFP8_UNROLL
  for (int i = 0; i < kElements; ++i) p[i] = join_master<kDtype, kBits>(w[i], r[i]);
}
template <Owner kRest, DType kDtype, int kBits, class Rest>
ZEROFP8_HD void split_lane(const float* p, void* weight, void* rest, std::int64_t first,
                           int count) {
  alignas(16) std::uint16_t w[kElements];
  alignas(16) Rest r[kElements];
  ZEROFP8_UNROLL
  for (int i = 0; i < kElements; ++i) {
    const SplitWeight split = split_master<kDtype, kBits>(p[i]);
    w[i] = static_cast<std::uint16_t>(split.weight);
    r[i] = static_cast<Rest>(split.rest);
  }
  store_codes<Owner::kCaller>(static_cast<std::uint16_t*>(weight) + first, count, w);
  store_codes<kRest>(static_cast<Rest*>(rest) + first, count, r);
}

// The FP32 values that Adam works with; zeros from `count` on. The weight is the caller's; kRest:
// whose memory the remainder, or the master itself, lies in.
template <Owner kRest>
ZEROFP8_HD void load_master_lane(DType dtype, const void* weight, int bits, const void* rest,
                                 const Position& at, int count, float* p) {
  if (bits == 32) {
    load_codes<kRest>(static_cast<const float*>(rest) + at.first, count, p);
  } else if (bits == 0) {
    decode_lane<Owner::kCaller, kPlain>(weight_view(dtype, weight), at, count, p);
  } else if (dtype == DType::kBf16) {
    if (bits == 16)
      join_lane<kRest, DType::kBf16, 16, std::uint16_t>(weight, rest, at.first, count, p);
    if (bits == 8)
      join_lane<kRest, DType::kBf16, 8, std::uint8_t>(weight, rest, at.first, count, p);
  } else {
    if (bits == 16)
      join_lane<kRest, DType::kFp16, 16, std::uint16_t>(weight, rest, at.first, count, p);
    if (bits == 8)
      join_lane<kRest, DType::kFp16, 8, std::uint8_t>(weight, rest, at.first, count, p);
  }
}
template <Owner kRest>
ZEROFP8_HD void store_master_lane(const float* p, DType dtype, void* weight, int bits, void* rest,
                                  const Position& at, int count, Rounding rounding,
                                  const Draws& random) {
  if (bits == 32) store_codes<kRest>(static_cast<float*>(rest) + at.first, count, p);
  if (bits == 0 || bits == 32) {
    encode_lane<Owner::kCaller, kPlain>(p, 0, weight_view(dtype, weight), at, count, rounding,
                                        random);
  } else if (dtype == DType::kBf16) {
    if (bits == 16)
      split_lane<kRest, DType::kBf16, 16, std::uint16_t>(p, weight, rest, at.first, count);
    if (bits == 8)
      split_lane<kRest, DType::kBf16, 8, std::uint8_t>(p, weight, rest, at.first, count);
  } else {
    if (bits == 16)
      split_lane<kRest, DType::kFp16, 16, std::uint16_t>(p, weight, rest, at.first, count);
    if (bits == 8)
      split_lane<kRest, DType::kFp16, 8, std::uint8_t>(p, weight, rest, at.first, count);
  }
}

}  // namespace zerofp8::lane
