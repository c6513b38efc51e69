// Scalars of a step: exact sums, loss scale, bias corrections and the guard's constant.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "src/optim/adam_scalars.h"
#include "src/optim/exact_sum.h"
#include "src/optim/loss_scaler.h"
#include "tests/stored.h"
#include "zerofp8/ops.h"

namespace zerofp8 {
namespace {

// The exact sum by another way: an integer of 1,024 bits in units of 2^-512, added bit string by
// bit string.
class BigSum {
 public:
  void add(double x) {
    int exponent = 0;
    const double fraction = std::frexp(x, &exponent);  // x = fraction * 2^exponent
    const auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, 53));
    for (int bit = 0; bit < 53; ++bit) {
      if (mantissa >> bit & 1) set(exponent - 53 + bit + 512);
    }
  }
  // Rounded to 80 bits: far finer than float64.
  long double value() const {
    long double sum = 0;
    for (int i = 1023; i >= 0; --i) sum += std::ldexp(static_cast<long double>(bits_[i]), i - 512);
    return sum;
  }

 private:
  void set(int at) {  // adds 2^(at - 512) with carry
    while (bits_[at] == 1) bits_[at++] = 0;
    bits_[at] = 1;
  }
  std::array<char, 1025> bits_{};
};

std::vector<double> summands(std::uint32_t seed, int n, int spread) {
  std::mt19937_64 generator(seed);
  std::vector<double> x(static_cast<std::size_t>(n));
  for (double& value : x) {
    const int exponent = static_cast<int>(generator() % unsigned(2 * spread + 1)) - spread;
    value = std::ldexp(double(generator() >> 11), exponent - 53);
  }
  return x;
}
double sum_of(const std::vector<double>& x) {
  ExactSum sum;
  for (const double value : x) sum.add(value);
  return sum.value();
}

TEST(ExactSum, EqualsTheExactSum) {
  for (const int spread : {0, 3, 30, 100, 250}) {
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      const std::vector<double> x = summands(seed, 1000, spread);
      BigSum big;
      for (const double value : x) big.add(value);
      const double expected = static_cast<double>(big.value());
      const double ulp = std::nextafter(expected, INFINITY) - expected;
      ASSERT_NEAR(sum_of(x), expected, ulp) << spread;
    }
  }
}

TEST(ExactSum, HasTheSameBitsForAnyOrderAndAnySplit) {
  std::mt19937 generator(5);
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    std::vector<double> x = summands(seed, 500, 40);
    const double expected = sum_of(x);
    std::shuffle(x.begin(), x.end(), generator);
    ASSERT_EQ(sum_of(x), expected);
    for (const int parts : {2, 3, 7}) {
      std::vector<ExactSum> partial(static_cast<std::size_t>(parts));
      for (std::size_t i = 0; i < x.size(); ++i) partial[i % partial.size()].add(x[i]);
      ExactSum total;
      for (const ExactSum& part : partial) total.add(part);
      ASSERT_EQ(total.value(), expected);
      ExactSum backwards;
      for (auto part = partial.rbegin(); part != partial.rend(); ++part) backwards.add(*part);
      ASSERT_EQ(backwards.value(), expected);
    }
  }
}

// What float64 loses: 2^60 + many small ones.
TEST(ExactSum, SmallSummandsCount) {
  ExactSum sum;
  sum.add(0x1p60);
  for (int i = 0; i < 4096; ++i) sum.add(1.0);
  EXPECT_EQ(sum.value(), 0x1p60 + 4096);
  EXPECT_EQ(sum_of({}), 0.0);
  EXPECT_EQ(sum_of({0.0, 0.0}), 0.0);
}

// Squares of the largest and the smallest FP32 numbers, as case 21 has them, 2^31 of the largest.
TEST(ExactSum, RangeOfSquaresOfFp32) {
  const double largest = double{3.4028235e38f} * 3.4028235e38f, smallest = 0x1p-298;
  EXPECT_EQ(sum_of({largest}), largest);
  EXPECT_EQ(sum_of({smallest}), smallest);
  EXPECT_EQ(sum_of({smallest, smallest, smallest}), 3 * smallest);
  ExactSum sum;
  sum.add(largest);
  for (int doubling = 0; doubling < 31; ++doubling) sum.add(sum);
  EXPECT_EQ(sum.value(), largest * 0x1p31);
  EXPECT_EQ(std::sqrt(sum_of(std::vector<double>(100, double{1e20f} * 1e20f))), double{1e20f} * 10);
  EXPECT_NEAR(std::sqrt(sum_of(std::vector<double>(100, 1e-60))), 1e-29, 1e-44);
}

