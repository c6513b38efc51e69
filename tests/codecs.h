// The element codecs of each format beside its reference table, as rows for parametrised tests.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tests/reference.h"
#include "zerofp8/element.h"
#include "zerofp8/ops.h"

namespace zerofp8::test {

struct Codec {
  DType dtype;
  Storage block_storage;  // the storage of blocks of this format (bf16: plain)
  const ref::Format* format;
  std::uint32_t (*nearest)(float);
  std::uint32_t (*stochastic)(float, std::uint32_t);
  std::uint32_t (*mixed)(float, std::uint32_t);
  float (*decode)(std::uint32_t);
  bool saturates;  // else what rounds beyond the largest finite value is infinity
};

template <DType kDtype>
Codec make_codec(Storage storage, const ref::Format& format, bool saturates) {
  return {
      kDtype,
      storage,
      &format,
      [](float x) -> std::uint32_t { return element::encode_nearest<kDtype>(x); },
      [](float x, std::uint32_t r) -> std::uint32_t {
        return element::encode_stochastic<kDtype>(x, r);
      },
      [](float x, std::uint32_t r) -> std::uint32_t { return element::encode_mixed<kDtype>(x, r); },
      [](std::uint32_t code) { return element::decode<kDtype>(code); },
      saturates};
}

inline const std::vector<Codec>& codecs() {
  static const std::vector<Codec> all = {
      make_codec<DType::kE4m3>(Storage::kE4m3Block, ref::e4m3(), true),
      make_codec<DType::kE5m2>(Storage::kE5m2Block, ref::e5m2(), true),
      make_codec<DType::kUe4m4>(Storage::kUe4m4Block, ref::ue4m4(), true),
      make_codec<DType::kFp16>(Storage::kFp16Block, ref::fp16(), true),
      make_codec<DType::kBf16>(Storage::kBf16, ref::bf16(), false),
  };
  return all;
}

inline void PrintTo(const Codec& codec, std::ostream* out) { *out << codec.format->name(); }
inline std::string codec_name(const testing::TestParamInfo<Codec>& info) {
  return info.param.format->name();
}

inline std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float from_bits(std::uint32_t u) { return std::bit_cast<float>(u); }
inline float next_up(float x) { return std::nextafterf(x, std::numeric_limits<float>::infinity()); }
inline float next_down(float x) {
  return std::nextafterf(x, -std::numeric_limits<float>::infinity());
}

// Minutes-long exhaustive tests run only where ZEROFP8_SLOW=1.
inline bool slow_tests() {
  const char* value = std::getenv("ZEROFP8_SLOW");
  return value != nullptr && std::string(value) == "1";
}

}  // namespace zerofp8::test
