// FP32 states have the bits of a plain loop; the guard leaves them alone and bounds quantised ones.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/adam_state.h"
#include "tests/codecs.h"
#include "tests/device_as_ops.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

using test::AdamLayout;
using test::AdamState;

constexpr int kBlock = 128;
constexpr std::int64_t kN = 4 * kBlock;

// The documented operations, one element at a time.
struct PlainAdam {
  std::vector<float> p, m, v;
  explicit PlainAdam(const std::vector<float>& start)
      : p(start), m(start.size(), 0.0f), v(start.size(), 0.0f) {}
  void step(const std::vector<float>& gradient, const AdamScalars& k) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      const float g = std::fma(k.l2, p[i], (gradient[i] * k.grad_factor) * k.clip);
      m[i] = std::fma(k.beta1, m[i], k.one_minus_beta1 * g);
      v[i] = std::fma(k.beta2, v[i], (k.one_minus_beta2 * g) * g);
      const float denominator = std::fma(std::sqrt(v[i]), k.inv_sqrt_bc2, k.eps);
      p[i] = std::fma(-k.step_size, m[i] / denominator, p[i] * k.decay);
    }
  }
};

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(test::bits(a[i]), test::bits(b[i]))
        << what << " " << i << ": " << a[i] << " " << b[i];
  }
}

TEST(AdamExact, Fp32StatesHaveTheBitsOfAPlainLoop) {
  const AdamLayout layouts[] = {{.weight = DType::kFp32},
                                {.weight = DType::kBf16, .master_bits = 16},
                                {.weight = DType::kBf16, .master_bits = 32},
                                {.weight = DType::kFp16, .master_bits = 32}};
  for (const AdamLayout& layout : layouts) {
    for (const Algorithm algorithm : {Algorithm::kAdamW, Algorithm::kAdam}) {
      const AdamOptions options{.algorithm = algorithm, .lr = 3e-3, .weight_decay = 0.05};
      const std::vector<float> start = test::gaussian(kN, 1);
      AdamState state(layout, start, kBlock);
      PlainAdam plain(start);
      for (std::int64_t t = 1; t <= 300; ++t) {
        AdamScalars k = test::scalars_at(options, t, false);
        k.grad_factor = 1.0f / 24;
        k.clip = t % 7 == 0 ? 0.313f : 1.0f;
        const std::vector<float> g = test::heavy_tailed(kN, static_cast<std::uint32_t>(t));
        state.step(test::ops_under_test(), g, k, t);
        plain.step(g, k);
      }
      ASSERT_NO_FATAL_FAILURE(expect_same_bits(state.master(), plain.p, "p"));
      ASSERT_NO_FATAL_FAILURE(
          expect_same_bits(state.exp_avg().decode(test::ops_under_test()), plain.m, "m"));
      ASSERT_NO_FATAL_FAILURE(
          expect_same_bits(state.exp_avg_sq().decode(test::ops_under_test()), plain.v, "v"));
    }
  }
}

// Extremes of FP32: tiny gradients whose squares underflow, and huge ones whose m^2 would overflow.
TEST(AdamExact, ExtremeGradientsHaveTheBitsOfAPlainLoop) {
  for (const float scale : {1e-45f, 1e-30f, 1e-20f, 1e15f, 1e19f, 3e20f, 1e22f, 3e38f}) {
    const std::vector<float> start = test::gaussian(kN, 1);
    AdamState state({}, start, kBlock);
    PlainAdam plain(start);
    for (std::int64_t t = 1; t <= 5; ++t) {
      const AdamScalars k = test::scalars_at({}, t, false);
      std::vector<float> g = test::gaussian(kN, static_cast<std::uint32_t>(t));
      for (float& value : g) value = std::clamp(value * scale, -3.4e38f, 3.4e38f);
      state.step(test::ops_under_test(), g, k, t);
      plain.step(g, k);
    }
    ASSERT_NO_FATAL_FAILURE(expect_same_bits(state.master(), plain.p, "p")) << scale;
    ASSERT_NO_FATAL_FAILURE(
        expect_same_bits(state.exp_avg_sq().decode(test::ops_under_test()), plain.v, "v"));
  }
}

struct Betas {
  double beta1, beta2;
};
void PrintTo(const Betas& betas, std::ostream* out) { *out << betas.beta1 << ", " << betas.beta2; }

class GuardTest : public testing::TestWithParam<Betas> {
 protected:
  AdamOptions options() const {
    return {.lr = 1e-3, .beta1 = GetParam().beta1, .beta2 = GetParam().beta2};
  }
  // Runs FP32 states with and without the guard and expects the same bits throughout.
  void expect_inactive(int steps,
                       const std::function<float(std::int64_t t, std::int64_t i)>& gradient) {
    AdamState on({}, test::gaussian(kN, 1), kBlock), off({}, test::gaussian(kN, 1), kBlock);
    std::int64_t step = 0;
    double c = 0;
    std::vector<float> g(kN);
    for (std::int64_t t = 1; t <= steps; ++t) {
      advance(options(), step, c);
      for (std::int64_t i = 0; i < kN; ++i) g[i] = gradient(t, i);
      on.step(test::ops_under_test(), g, adam_scalars(options(), t, c), t);
      off.step(test::ops_under_test(), g, adam_scalars(options(), t, 0), t);
      if (t < 20 || t % 50 == 0) {
        ASSERT_EQ(on.bytes(), off.bytes()) << "step " << t;
      }
    }
    ASSERT_EQ(on.bytes(), off.bytes());
  }
};
INSTANTIATE_TEST_SUITE_P(All, GuardTest,
                         testing::Values(Betas{.9, .95}, Betas{.9, .999}, Betas{.95, .98},
                                         Betas{0.0, .99}, Betas{.99, .9999}),
                         [](const auto& param) {
                           return std::to_string(int(param.param.beta1 * 100)) + "_" +
                                  std::to_string(int(param.param.beta2 * 10000));
                         });

