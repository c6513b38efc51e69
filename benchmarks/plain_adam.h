// What kernels of Adam with FP32 state are elsewhere (TransformerEngine's and Apex's FusedAdam with
// master weights): a bf16 gradient, FP32 exp_avg, exp_avg_sq and master, a bf16 weight written
// beside it. Written for the benchmark: 16-byte loads and stores, one pass.
#pragma once

#include <cstdint>

namespace zerofp8::bench {

struct PlainAdam {
  const std::uint16_t* grad;
  float *exp_avg, *exp_avg_sq, *master;
  std::uint16_t* weight;
  std::int64_t elements;  // a multiple of 4
  float lr, beta1, beta2, eps, weight_decay, correction1, correction2;
};
// `stream`: a cudaStream_t. Returns a cudaError_t.
int plain_adam(const PlainAdam& args, void* stream);

}  // namespace zerofp8::bench