TEST(ExactSum, NonFiniteStaysVisible) {
  EXPECT_TRUE(std::isinf(sum_of({1.0, INFINITY})));
  EXPECT_FALSE(std::isfinite(sum_of({1.0, NAN, 2.0})));
  ExactSum sum, bad;
  bad.add(INFINITY);
  sum.add(1.0);
  sum.add(bad);
  EXPECT_FALSE(std::isfinite(sum.value()));
}

// The sums of squares of the kernel are exact enough for a norm: relative 2^-49 for a block, any
// storage.
TEST(SumSquares, AgreesWithLongDouble) {
  for (const int block : test::kBlockSizes) {
    const std::vector<float> x = test::heavy_tailed(4 * 256, 3);
    test::Stored stored(Storage::kFp32, 4 * 256, block);
    stored.encode(cpu_ops(), x);
    std::vector<double> out(std::size_t(4 * 256 / block));
    cpu_ops().sum_squares(stored.view(), {}, 0.3f, out.data(), 4 * 256, block);
    for (std::size_t b = 0; b < out.size(); ++b) {
      long double expected = 0;
      for (int i = 0; i < block; ++i) {
        const float scaled = x[b * std::size_t(block) + std::size_t(i)] * 0.3f;
        expected += static_cast<long double>(scaled) * scaled;
      }
      EXPECT_NEAR(out[b], double(expected), double(expected) * 0x1p-49);
    }
  }
}

std::vector<double> scales_after_overflows(LossScaler& scaler, int overflows) {
  std::vector<double> scales;
  for (int i = 0; i < overflows; ++i) {
    scaler.update(true);
    scales.push_back(scaler.scale());
  }
  return scales;
}

// The inverse of the scale stays a normal FP32 number.
TEST(LossScaler, GrowthEndsAt2To126) {
  LossScaler scaler({.enabled = true, .dynamic = true, .initial = 0x1p125, .window = 1});
  for (int i = 0; i < 5; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 0x1p126);
  for (int i = 0; i < 8; ++i) scaler.update(true);
  EXPECT_LT(scaler.scale(), 0x1p126);
}

TEST(LossScaler, Case17HysteresisThenHalvingToTheFloor) {
  LossScaler scaler({.enabled = true,
                     .dynamic = true,
                     .initial = 65536,
                     .window = 1000,
                     .hysteresis = 2,
                     .min_scale = 1});
  EXPECT_EQ(scaler.scale(), 65536);
  const std::vector<double> scales = scales_after_overflows(scaler, 17);
  EXPECT_EQ(scales[0], 65536);  // only consumes the hysteresis
  for (int i = 1; i < 17; ++i) EXPECT_EQ(scales[i], 65536 / std::pow(2, i));
  EXPECT_EQ(scales.back(), 1);
  EXPECT_TRUE(scaler.at_floor());
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(LossScaler, AtFloorOnlyWhereTheNextOverflowHasNoAnswer) {
  LossScaler scaler(
      {.enabled = true, .dynamic = true, .initial = 4, .hysteresis = 3, .min_scale = 2});
  std::vector<bool> floor;
  for (int i = 0; i < 4; ++i) {
    floor.push_back(scaler.at_floor());
    scaler.update(true);
  }
  EXPECT_EQ(floor, (std::vector<bool>{false, false, false, true}));
}

TEST(LossScaler, WindowOfCleanStepsDoubles) {
  LossScaler scaler({.enabled = true, .dynamic = true, .initial = 8, .window = 3, .hysteresis = 1});
  std::vector<double> scales;
  for (const bool overflow : {false, false, false, false, false, true, false, false, false}) {
    scaler.update(overflow);
    scales.push_back(scaler.scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 16, 16, 16, 8, 8, 8, 16}));
}

TEST(LossScaler, HysteresisComesBackWithGrowthOrEachCleanStepIfConsecutive) {
  for (const bool consecutive : {false, true}) {
    LossScaler scaler({.enabled = true,
                       .dynamic = true,
                       .initial = 16,
                       .window = 100,
                       .hysteresis = 2,
                       .consecutive_hysteresis = consecutive});
    for (const bool overflow : {true, false, true}) scaler.update(overflow);
    EXPECT_EQ(scaler.scale(), consecutive ? 16 : 8);
  }
}

TEST(LossScaler, StaticAndDisabledNeverMove) {
  LossScaler fixed({.enabled = true, .dynamic = false, .initial = 128});
  LossScaler off;
  for (const bool overflow : {true, false, true, true}) {
    fixed.update(overflow);
    off.update(overflow);
    EXPECT_EQ(fixed.scale(), 128);
    EXPECT_EQ(off.scale(), 1);
    EXPECT_FALSE(fixed.at_floor());
  }
}

