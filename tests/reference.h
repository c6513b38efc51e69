// An independent reference for tests: number formats as sorted tables of (value, code) built from
// their definitions, rounding by table search, Adam in float64. Nothing of the library is included,
// so that a mistake there can't be repeated here. Slow and plain on purpose.
//
//   const ref::Format& f = ref::e4m3();              // also e5m2(), ue4m4(), fp16(), bf16()
//   f.value(0x38) == 1.0;  f.nearest(465.0) == 0x7E; // saturates; nearest_ieee() goes to infinity
//   ref::Bracket b = f.bracket(0.3);                 // the two neighbours and where 0.3 lies
//   ref::Adam64 adam; adam.p = 1; adam.step(0.1, {.lr = 1e-3});
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace zerofp8::ref {

struct Bracket {
  double low = 0, high = 0;  // neighbours of |x|; equal where |x| is representable or saturated
  double fraction = 0;       // (|x| - low) / (high - low)
  std::uint32_t low_code = 0, high_code = 0;  // magnitude codes
};

class Format {
 public:
  // What the topmost exponent means: IEEE (infinity and NaN), only the last code is NaN, or
  // numbers.
  enum class Top { kIeee, kLastIsNan, kAllFinite };

  Format(std::string name, int bits, int exponent_bits, int mantissa_bits, int bias, bool sign,
         Top top)
      : name_(std::move(name)), bits_(bits), sign_(sign), top_(top) {
    const std::uint32_t magnitudes = 1u << (exponent_bits + mantissa_bits);
    const std::uint32_t first_special = top == Top::kIeee ? magnitudes - (1u << mantissa_bits)
                                        : top == Top::kLastIsNan ? magnitudes - 1
                                                                 : magnitudes;
    for (std::uint32_t code = 0; code < first_special; ++code) {
      const auto exponent = static_cast<int>(code >> mantissa_bits);
      const double fraction =
          double(code & ((1u << mantissa_bits) - 1)) / double(1u << mantissa_bits);
      values_.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                      : std::ldexp(1 + fraction, exponent - bias));
    }
    first_normal_ = values_[1u << mantissa_bits];
  }

  const std::string& name() const { return name_; }
  int bits() const { return bits_; }
  bool has_sign() const { return sign_; }
  bool has_infinity() const { return top_ == Top::kIeee; }
  bool has_nan() const { return top_ != Top::kAllFinite; }
  // Finite magnitudes in order; the index is the code.
  const std::vector<double>& values() const { return values_; }
  double max_finite() const { return values_.back(); }
  double min_subnormal() const { return values_[1]; }
  double min_normal() const { return first_normal_; }
  std::uint32_t max_code() const { return static_cast<std::uint32_t>(values_.size()) - 1; }
  std::uint32_t sign_bit() const { return sign_ ? 1u << (bits_ - 1) : 0u; }
  std::uint32_t infinity_code() const { return max_code() + 1; }

  double value(std::uint32_t code) const {
    const std::uint32_t magnitude = code & ~sign_bit();
    double v = std::numeric_limits<double>::quiet_NaN();
    if (magnitude < values_.size()) {
      v = values_[magnitude];
    } else if (has_infinity() && magnitude == values_.size()) {
      v = std::numeric_limits<double>::infinity();
    }
    return (code & sign_bit()) != 0 ? -v : v;
  }
  bool is_nan(std::uint32_t code) const { return std::isnan(value(code)); }

  // Neighbours of |x| for finite x; beyond the largest finite value both are that value.
  Bracket bracket(double x) const {
    const double a = std::fabs(x);
    if (a >= max_finite()) return {max_finite(), max_finite(), 0, max_code(), max_code()};
    const auto above = std::upper_bound(values_.begin(), values_.end(), a);
    const auto high = static_cast<std::uint32_t>(above - values_.begin());
    const double low_value = values_[high - 1];
    if (low_value == a) return {a, a, 0, high - 1, high - 1};
    return {low_value, values_[high], (a - low_value) / (values_[high] - low_value), high - 1,
            high};
  }

  // Round to nearest, ties to the even code; beyond the largest finite value saturates. x finite.
  std::uint32_t nearest(double x) const {
    const Bracket b = bracket(x);
    const double to_low = std::fabs(x) - b.low, to_high = b.high - std::fabs(x);
    const bool up = to_low > to_high || (to_low == to_high && b.low_code % 2 == 1);
    const std::uint32_t code = b.low_code == b.high_code || !up ? b.low_code : b.high_code;
    return code | (std::signbit(x) ? sign_bit() : 0u);
  }
  // As nearest(), but what rounds beyond the largest finite value becomes infinity (IEEE 754).
  std::uint32_t nearest_ieee(double x) const {
    const double last_gap = max_finite() - values_[values_.size() - 2];
    const bool over =
        std::fabs(x) >= max_finite() + last_gap / 2;  // a tie goes to "even": infinity
    return over ? infinity_code() | (std::signbit(x) ? sign_bit() : 0u) : nearest(x);
  }
  double round(double x) const { return value(nearest(x)); }
  double round_ieee(double x) const { return value(nearest_ieee(x)); }
  // Distance between the neighbours of x (of the value and the next one up where x is
  // representable).
  double ulp(double x) const {
    const std::uint32_t low = std::min(bracket(x).low_code, max_code() - 1);
    return values_[low + 1] - values_[low];
  }

 private:
  std::string name_;
  int bits_;
  bool sign_;
  Top top_;
  double first_normal_ = 0;
  std::vector<double> values_;
};

