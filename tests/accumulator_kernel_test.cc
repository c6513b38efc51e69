// FP8 accumulation over many micro-batches: case 10 with the two bounds of the design, case 35's
// amax.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/codecs.h"
#include "tests/device_as_ops.h"
#include "tests/stored.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

using test::Stored;

// Constant gradients, uniform in [.05, 1], blocks of 256.
std::vector<float> constant_gradients(std::int64_t n) {
  std::vector<float> g(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < g.size(); ++i) {
    const std::uint32_t h = element::lowbias32(static_cast<std::uint32_t>(i) + 17);
    g[i] = 0.05f + 0.95f * float(h >> 8) * 0x1p-24f;
  }
  return g;
}

struct Sum {
  Storage storage = Storage::kE4m3Block;
  Rounding rounding = Rounding::kNearest;
  bool error_feedback = false;
  int block = 256;
  std::uint32_t data_rank = 0;
};
// The running sum after `micro_batches`, as it is stored (with its residual, where there is one).
std::vector<float> accumulate(const Sum& sum, const std::vector<std::vector<float>>& gradients,
                              int micro_batches) {
  const auto n = static_cast<std::int64_t>(gradients[0].size());
  Stored acc(sum.storage, n, sum.block), residual(sum.storage, n, sum.block);
  for (int k = 0; k < micro_batches; ++k) {
    Stored g(Storage::kFp32, n, sum.block);
    g.encode(test::ops_under_test(), gradients[static_cast<std::size_t>(k) % gradients.size()]);
    const std::uint64_t key = random_key({.purpose = Purpose::kAccumulator,
                                          .micro_batch = std::uint32_t(k),
                                          .data_rank = sum.data_rank});
    test::ops_under_test().accumulate(acc.view(), sum.error_feedback ? residual.view() : View{},
                                      g.view(), n, sum.block, sum.rounding, {.key = key});
  }
  std::vector<float> total = acc.decode(test::ops_under_test());
  if (sum.error_feedback) {
    const std::vector<float> rest = residual.decode(test::ops_under_test());
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += rest[i];
  }
  return total;
}

constexpr std::int64_t kN = 16 * 256;
constexpr int kMicroBatches = 512;

struct Errors {
  double worst = 0, mean = 0, rms = 0;  // of the mean over micro-batches, relative
};
Errors errors_of(const std::vector<float>& total, const std::vector<float>& g, int micro_batches) {
  Errors e;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double error = double{total[i]} / micro_batches / g[i] - 1;
    e.worst = std::max(e.worst, std::fabs(error));
    e.mean += error / double(g.size());
    e.rms += error * error / double(g.size());
  }
  e.rms = std::sqrt(e.rms);
  return e;
}

TEST(Accumulator, Case10Fp32IsExact) {
  const std::vector<float> total =
      accumulate({.storage = Storage::kFp32}, {std::vector<float>(kN, 1.0f)}, kMicroBatches);
  for (const float value : total) ASSERT_EQ(value / kMicroBatches, 1.0f);
}

// bf16 stops at 256: the mean is 0.5, which is why a warning is due above 256 micro-batches.
TEST(Accumulator, Case10Bf16StopsAt256) {
  const std::vector<float> total =
      accumulate({.storage = Storage::kBf16}, {std::vector<float>(kN, 1.0f)}, kMicroBatches);
  for (const float value : total) ASSERT_EQ(value, 256.0f);
}

TEST(Accumulator, Case10OnesAreExactInEveryBlockFormat) {
  for (const Storage storage : {Storage::kE4m3Block, Storage::kE5m2Block, Storage::kFp16Block}) {
    const std::vector<float> total =
        accumulate({.storage = storage}, {std::vector<float>(kN, 1.0f)}, kMicroBatches);
    for (const float value : total) ASSERT_NEAR(value, 512.0f, 512 * 1e-4);
  }
}

TEST(Accumulator, Case10NearestIsWithinSixPercentEach) {
  const std::vector<float> g = constant_gradients(kN);
  const Errors e = errors_of(accumulate({}, {g}, kMicroBatches), g, kMicroBatches);
  EXPECT_LE(e.worst, 0.0625);
}

TEST(Accumulator, Case10StochasticIsUnbiasedAndWithinFifteenPercentEach) {
  const std::vector<float> g = constant_gradients(kN);
  double mean = 0, variance = 0;
  constexpr int kRuns = 8;
  for (std::uint32_t rank = 0; rank < kRuns; ++rank) {
    const Sum sum{.rounding = Rounding::kStochastic, .data_rank = rank};
    const Errors e = errors_of(accumulate(sum, {g}, kMicroBatches), g, kMicroBatches);
    EXPECT_LE(e.worst, 0.15);
    mean += e.mean / kRuns;
    variance += e.rms * e.rms / double(kN) / kRuns / kRuns;
  }
  EXPECT_LE(std::fabs(mean), 4 * std::sqrt(variance));
}

// Up to 16 micro-batches nearest is the better choice; random gradients, every block size.
TEST(Accumulator, FewMicroBatchesStayWithinTheirRoundings) {
  for (const int block : test::kBlockSizes) {
    for (const int micro_batches : {1, 2, 4, 16}) {
      std::vector<std::vector<float>> g;
      for (int k = 0; k < micro_batches; ++k)
        g.push_back(test::gaussian(kN, 40 + std::uint32_t(k)));
      const std::vector<float> total = accumulate({.block = block}, g, micro_batches);
      double error = 0, squares = 0;
      for (std::int64_t i = 0; i < kN; ++i) {
        double exact = 0;
        for (const std::vector<float>& x : g) exact += x[i];
        error += (total[i] - exact) * (total[i] - exact);
        squares += exact * exact;
      }
      // Each of A roundings adds (.0265 |sum so far|)^2, together .0265^2 (1 + ... + A) / A of the
      // last.
      EXPECT_LE(std::sqrt(error / squares), 0.0265 * 1.1 * std::sqrt((micro_batches + 1) / 2.0));
    }
  }
}