// Case 39 d: scale 4, window 4, saved after three clean steps; one more gives 8.
TEST(LossScaler, Case39StateComesBackWhole) {
  const LossScaleOptions options{
      .enabled = true, .dynamic = true, .initial = 4, .window = 4, .hysteresis = 2};
  LossScaler saved(options);
  for (int i = 0; i < 3; ++i) saved.update(false);
  LossScaler loaded(options);
  loaded.restore(saved.state());
  loaded.update(false);
  EXPECT_EQ(loaded.scale(), 8);
}

TEST(AdamScalars, Case30BiasCorrections) {
  const AdamScalars k = adam_scalars({.lr = 1.0}, 1000, 0);
  EXPECT_NEAR(1 / double{k.inv_sqrt_bc2} / k.inv_sqrt_bc2, 0.63230458, 1e-7);
  // A 64-bit step: beyond 2^24 and 2^53 / 1000 both corrections are 1.
  for (const std::int64_t t :
       {std::int64_t{1} << 24, (std::int64_t{1} << 24) + 1, std::int64_t{1} << 40}) {
    const AdamScalars late = adam_scalars({.lr = 0.5}, t, 0);
    EXPECT_EQ(late.step_size, 0.5f);
    EXPECT_EQ(late.inv_sqrt_bc2, 1.0f);
  }
  std::int64_t step = std::int64_t{1} << 24;
  double c = 1;
  advance({}, step, c);
  EXPECT_EQ(step, (std::int64_t{1} << 24) + 1);
}

TEST(AdamScalars, DecayIsDecoupledOrL2NeverBoth) {
  const AdamOptions w{.algorithm = Algorithm::kAdamW, .lr = 0.1, .weight_decay = 0.1};
  EXPECT_EQ(adam_scalars(w, 1, 0).decay, 0.99f);
  EXPECT_EQ(adam_scalars(w, 1, 0).l2, 0.0f);
  const AdamOptions l2{.algorithm = Algorithm::kAdam, .lr = 0.1, .weight_decay = 0.1};
  EXPECT_EQ(adam_scalars(l2, 1, 0).decay, 1.0f);
  EXPECT_EQ(adam_scalars(l2, 1, 0).l2, 0.1f);
}

// C_t is the largest m^2 / v over all gradient sequences: random ones stay below, the extremal one
// meets it.
TEST(AdamScalars, GuardConstantIsTheSupremum) {
  for (const auto& [b1, b2] : {std::pair{.9, .95}, {.9, .999}, {.95, .98}, {.5, .2}}) {
    std::int64_t step = 0;
    double c = 0;
    for (int t = 1; t <= 60; ++t) {
      advance({.beta1 = b1, .beta2 = b2}, step, c);
      double m = 0, v = 0;
      for (int i = 1; i <= t; ++i) {
        const double g = std::pow(b1 / b2, t - i);
        m = b1 * m + (1 - b1) * g;
        v = b2 * v + (1 - b2) * g * g;
      }
      EXPECT_NEAR(m * m / v, c, 1e-10 * c);
    }
  }
}
TEST(AdamScalars, GuardConstantHoldsWhereBetasChange) {
  std::mt19937 generator(3);
  std::uniform_real_distribution<double> uniform;
  for (int run = 0; run < 200; ++run) {
    std::int64_t step = 0;
    double c = 0, m = 0, v = 0;
    for (int t = 1; t <= 100; ++t) {
      const double b1 = 0.99 * uniform(generator), b2 = 0.1 + 0.89 * uniform(generator);
      advance({.beta1 = b1, .beta2 = b2}, step, c);
      const double g = run % 2 == 0 ? uniform(generator) - 0.3 : std::pow(1.2, t);
      m = b1 * m + (1 - b1) * g;
      v = b2 * v + (1 - b2) * g * g;
      ASSERT_LE(m * m, c * v * (1 + 1e-12));
    }
  }
}
TEST(AdamScalars, NoGuardWithoutAConstant) {
  EXPECT_EQ(adam_scalars({}, 1, 0).guard, 0.0f);
  EXPECT_EQ(adam_scalars({}, 1, INFINITY).guard, 0.0f);
  std::int64_t step = 0;
  double c = 0;
  advance({.beta1 = 0.9, .beta2 = 0.0}, step, c);
  EXPECT_TRUE(std::isinf(c));
}

// Cases 21 and 22: c = min(1, max_norm / (norm + 1e-6)).
TEST(AdamScalars, ClipCoefficient) {
  EXPECT_NEAR(clip_coefficient(5.0, 1.0), 0.19999996, 1e-12);
  EXPECT_NEAR(5.0 * clip_coefficient(5.0, 1.0), 0.9999998, 1e-9);
  EXPECT_EQ(clip_coefficient(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_coefficient(1e30, 0.0), 1.0);
  EXPECT_NEAR(clip_coefficient(1e21, 1.0), 1e-21, 1e-33);
  EXPECT_EQ(clip_coefficient(0.0, 1e-9), 1e-3);
}

}  // namespace
}  // namespace zerofp8
