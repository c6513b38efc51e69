// The scalars of one Adam step: float64 arithmetic, rounded to FP32 once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "zerofp8/config.h"
#include "zerofp8/ops.h"

namespace zerofp8 {

// c = min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; 1 where clipping is off.
inline double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

// Moves t and the guard's C_t to the next step. By Cauchy-Schwarz m_t^2 <= C_t v_t with
//   C_t = beta1^2 / beta2 * C_{t-1} + (1 - beta1)^2 / (1 - beta2),  C_0 = 0,
// for any sequence of betas (docs/numerics.md, "Guard"). Infinite (no guard) where beta2 is 0.
inline void advance(const AdamOptions& options, std::int64_t& step, double& guard_c) {
  ++step;
  const double b1 = options.beta1, b2 = options.beta2;
  const double fresh = (1 - b1) * (1 - b1) / (1 - b2);
  guard_c = b1 == 0 ? fresh : b2 > 0 ? b1 * b1 / b2 * guard_c + fresh : INFINITY;
}

// What makes an update with these meaningless in FP32, as a sentence; empty: nothing.
std::string fault_of(const AdamOptions& options);

// `guard_c`: C_t, or 0 where both moments are stored exactly and no guard is wanted.
inline AdamScalars adam_scalars(const AdamOptions& o, std::int64_t step, double guard_c) {
  // Slack for FP32 rounding of m and v, so that the guard never acts on exact states (at t = 1 the
  // Cauchy-Schwarz bound is met with equality).
  constexpr double kSlack = 1.0 - 0x1p-16;
  const double t = static_cast<double>(step);
  AdamScalars s{};
  s.beta1 = static_cast<float>(o.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.step_size = static_cast<float>(o.lr / (1 - std::pow(o.beta1, t)));
  s.inv_sqrt_bc2 = static_cast<float>(1 / std::sqrt(1 - std::pow(o.beta2, t)));
  const bool decoupled = o.algorithm == Algorithm::kAdamW;
  s.decay = decoupled ? static_cast<float>(1 - o.lr * o.weight_decay) : 1.0f;
  s.l2 = decoupled ? 0.0f : static_cast<float>(o.weight_decay);
  s.guard = guard_c > 0 && std::isfinite(guard_c) ? static_cast<float>(kSlack / guard_c) : 0.0f;
  s.grad_factor = 1.0f;
  s.clip = 1.0f;
  return s;
}

}  // namespace zerofp8