float hash_uniform(std::int64_t t, std::int64_t i) {
  const std::uint32_t h = element::lowbias32(static_cast<std::uint32_t>(t * 100003 + i));
  return (float(h >> 8) + 0.5f) * 0x1p-24f;
}

TEST_P(GuardTest, NeverActsOnExactStatesOfConstantGradients) {
  expect_inactive(1500, [](std::int64_t, std::int64_t i) {
    return std::ldexp(i % 2 == 0 ? 0.1f + 0.01f * float(i % 97) : -1.0f / float(i),
                      int(i % 40) - 30);
  });
}
TEST_P(GuardTest, NeverActsOnExactStatesOfRandomGradients) {
  expect_inactive(3000, [](std::int64_t t, std::int64_t i) {
    const float u = hash_uniform(t, i);
    return (u - 0.5f) * std::ldexp(1.0f, int(i % 50) - 30);
  });
}
// Long silences with single spikes, and gradients that vanish for good.
TEST_P(GuardTest, NeverActsOnExactStatesOfSparseGradients) {
  expect_inactive(3000, [](std::int64_t t, std::int64_t i) {
    if (i % 4 == 0) return t == 1 + i % 100 ? 1.0f : 0.0f;
    if (i % 4 == 1) return hash_uniform(t, i) < 0.01f ? 1e3f : 0.0f;
    return t < 30 ? 0.5f : i % 4 == 2 ? 0.0f : 1e-5f;
  });
}
// Cauchy-Schwarz is met with equality where g grows by beta2 / beta1 each step: no slack is left
// but that for rounding.
TEST_P(GuardTest, NeverActsOnExactStatesOfTheExtremalSequence) {
  const double beta1 = GetParam().beta1, ratio = beta1 > 0 ? GetParam().beta2 / beta1 : 1.5;
  expect_inactive(400, [&](std::int64_t t, std::int64_t i) {
    const double growth = std::pow(ratio, double(t % 200));
    return static_cast<float>((1 + double(i) / 700) * 1e-4 * std::min(growth, 1e12));
  });
}

// What quantisation can do to an update: |delta p| <= lr sqrt(C_t (1 - beta2^t)) / (1 - beta1^t)
// for any moments that obey m^2 <= C_t v. Without the guard the same runs leave it behind.
struct Blowup {
  const char* name;
  float (*gradient)(std::int64_t t, std::int64_t i);
};
const Blowup kBlowups[] = {
    {"amax_drops_by_a_million",
     [](std::int64_t t, std::int64_t i) {
       return (hash_uniform(t, i) - 0.5f) * (t > 40 ? 1e-6f : 1.0f);
     }},
    {"one_outlier_of_a_thousand",
     [](std::int64_t t, std::int64_t i) {
       return (hash_uniform(t, i) - 0.5f) * (t == 30 && i % kBlock == 9 ? 1e3f : 1.0f);
     }},
    {"silent_elements_beside_active_ones",
     [](std::int64_t t, std::int64_t i) {
       return i % 2 == 0 || t < 30 ? hash_uniform(t, i) - 0.5f : 0.0f;
     }},
    {"levels_far_apart_in_a_block",
     [](std::int64_t t, std::int64_t i) {
       return (hash_uniform(t, i) - 0.5f) * std::ldexp(1.0f, -int(i % 30));
     }},
};
double largest_excess(const Blowup& blowup, const AdamLayout& layout, const AdamOptions& options,
                      bool guarded) {
  AdamState state(layout, std::vector<float>(kN, 0.0f), kBlock);
  std::int64_t step = 0;
  double c = 0, excess = 0;
  std::vector<float> g(kN);
  for (std::int64_t t = 1; t <= 400; ++t) {
    advance(options, step, c);
    for (std::int64_t i = 0; i < kN; ++i) g[i] = blowup.gradient(t, i);
    const std::vector<float> before = state.master();
    state.step(test::ops_under_test(), g, adam_scalars(options, t, guarded ? c : 0), t);
    const std::vector<float> after = state.master();
    const double bound = options.lr * std::sqrt(c * (1 - std::pow(options.beta2, double(t)))) /
                         (1 - std::pow(options.beta1, double(t)));
    for (std::int64_t i = 0; i < kN; ++i) {
      excess = std::max(excess, std::fabs(double{after[i]} - before[i]) / bound);
    }
  }
  return excess;
}

TEST_P(GuardTest, BoundsEveryUpdateOfQuantisedStates) {
  double unguarded = 0;
  for (const Blowup& blowup : kBlowups) {
    for (const Storage m : {Storage::kFp32, Storage::kBf16, Storage::kE4m3Block}) {
      for (const Storage r : {Storage::kBf16, Storage::kFp16Block, Storage::kUe4m4Block}) {
        const AdamLayout layout{
            .exp_avg = m,
            .exp_avg_sq = r,
            .exp_avg_rounding = options().beta1 > .93 ? Rounding::kStochastic : Rounding::kMixed};
        // 2^-16 of slack in the guard, as much again for FP32.
        EXPECT_LE(largest_excess(blowup, layout, options(), true), 1 + 0x1p-15)
            << blowup.name << " " << layout.name();
        unguarded = std::max(unguarded, largest_excess(blowup, layout, options(), false));
      }
    }
  }
  // With beta1 = 0 the update is at most that of the last gradient, with or without a guard.
  if (options().beta1 > 0) {
    EXPECT_GT(unguarded, 2) << "these runs do not need a guard: the test shows nothing";
  }
}

}  // namespace
}  // namespace zerofp8
