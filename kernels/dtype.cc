#include "zerofp8/dtype.h"

namespace zerofp8 {
namespace {

struct Spelling {
  std::string_view text;
  DType dtype;
};

// "fp8" is E4M3: one more mantissa bit counts for more than range once every block has its own scale.
constexpr Spelling kSpellings[] = {
    {"fp32", DType::kFp32},         {"float32", DType::kFp32},      {"float", DType::kFp32},
    {"bf16", DType::kBf16},         {"bfloat16", DType::kBf16},     {"fp16", DType::kFp16},
    {"float16", DType::kFp16},      {"half", DType::kFp16},         {"fp8", DType::kE4m3},
    {"fp8_e4m3", DType::kE4m3},     {"fp8_e5m2", DType::kE5m2},     {"fp8_ue4m4", DType::kUe4m4},
    {"torch.float32", DType::kFp32}, {"torch.float", DType::kFp32}, {"torch.half", DType::kFp16},
    {"torch.float16", DType::kFp16}, {"torch.bfloat16", DType::kBf16},
};

}  // namespace

std::optional<DType> dtype_from_string(std::string_view text) {
  for (const Spelling& spelling : kSpellings) {
    if (spelling.text == text) return spelling.dtype;
  }
  return std::nullopt;
}

}  // namespace zerofp8
