// The arithmetic of the reduce-scatter with simulated ranks: error bounds whatever the number of
// ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/codecs.h"
#include "tests/stored.h"

namespace zerofp8 {
namespace {

using test::Stored;

constexpr int kBlock = 128;

// out = factor * sum over ranks of the decoded messages, as each rank computes its shard.
std::vector<float> reduce(std::vector<Stored>& messages, std::int64_t n, int block, float factor,
                          std::uint32_t* amax = nullptr) {
  std::vector<View> views;
  for (Stored& message : messages) views.push_back(message.view());
  std::vector<float> out(static_cast<std::size_t>(n));
  const std::uint32_t bits = cpu_ops().decode_sum(
      views.data(), nullptr, static_cast<int>(views.size()), factor, out.data(), n, block);
  if (amax != nullptr) *amax = bits;
  return out;
}
std::vector<float> reduce(const std::vector<std::vector<float>>& gradients, Storage wire, int block,
                          float factor, std::uint32_t* amax = nullptr) {
  const auto n = static_cast<std::int64_t>(gradients[0].size());
  std::vector<Stored> messages;
  for (const std::vector<float>& g : gradients) {
    messages.emplace_back(wire, n, block);
    messages.back().encode(cpu_ops(), g);
  }
  return reduce(messages, n, block, factor, amax);
}

enum class Shape { kGaussian, kHeavyTailed };
struct Row {
  int ranks;
  Shape shape;
};
class ReduceScatterTest : public testing::TestWithParam<Row> {
 protected:
  std::vector<std::vector<float>> gradients(std::int64_t n) const {
    std::vector<std::vector<float>> all;
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      const auto seed = static_cast<std::uint32_t>(100 + rank);
      all.push_back(GetParam().shape == Shape::kGaussian ? test::gaussian(n, seed)
                                                         : test::heavy_tailed(n, seed));
    }
    return all;
  }
};
std::vector<Row> rows() {
  std::vector<Row> all;
  for (const int ranks : {2, 3, 4, 5, 8, 16, 31, 64, 100, 128, 256}) {
    for (const Shape shape : {Shape::kGaussian, Shape::kHeavyTailed}) all.push_back({ranks, shape});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, ReduceScatterTest, testing::ValuesIn(rows()), [](const auto& param) {
  return (param.param.shape == Shape::kGaussian ? "gaussian_" : "heavy_tailed_") +
         std::to_string(param.param.ranks);
});

// RMS error of the mean over a set of blocks, over sqrt(sum_i |g_i|^2) / W, with |.| the L2 norm
// over the set. Where the bound comes from: E4M3 to nearest at x of relative position m in [1, 2)
// errs by a uniform +-2^-4 of the power of two below, so E[err^2] = (2^-3)^2 / 12 / m^2 * x^2, and
// averaged over a log-uniform m (E[m^-2] = 3 / (8 ln 2)) that is (.0265 |x|)^2. Errors of ranks are
// independent, so squares add: |error of the sum|^2 = sum_i (.0265 |g_i|)^2 whatever W. A
// subnormal's error is below 2^-10 of amax / 448, a share too small to show. Rounding the sum
// itself in FP32 adds at most W * 2^-24 relative.
double relative_error(const std::vector<std::vector<float>>& gradients,
                      const std::vector<float>& mean, std::int64_t begin, std::int64_t end) {
  const auto ranks = static_cast<double>(gradients.size());
  double error = 0, squares = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    double exact = 0;
    for (const std::vector<float>& g : gradients) {
      exact += g[i];
      squares += double{g[i]} * g[i];
    }
    error += (mean[i] - exact / ranks) * (mean[i] - exact / ranks);
  }
  return std::sqrt(error) / (std::sqrt(squares) / ranks);
}

// Over the whole message the figure of the design holds; over one set of 16 blocks it is a sample
// of 2,048 errors (for heavy tails a handful of outliers carry the sum), so the worst of them
// gets 1.5 times as much.
TEST_P(ReduceScatterTest, Fp8ErrorMeetsTheBoundWhateverTheNumberOfRanks) {
  constexpr std::int64_t kN = 128 * kBlock, kSet = 16 * kBlock;
  const std::vector<std::vector<float>> g = gradients(kN);
  const std::vector<float> mean =
      reduce(g, Storage::kE4m3Block, kBlock, 1.0f / float(GetParam().ranks));
  EXPECT_LE(relative_error(g, mean, 0, kN), 0.0265);
  for (std::int64_t begin = 0; begin < kN; begin += kSet) {
    EXPECT_LE(relative_error(g, mean, begin, begin + kSet), 0.0265 * 1.5);
  }
}

// Element by element, never more than the sum of each rank's own rounding: no hop rounds again.
TEST_P(ReduceScatterTest, EachElementIsWithinTheSumOfTheRoundingsOfItsRanks) {
  constexpr std::int64_t kN = 16 * kBlock;
  struct Wire {
    Storage storage;
    const ref::Format* format;
  };
  const std::vector<std::vector<float>> g = gradients(kN);
  const float factor = 1.0f / float(GetParam().ranks);
  for (const Wire& wire : {Wire{Storage::kE4m3Block, &ref::e4m3()},
                           Wire{Storage::kE5m2Block, &ref::e5m2()}, Wire{Storage::kBf16, nullptr},
                           Wire{Storage::kFp16, nullptr}, Wire{Storage::kFp32, nullptr}}) {
    const std::vector<float> mean = reduce(g, wire.storage, kBlock, factor);
    for (std::int64_t block = 0; block < kN; block += kBlock) {
      std::vector<double> amax(g.size());
      for (std::size_t r = 0; r < g.size(); ++r) {
        for (int i = 0; i < kBlock; ++i) {
          amax[r] = std::max(amax[r], std::fabs(double{g[r][block + i]}));
        }
      }
      for (std::int64_t i = block; i < block + kBlock; ++i) {
        double exact = 0, size = 0, bound = 0;
        for (std::size_t r = 0; r < g.size(); ++r) {
          exact += g[r][i];
          size += std::fabs(g[r][i]);
          bound += wire.format != nullptr ? ref::block_error_bound(*wire.format, g[r][i], amax[r])
                   : wire.storage == Storage::kBf16 ? 0x1p-8 * std::fabs(g[r][i])
                   : wire.storage == Storage::kFp16
                       ? std::max(0x1p-11 * std::fabs(g[r][i]), 0x1p-25)
                       : 0;
        }
        bound += (double(g.size()) + 2) * 0x1p-24 * (size + bound);  // FP32 additions
        if (wire.storage == Storage::kFp16 && *std::max_element(amax.begin(), amax.end()) > 65504) {
          continue;  // beyond fp16: infinity, and a skipped step
        }
        ASSERT_LE(std::fabs(mean[i] - exact / double(g.size())), bound / double(g.size()))
            << test::storage_name(wire.storage) << " element " << i;
      }
    }
  }
}

// A ring in FP8 rounds at each hop, so its error grows with W: the same gradients, for comparison.
TEST(ReduceScatter, ErrorDoesNotGrowWithRanksWhereARingsDoes) {
  constexpr std::int64_t kN = 64 * kBlock;
  std::vector<double> ours, ring;
  for (const int ranks : {4, 64, 256}) {
    std::vector<std::vector<float>> g;
    for (int r = 0; r < ranks; ++r) g.push_back(test::gaussian(kN, 7 + std::uint32_t(r)));
    const float factor = 1.0f / float(ranks);
    ours.push_back(relative_error(g, reduce(g, Storage::kE4m3Block, kBlock, factor), 0, kN));
    std::vector<float> sum = g[0];
    for (int r = 1; r < ranks; ++r) {
      for (std::int64_t i = 0; i < kN; ++i) sum[i] += g[r][i];
      Stored hop(Storage::kE4m3Block, kN, kBlock);
      hop.encode(cpu_ops(), sum);
      sum = hop.decode(cpu_ops());
    }
    for (float& value : sum) value *= factor;
    ring.push_back(relative_error(g, sum, 0, kN));
  }
  for (const double error : ours) EXPECT_NEAR(error, ours[0], 0.05 * ours[0]);
  EXPECT_GT(ring[2], 5 * ring[0]);
  EXPECT_GT(ring[2], 10 * ours[2]);
}

std::vector<float> padded(std::initializer_list<float> values) {
  std::vector<float> x(kBlock);
  std::copy(values.begin(), values.end(), x.begin());
  return x;
}

TEST(ReduceScatter, Case36aRanksThatAgreeOnTheMaximum) {
  for (const int ranks : {2, 8, 256}) {
    for (const float level : {448.0f, 1e-30f, 1e30f}) {
      const std::vector<std::vector<float>> g(std::size_t(ranks),
                                              std::vector<float>(kBlock, level));
      for (const float mean : reduce(g, Storage::kE4m3Block, kBlock, 1.0f / float(ranks))) {
        ASSERT_NEAR(mean, level, level == 448.0f ? 0 : level * (ranks + 2) * 0x1p-24);
      }
    }
  }
}

TEST(ReduceScatter, Case36bQuietRanksAreNotFlushed) {
  std::vector<std::vector<float>> g(8, padded({0.0f, 1e-6f}));
  g[0] = padded({1.0f, 0.0f});
  for (const Storage wire : {Storage::kE4m3Block, Storage::kE5m2Block}) {
    const std::vector<float> mean = reduce(g, wire, kBlock, 0.125f);
    EXPECT_NEAR(mean[0], 0.125, 0.125 * 0.0625);
    EXPECT_NEAR(mean[1], 8.75e-7, 8.75e-7 * 0.0625);
    EXPECT_EQ(mean[2], 0.0f);
  }
  // Over the kind: each rank louder than the next by a factor of 1,000, one element each.
  std::vector<std::vector<float>> apart;
  for (int r = 0; r < 8; ++r) {
    apart.push_back(std::vector<float>(kBlock, 0.0f));
    apart[r][r] = std::pow(1e-3f, float(r));
  }
  const std::vector<float> mean = reduce(apart, Storage::kE4m3Block, kBlock, 0.125f);
  for (int r = 0; r < 8; ++r) EXPECT_NEAR(mean[r], apart[r][r] / 8, apart[r][r] / 8 * 0.0625);
}

TEST(ReduceScatter, Case36cFp16WireOf1024Ranks) {
  const auto mean_of = [](float value) {
    const std::vector<std::vector<float>> g(1024, std::vector<float>(kBlock, value));
    return reduce(g, Storage::kFp16, kBlock, 1.0f / 1024)[7];
  };
  EXPECT_EQ(mean_of(100.0f), 100.0f);
  EXPECT_NEAR(mean_of(1e-5f), 1.00136e-5, 1e-10);
  EXPECT_EQ(mean_of(65504.0f), 65504.0f);
  EXPECT_EQ(mean_of(0x1p-24f), 0x1p-24f);
}

// Case 8's arithmetic: bf16 of 1e5 travels as it is; in fp16 it is infinity, which is seen.
TEST(ReduceScatter, Case8OverflowOfTheWireIsReported) {
  const std::vector<std::vector<float>> g(2, std::vector<float>(kBlock, 99840.0f));
  std::uint32_t amax = 0;
  EXPECT_EQ(reduce(g, Storage::kBf16, kBlock, 0.5f, &amax)[0], 99840.0f);
  EXPECT_LT(amax, 0x7F800000u);
  reduce(g, Storage::kFp16, kBlock, 0.5f, &amax);
  EXPECT_GE(amax, 0x7F800000u);
}

// One bad value on one rank shows in the flag of whoever sums it, on every wire.
TEST(ReduceScatter, NonFiniteValuesOfAnyRankAreReported) {
  for (const Storage wire :
       {Storage::kFp32, Storage::kBf16, Storage::kFp16, Storage::kE4m3Block, Storage::kE5m2Block}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      for (int rank = 0; rank < 4; ++rank) {
        std::vector<std::vector<float>> g(4, test::gaussian(2 * kBlock, 3));
        g[rank][200] = bad;
        std::uint32_t amax = 0;
        reduce(g, wire, kBlock, 0.25f, &amax);
        EXPECT_GE(amax, 0x7F800000u) << test::storage_name(wire) << " rank " << rank;
      }
    }
  }
}

// The order is that of ranks: the same messages in the same order give the same bits, and FP32 on
// the wire the bits of a plain loop.
TEST(ReduceScatter, Fp32WireIsAPlainSumInRankOrder) {
  std::vector<std::vector<float>> g;
  for (std::uint32_t r = 0; r < 7; ++r) g.push_back(test::heavy_tailed(4 * kBlock, r));
  const std::vector<float> mean = reduce(g, Storage::kFp32, kBlock, 1.0f / 7);
  for (std::int64_t i = 0; i < 4 * kBlock; ++i) {
    float sum = g[0][i];
    for (int r = 1; r < 7; ++r) sum += g[r][i];
    ASSERT_EQ(mean[i], sum * (1.0f / 7));
  }
}

}  // namespace
}  // namespace zerofp8
