// The scalars of one Adam step from a group's options; kernels/step_element.h has the arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/step_element.h"
#include "zerofp8/config.h"

namespace zerofp8 {

using element::clip_coefficient;

inline HyperParameters hyper_parameters(const AdamOptions& o) {
  return {.lr = o.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay,
          .decoupled = o.algorithm == Algorithm::kAdamW};
}
inline void advance(const AdamOptions& options, std::int64_t& step, double& guard_c) {
  element::advance(hyper_parameters(options), step, guard_c);
}
inline AdamScalars adam_scalars(const AdamOptions& options, std::int64_t step, double guard_c) {
  return element::adam_scalars(hyper_parameters(options), step, guard_c);
}

// What makes an update with these meaningless in FP32, as a sentence; empty: nothing.
std::string fault_of(const AdamOptions& options);

// All that has to be the same on all ranks: "; AdamW lr 0.001 betas ..", group by group.
std::string text_of(const std::vector<AdamOptions>& groups);

// How the first moment is rounded.
Rounding exp_avg_rounding(Storage storage, double beta1);

}  // namespace zerofp8
