// The opt levels as data: what each one stands for where no key says otherwise.
#pragma once

#include "zerofp8/config.h"

namespace zerofp8 {

struct Preset {
  OptLevel level;
  DType accumulation;
  DType gradient_wire;
  MasterWeights bf16_master;
  MasterWeights fp16_master;  // an FP32 model's weight is its own master at every level
  DType exp_avg;
  DType exp_avg_sq;
  std::string_view help;
};

inline constexpr Preset kPresets[] = {
    // O0 is bit-identical to FP32 AdamW. For bf16 weights 16 more bits make an exact FP32 master;
    // for
    // fp16 ones they do not (5 exponent bits), so there a separate copy is kept.
    {OptLevel::kO0, DType::kFp32, DType::kFp32, MasterWeights::kBits16, MasterWeights::kFp32,
     DType::kFp32, DType::kFp32, "FP32 gradients and state"},
    {OptLevel::kO1, DType::kE4m3, DType::kE4m3, MasterWeights::kBits16, MasterWeights::kBits16,
     DType::kFp32, DType::kFp32, "FP8 gradients, FP32 state"},
    {OptLevel::kO2, DType::kE4m3, DType::kE4m3, MasterWeights::kBits8, MasterWeights::kBits8,
     DType::kE4m3, DType::kFp16, "FP8 gradients and first moment, FP16 root of the second"},
    {OptLevel::kO3, DType::kE4m3, DType::kE4m3, MasterWeights::kBits8, MasterWeights::kBits8,
     DType::kE4m3, DType::kUe4m4, "FP8 gradients and moments"},
};

constexpr const Preset& preset(OptLevel level) { return kPresets[static_cast<int>(level)]; }

}  // namespace zerofp8
