// The scalars of a step in float64, rounded to FP32 once: the only text of them, for the host and,
// by nvcc, for the kernels of zerofp8/device_step.h. No library calls but sqrt, which IEEE 754
// rounds correctly: the bits are the same everywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/exact_limbs.h"
#include "zerofp8/device_step.h"
#include "zerofp8/element.h"
#include "zerofp8/random.h"

namespace zerofp8::element {

static_assert(kExactSumWords == ExactLimbs::kWords);

ZEROFP8_HD double double_of(std::uint64_t u) {
  double x;
  memcpy(&x, &u, sizeof x);
  return x;
}
inline constexpr std::uint64_t kInfDouble = std::uint64_t{0x7FF} << 52;

ZEROFP8_HD double sqrt_double(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

// base^n by repeated squaring: n >= 0. Relative error about n * 2^-53, which for the betas of Adam
// is far below one unit of FP32 wherever 1 - base^n is not 1 anyway.
ZEROFP8_HD double power(double base, std::int64_t n) {
  double result = 1;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

// Of carried words. Within one unit in the last place, and the same bits for the same set of
// summands: ascending, so that the high limbs absorb the rounding of the low ones.
ZEROFP8_HD double exact_value(const std::int64_t* words) {
  if (words[ExactLimbs::kLimbs] != 0) return double_of(kInfDouble);
  double sum = 0;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int i = 0; i < ExactLimbs::kLimbs; ++i) {
    const auto exponent = static_cast<std::uint64_t>(1023 + ExactLimbs::kLowest + 32 * i);
    sum += static_cast<double>(words[i]) * double_of(exponent << 52);  // exact product
  }
  return sum;
}

// c = min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; 1 where clipping is off.
ZEROFP8_HD double clip_coefficient(double norm, double max_norm) {
  if (!(max_norm > 0)) return 1.0;
  const double c = max_norm / (norm + 1e-6);
  return c < 1.0 ? c : 1.0;
}

// The square of a larger gradient is infinite in FP32, and so would the second moment be, for good.
inline constexpr double kMaxGradient = 1.8e19;

// Moves t and the guard's C_t to the next step. By Cauchy-Schwarz m_t^2 <= C_t v_t with
//   C_t = beta1^2 / beta2 * C_{t-1} + (1 - beta1)^2 / (1 - beta2),  C_0 = 0,
// for any sequence of betas (docs/numerics.md, "Guard"). Infinite (no guard) where beta2 is 0.
ZEROFP8_HD void advance(const HyperParameters& h, std::int64_t& step, double& guard_c) {
  ++step;
  const double b1 = h.beta1, b2 = h.beta2;
  const double fresh = (1 - b1) * (1 - b1) / (1 - b2);
  if (b1 == 0) {
    guard_c = fresh;
  } else if (b2 > 0) {
    guard_c = b1 * b1 / b2 * guard_c + fresh;
  } else {
    guard_c = double_of(kInfDouble);
  }
}

// `guard_c`: C_t, or 0 where both moments are stored exactly and no guard is wanted.
ZEROFP8_HD AdamScalars adam_scalars(const HyperParameters& h, std::int64_t step, double guard_c) {
  // Slack for FP32 rounding of m and v, so that the guard never acts on exact states (at t = 1 the
  // Cauchy-Schwarz bound is met with equality).
  constexpr double kSlack = 1.0 - 0x1p-16;
  AdamScalars s{};
  s.beta1 = static_cast<float>(h.beta1);
  s.one_minus_beta1 = static_cast<float>(1 - h.beta1);
  s.beta2 = static_cast<float>(h.beta2);
  s.one_minus_beta2 = static_cast<float>(1 - h.beta2);
  s.eps = static_cast<float>(h.eps);
  s.step_size = static_cast<float>(h.lr / (1 - power(h.beta1, step)));
  s.inv_sqrt_bc2 = static_cast<float>(1 / sqrt_double(1 - power(h.beta2, step)));
  const bool decoupled = h.decoupled != 0;
  s.decay = decoupled ? static_cast<float>(1 - h.lr * h.weight_decay) : 1.0f;
  s.l2 = decoupled ? 0.0f : static_cast<float>(h.weight_decay);
  const bool guarded = guard_c > 0 && guard_c < double_of(kInfDouble);
  s.guard = guarded ? static_cast<float>(kSlack / guard_c) : 0.0f;
  s.grad_factor = 1.0f;
  s.clip = 1.0f;
  return s;
}

// How grave parameter i is, less being graver: what this rank was given, then what it received, by
// index. kNoneBad: finite.
inline constexpr std::uint64_t kNoneBad = ~std::uint64_t{0};
ZEROFP8_HD std::uint64_t badness(const MakePartArgs& a, std::int32_t i) {
  const auto index = static_cast<std::uint64_t>(i);
  if (a.maxima[2 * i] >= kInfBits) return index;
  if (a.maxima[2 * i + 1] >= kInfBits) return (std::uint64_t{1} << 32) | index;
  return kNoneBad;
}
// Of every `stride`-th parameter from `first` on: what one thread looks at.
ZEROFP8_HD std::uint64_t worst_of(const MakePartArgs& a, std::int32_t first, std::int32_t stride) {
  std::uint64_t worst = kNoneBad;
  for (std::int32_t i = first; i < a.parameters; i += stride) {
    const std::uint64_t mine = badness(a, i);
    if (mine < worst) worst = mine;
  }
  return worst;
}
// `worst`: the least badness of all parameters.
ZEROFP8_HD void make_part(const MakePartArgs& a, std::uint64_t worst) {
  StepPart& part = *a.out;
  for (int i = 0; i < kExactSumWords; ++i) part.squares[i] = a.squares[i];
  carry_exactly(part.squares);
  part.digest = mix64(*a.digest ^ mix64(a.state->applied));
  part.refusal = *a.refusal;
  part.bad = worst == kNoneBad ? 0 : (worst >> 32) == 0 ? 2 : 1;
  part.bad_rank = part.bad == 0 ? -1 : a.data_rank;
  part.bad_slice = part.bad == 0 ? -1 : a.slice;
  part.bad_parameter = part.bad == 0 ? -1 : static_cast<std::int32_t>(worst & 0xFFFFFFFFu);
  part.valid = 1;
}

// Adds up; of what was not finite, the first part with the gravest flag is told of.
ZEROFP8_HD void combine_parts(const CombinePartsArgs& a) {
  StepPart& total = *a.out;
  total = a.parts[0];
  if (total.valid != 1) total.refusal = static_cast<std::uint32_t>(StepSkip::kDisagree);
  for (std::int32_t k = 1; k < a.count; ++k) {
    const StepPart& part = a.parts[k];
    for (int i = 0; i < kExactSumWords; ++i) total.squares[i] += part.squares[i];
    carry_exactly(total.squares);
    const bool differs = part.valid != 1 || (a.compare && part.digest != total.digest);
    total.refusal = max_u32(total.refusal, part.refusal);
    if (differs)
      total.refusal = max_u32(total.refusal, static_cast<std::uint32_t>(StepSkip::kDisagree));
    if (part.bad <= total.bad) continue;
    total.bad = part.bad;
    total.bad_rank = part.bad_rank;
    total.bad_slice = part.bad_slice;
    total.bad_parameter = part.bad_parameter;
  }
}

// `refusal`: kDisagree, kFault, or 0.
ZEROFP8_HD StepSkip skip_of(bool bad, std::uint32_t refusal, double norm, double clip) {
  if (bad) return StepSkip::kNotFinite;
  if (refusal != 0) return static_cast<StepSkip>(refusal);
  return norm * clip <= kMaxGradient ? StepSkip::kNone : StepSkip::kTooLarge;
}

struct Decision {
  double norm, clip;
  StepSkip skip;
};
ZEROFP8_HD Decision decision_of(const StepPart& total, double max_norm) {
  Decision d{double_of(kInfDouble | (std::uint64_t{1} << 51)), 1.0, StepSkip::kNone};  // NaN
  if (total.bad == 0) {
    d.norm = sqrt_double(exact_value(total.squares));
    d.clip = clip_coefficient(d.norm, max_norm);
  }
  d.skip = skip_of(total.bad != 0, total.refusal, d.norm, d.clip);
  return d;
}
ZEROFP8_HD void decide_parameter(const DecideArgs& a, const Decision& d, std::int32_t i) {
  ParameterStep& p = a.steps[i];
  if (d.skip != StepSkip::kNone || p.used == 0) return;
  const HyperParameters& h = a.groups[p.group];
  advance(h, p.step, p.guard_c);
  p.scalars = adam_scalars(h, p.step, p.guarded != 0 ? p.guard_c : 0.0);
  p.scalars.clip = static_cast<float>(d.clip);
}
ZEROFP8_HD void decide_state(const DecideArgs& a, const Decision& d) {
  StepState& s = *a.state;
  s.before = s.applied;
  if (d.skip == StepSkip::kNone) {
    ++s.applied;
  } else {
    ++s.skipped;
  }
  s.norm = d.norm;
  s.clip = d.clip;
  s.skip = d.skip;
  s.bad_rank = a.total->bad_rank;
  s.bad_slice = a.total->bad_slice;
  s.bad_parameter = a.total->bad_parameter;
}
// What one thread does; the first one writes the state, which the others do not read. (In this
// order: the other one spills on sm_80.)
ZEROFP8_HD void decide(const DecideArgs& a, std::int32_t first, std::int32_t stride) {
  const Decision d = decision_of(*a.total, a.max_norm);
  for (std::int32_t i = first; i < a.parameters; i += stride) decide_parameter(a, d, i);
  if (first == 0) decide_state(a, d);
}

// Launch shapes: thread blocks of so many threads; one of them for a part.
inline constexpr int kStepThreads = 128;
inline unsigned decide_grid(std::int32_t parameters, unsigned max_grid) {
  const auto wanted = static_cast<unsigned>((parameters + kStepThreads - 1) / kStepThreads);
  return wanted == 0 ? 1 : wanted < max_grid ? wanted : max_grid;
}

}  // namespace zerofp8::element