// OCP OFP8 E4M3 and E5M2, IEEE 754 binary16, bfloat16, and this project's unsigned UE4M4.
inline const Format& e4m3() {
  static const Format f("fp8_e4m3", 8, 4, 3, 7, true, Format::Top::kLastIsNan);
  return f;
}
inline const Format& e5m2() {
  static const Format f("fp8_e5m2", 8, 5, 2, 15, true, Format::Top::kIeee);
  return f;
}
inline const Format& ue4m4() {
  static const Format f("fp8_ue4m4", 8, 4, 4, 7, false, Format::Top::kAllFinite);
  return f;
}
inline const Format& fp16() {
  static const Format f("fp16", 16, 5, 10, 15, true, Format::Top::kIeee);
  return f;
}
inline const Format& bf16() {
  static const Format f("bf16", 16, 8, 7, 127, true, Format::Top::kIeee);
  return f;
}

// Largest error of one element of a block that is scaled by amax / max_finite and rounded to
// nearest: half an ulp of the code, relative 2^-(mantissa+1) for normal codes, half the smallest
// step below. `slack` covers the FP32 roundings of the scale, its inverse and the products.
inline double block_error_bound(const Format& f, double x, double amax, double scale_floor = 0) {
  const double scale = std::max(amax / f.max_finite(), scale_floor);
  const double relative = f.ulp(f.min_normal()) / f.min_normal() / 2;  // 2^-4 for E4M3
  constexpr double kSlack = 1 + 0x1p-20;
  return std::max(relative * std::fabs(x), f.min_subnormal() / 2 * scale) * kSlack;
}

struct AdamHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = true;  // AdamW; false: the L2 term is added to the gradient
};

// One element of Adam or AdamW in float64.
struct Adam64 {
  double p = 0, m = 0, v = 0;
  std::int64_t t = 0;
  void step(double g, const AdamHyper& h) {
    ++t;
    if (!h.decoupled) g += h.weight_decay * p;
    m = h.beta1 * m + (1 - h.beta1) * g;
    v = h.beta2 * v + (1 - h.beta2) * g * g;
    const double mhat = m / (1 - std::pow(h.beta1, double(t)));
    const double vhat = v / (1 - std::pow(h.beta2, double(t)));
    if (h.decoupled) p -= h.lr * h.weight_decay * p;
    p -= h.lr * mhat / (std::sqrt(vhat) + h.eps);
  }
};

}  // namespace zerofp8::ref
