// One element of one Adam or AdamW step, in FP32 with explicit fma: the only text of the formula.
//
//   m' = beta1 m + (1 - beta1) g                                  Kingma & Ba 2015, algorithm 1
//   v' = beta2 v + (1 - beta2) g^2
//   v' = max(v', m'^2 / C_t)          only where a moment is quantised; see docs/numerics.md,
//   "Guard" p' = p (1 - lr wd) - lr / (1 - beta1^t) * m' / (sqrt(v' / (1 - beta2^t)) + eps)
//                                                                 Loshchilov & Hutter 2019,
//                                                                 algorithm 2
// Adam's L2 term is added to g first.
#pragma once

#include "zerofp8/element.h"
#include "zerofp8/ops.h"

namespace zerofp8::element {

ZEROFP8_HD View weight_view(DType dtype, const void* weight) {
  return {*plain_storage(dtype), const_cast<void*>(weight), nullptr};
}

// The gradient as Adam sees it: averaged and unscaled, then clipped, then L2.
ZEROFP8_HD float adam_gradient(float sum, float p, const AdamScalars& s) {
  return fma_rn(s.l2, p, (sum * s.grad_factor) * s.clip);
}
ZEROFP8_HD float adam_first(float m, float g, const AdamScalars& s) {
  return fma_rn(s.beta1, m, s.one_minus_beta1 * g);
}
// `v` is the stored second moment; `guarded` is m'^2 / C_t or 0.
ZEROFP8_HD float adam_second(float v, float g, float m, const AdamScalars& s) {
  const float fresh = fma_rn(s.beta2, v, (s.one_minus_beta2 * g) * g);
  const float guarded = m * (m * s.guard);  // not m * m first: inf * 0 would be NaN without a guard
  return fresh > guarded ? fresh : guarded;
}
ZEROFP8_HD float adam_second_of_root(float r, float g, float m, const AdamScalars& s) {
  const float fresh = fma_rn(s.beta2 * r, r, (s.one_minus_beta2 * g) * g);
  const float guarded = m * (m * s.guard);
  return fresh > guarded ? fresh : guarded;
}
ZEROFP8_HD float adam_weight(float p, float m, float root, const AdamScalars& s) {
  const float denominator = fma_rn(root, s.inv_sqrt_bc2, s.eps);
  return fma_rn(-s.step_size, div_rn(m, denominator), p * s.decay);
}

struct AdamElement {
  float m, v, p;  // v: the second moment, or with kRoot its square root
};
// All of it for one element; `v` as it is stored.
template <bool kRoot>
ZEROFP8_HD AdamElement adam_element(float sum, float m, float v, float p, const AdamScalars& s) {
  const float g = adam_gradient(sum, p, s);
  const float first = adam_first(m, g, s);
  const float second = kRoot ? adam_second_of_root(v, g, first, s) : adam_second(v, g, first, s);
  const float root = sqrt_rn(second);
  return {first, kRoot ? root : second, adam_weight(p, first, root, s)};
}

}  // namespace zerofp8::element
