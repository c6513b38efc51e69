// Number formats as data: one descriptor per format, read by codecs, plan, tests and documentation.
//
//   const FormatInfo& f = format_info(DType::kE4m3);   // f.max_finite == 448
//
// Sources: OCP 8-bit Floating Point Specification (OFP8) revision 1.0 for E4M3 and E5M2; IEEE 754-2019
// for fp16 and fp32; bf16 is the upper half of fp32. UE4M4 is this project's: no sign, 4 exponent bits,
// 4 mantissa bits, bias 7; every code is finite; used for the square root of the second moment only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace zerofp8 {

enum class DType : std::uint8_t { kFp32, kBf16, kFp16, kE4m3, kE5m2, kUe4m4 };
inline constexpr int kDTypeCount = 6;

struct FormatInfo {
  DType dtype;
  std::string_view name;      // as printed: "fp32", "bf16", "fp16", "fp8_e4m3", ...
  int bytes;                  // per element, without scales
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_sign;
  bool has_infinity;
  bool has_nan;
  double max_finite;
  double min_normal;
  double min_subnormal;
};

inline constexpr FormatInfo kFormats[kDTypeCount] = {
    {DType::kFp32, "fp32", 4, 8, 23, 127, true, true, true, 0x1.fffffep127, 0x1p-126, 0x1p-149},
    {DType::kBf16, "bf16", 2, 8, 7, 127, true, true, true, 0x1.fep127, 0x1p-126, 0x1p-133},
    {DType::kFp16, "fp16", 2, 5, 10, 15, true, true, true, 65504.0, 0x1p-14, 0x1p-24},
    {DType::kE4m3, "fp8_e4m3", 1, 4, 3, 7, true, false, true, 448.0, 0x1p-6, 0x1p-9},
    {DType::kE5m2, "fp8_e5m2", 1, 5, 2, 15, true, true, true, 57344.0, 0x1p-14, 0x1p-16},
    {DType::kUe4m4, "fp8_ue4m4", 1, 4, 4, 7, false, false, false, 496.0, 0x1p-6, 0x1p-10},
};

constexpr const FormatInfo& format_info(DType dtype) {
  return kFormats[static_cast<std::size_t>(dtype)];
}
constexpr std::string_view to_string(DType dtype) { return format_info(dtype).name; }
constexpr int bytes_of(DType dtype) { return format_info(dtype).bytes; }
constexpr bool is_fp8(DType dtype) { return bytes_of(dtype) == 1; }

// "fp32", "bf16", "fp16", "fp8" (= E4M3), "fp8_e4m3", "fp8_e5m2" and torch's or DeepSpeed's spellings of
// the 16- and 32-bit ones ("float32", "bfloat16", "half", ...). Unknown: nullopt.
std::optional<DType> dtype_from_string(std::string_view text);

}  // namespace zerofp8