double relative_rms(const std::vector<float>& total, const std::vector<std::vector<float>>& g,
                    int micro_batches) {
  double error = 0, squares = 0;
  for (std::size_t i = 0; i < total.size(); ++i) {
    double exact = 0;
    for (int k = 0; k < micro_batches; ++k) exact += g[static_cast<std::size_t>(k) % g.size()][i];
    error += (total[i] - exact) * (total[i] - exact);
    squares += exact * exact;
  }
  return std::sqrt(error / squares);
}

// Two bytes per element, as bf16, and about ten times closer.
TEST(Accumulator, ErrorFeedbackIsFarCloserThanBf16) {
  std::vector<std::vector<float>> random;
  for (std::uint32_t k = 0; k < 64; ++k) random.push_back(test::gaussian(kN, 80 + k));
  const std::vector<std::vector<float>> constant = {constant_gradients(kN)};
  struct Row {
    const std::vector<std::vector<float>>& gradients;
    int micro_batches;
    double times_closer;
  };
  for (const Row& row : {Row{random, 16, 2}, Row{random, 64, 2}, Row{constant, 64, 8},
                         Row{constant, 200, 8}, Row{constant, 512, 20}}) {
    const double feedback =
        relative_rms(accumulate({.error_feedback = true}, row.gradients, row.micro_batches),
                     row.gradients, row.micro_batches);
    const double bf16 =
        relative_rms(accumulate({.storage = Storage::kBf16}, row.gradients, row.micro_batches),
                     row.gradients, row.micro_batches);
    EXPECT_LT(feedback * row.times_closer, bf16) << row.micro_batches << ": " << bf16 / feedback;
    RecordProperty("closer_" + std::to_string(row.micro_batches), std::to_string(bf16 / feedback));
  }
}

// Case 35: the amax of the sum counts, not that of the last micro-batch.
TEST(Accumulator, Case35FallingAmaxDoesNotClipEarlierMicroBatches) {
  const std::vector<float> levels = {8, 2, 1};
  // Apart: each micro-batch has its own element; the scale must stay 8 / 448.
  Stored acc(Storage::kE4m3Block, 128, 128);
  for (int k = 0; k < 3; ++k) {
    std::vector<float> g(128, 0.0f);
    g[k] = levels[k];
    Stored gradient(Storage::kFp32, 128, 128);
    gradient.encode(test::ops_under_test(), g);
    EXPECT_EQ(test::ops_under_test().accumulate(acc.view(), {}, gradient.view(), 128, 128,
                                                Rounding::kNearest, {}),
              test::bits(8.0f));
  }
  EXPECT_FLOAT_EQ(1 / acc.scales()[0], 56.0f);
  const std::vector<float> back = acc.decode(test::ops_under_test());
  for (int k = 0; k < 3; ++k) EXPECT_NEAR(back[k], levels[k], 0.0625 * levels[k]);
  // Over the kind: any order and size of levels, each element of one micro-batch only.
  for (int e = -30; e <= 30; e += 5) {
    std::vector<std::vector<float>> g;
    for (int k = 0; k < 6; ++k) {
      g.emplace_back(256, 0.0f);
      g.back()[k] = std::ldexp(1.5f, (k * 5 + e) % 7 - 3);
    }
    const std::vector<float> total = accumulate({}, g, 6);
    for (int k = 0; k < 6; ++k) EXPECT_NEAR(total[k], g[k][k], 6 * 0.0625 * g[k][k]);
  }
}

// Case 5's sum: 256 + 1 in each accumulator.
TEST(Accumulator, Case5TwoMicroBatches) {
  const std::vector<std::vector<float>> g = {std::vector<float>(256, 256.0f),
                                             std::vector<float>(256, 1.0f)};
  EXPECT_EQ(accumulate({.storage = Storage::kFp32}, g, 2)[3], 257.0f);
  EXPECT_EQ(accumulate({.storage = Storage::kBf16}, g, 2)[3], 256.0f);
  EXPECT_EQ(accumulate({.storage = Storage::kFp16Block}, g, 2)[3], 257.0f);
  EXPECT_NEAR(accumulate({.storage = Storage::kE4m3Block}, g, 2)[3], 257.0f, 1e-3);
}

// A non-finite gradient shows in the returned bits and stays in the sum until the buffer is
// cleared.
TEST(Accumulator, NonFiniteValuesAreReportedAndStay) {
  for (const Storage storage : test::kAllStorages) {
    for (const bool feedback : {false, true}) {
      Stored acc(storage, 256, 128), residual(storage, 256, 128);
      const View rest = feedback ? residual.view() : View{};
      for (int k = 0; k < 3; ++k) {
        std::vector<float> g(256, 1.0f);
        if (k == 1) g[130] = INFINITY;
        Stored gradient(Storage::kFp32, 256, 128);
        gradient.encode(test::ops_under_test(), g);
        const std::uint32_t amax = test::ops_under_test().accumulate(
            acc.view(), rest, gradient.view(), 256, 128, Rounding::kNearest, {});
        EXPECT_EQ(amax >= 0x7F800000u, k >= 1) << test::storage_name(storage) << " after " << k;
      }
      EXPECT_FALSE(std::isfinite(acc.decode(test::ops_under_test())[130]))
          << test::storage_name(storage);
      EXPECT_TRUE(std::isfinite(acc.decode(test::ops_under_test())[3]));
    }
  }
}

}  // namespace
}  // namespace zerofp8
