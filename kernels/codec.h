// The encoders of one storage as a type, so that a loop over elements is written once for all.
#pragma once

#include "zerofp8/element.h"

namespace zerofp8::element {

// `kFinite`: the caller knows that every x is finite.
template <DType kDtype, bool kFinite>
struct Codec {
  ZEROFP8_HD std::uint32_t nearest(float x) { return encode_nearest<kDtype, kFinite>(x); }
  ZEROFP8_HD std::uint32_t stochastic(float x, std::uint32_t r16) {
    return encode_stochastic<kDtype, kFinite>(x, r16);
  }
  ZEROFP8_HD std::uint32_t mixed(float x, std::uint32_t r16) {
    return encode_mixed<kDtype, kFinite>(x, r16);
  }
};
struct PlainFp16 {
  ZEROFP8_HD std::uint32_t nearest(float x) { return encode_fp16_ieee(x); }
  ZEROFP8_HD std::uint32_t stochastic(float x, std::uint32_t r16) {
    return encode_fp16_ieee_stochastic(x, r16);
  }
  ZEROFP8_HD std::uint32_t mixed(float x, std::uint32_t) { return encode_fp16_ieee(x); }
};

}  // namespace zerofp8::element
