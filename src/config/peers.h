// What other systems keep, in bytes per parameter on one rank: for comparison beside a plan.
#pragma once

#include <string_view>

namespace zerofp8 {

struct Peer {
  std::string_view name;
  int weight, gradient, master, moments;
  constexpr int total() const { return weight + gradient + master + moments; }
};

// Sources: DeepSpeed bf16_optimizer with FP32 gradient accumulation (bf16 weight and gradient, FP32
// gradient, master and moments); the accounting of FP8-LM (MS-AMP) for AMP and for its own O2,
// which counts master weights, gradients and moments, and FP16 weight copies apart; FlashOptim's
// AdamW.
inline constexpr Peer kPeers[] = {
    {"DeepSpeed bf16_optimizer", 2, 6, 4, 8},
    {"FP16 AMP", 0, 4, 4, 8},
    {"FP16 AMP with its FP16 weight copies", 2, 4, 4, 8},
    {"MS-AMP O2", 0, 1, 2, 3},
    {"FlashOptim AdamW", 2, 2, 1, 2},
};

}  // namespace zerofp8
