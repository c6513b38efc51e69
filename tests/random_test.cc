// The counter-based random bits: known answers, independence of every input, unbiased rounding.
#include "zerofp8/random.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "tests/codecs.h"
#include "tests/stored.h"

namespace zerofp8 {
namespace {

struct Lowbias32Vector {
  std::uint32_t x, hash;
};
struct Mix64Vector {
  std::uint64_t z, hash;
};
struct NameVector {
  std::string_view name;
  std::uint64_t hash;
};
struct KeyVector {
  std::uint64_t seed, step;
  std::uint32_t purpose, micro_batch, data_rank;
  std::string_view name;
  std::uint64_t key, offset;
  std::uint32_t bits;
};
#include "tests/vectors/random_vectors.inc"

TEST(Random, KnownAnswers) {
  for (const auto& v : kLowbias32Vectors) EXPECT_EQ(element::lowbias32(v.x), v.hash) << v.x;
  for (const auto& v : kMix64Vectors) EXPECT_EQ(element::mix64(v.z), v.hash) << v.z;
  for (const auto& v : kNameVectors) EXPECT_EQ(hash_name(v.name), v.hash) << v.name;
  for (const auto& v : kKeyVectors) {
    const std::uint64_t key = random_key({.seed = v.seed,
                                          .step = v.step,
                                          .purpose = static_cast<Purpose>(v.purpose),
                                          .micro_batch = v.micro_batch,
                                          .data_rank = v.data_rank,
                                          .name_hash = hash_name(v.name)});
    EXPECT_EQ(key, v.key);
    EXPECT_EQ(random_bits(key, v.offset), v.bits) << v.offset;
  }
}

// Draws as numbers in (-1/2, 1/2): high or low half of each.
constexpr int kN = 1 << 16;
enum class Half { kHigh, kLow };
std::vector<double> stream(std::uint64_t key, Half half, std::uint64_t offset = 0) {
  std::vector<double> u(kN);
  for (int i = 0; i < kN; ++i) {
    const std::uint32_t r = random_bits(key, offset + static_cast<std::uint64_t>(i));
    u[i] = ((half == Half::kHigh ? r >> 16 : r & 0xFFFF) + 0.5) / 65536 - 0.5;
  }
  return u;
}

// Correlation of n independent pairs has mean 0 and standard deviation 1/sqrt(n). With some 2,000
// correlations looked at here, 5 sigma has a chance of 1e-3 to be passed by a perfect generator.
constexpr double kLimit = 5.0;
double correlation_in_sigmas(const std::vector<double>& a, const std::vector<double>& b, int lag) {
  double sum = 0;
  const int n = kN - lag;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i + lag];
  return sum * 12 / std::sqrt(double(n));  // variance of each is 1/12
}
void expect_uncorrelated(std::uint64_t key_a, std::uint64_t key_b, const std::string& what) {
  for (const Half half : {Half::kHigh, Half::kLow}) {
    const std::vector<double> a = stream(key_a, half), b = stream(key_b, half);
    for (const int lag : {0, 1, 2, 31, 32, 33, 128}) {
      EXPECT_LT(std::fabs(correlation_in_sigmas(a, b, lag)), kLimit) << what << " lag " << lag;
      EXPECT_LT(std::fabs(correlation_in_sigmas(b, a, lag)), kLimit) << what << " lag -" << lag;
    }
  }
}

struct Neighbour {
  const char* name;
  std::function<void(RandomKeyInput&)> change;
};
const Neighbour kNeighbours[] = {
    {"seed", [](RandomKeyInput& in) { ++in.seed; }},
    {"step", [](RandomKeyInput& in) { ++in.step; }},
    {"far_step", [](RandomKeyInput& in) { in.step += 1ull << 32; }},
    {"purpose", [](RandomKeyInput& in) { in.purpose = Purpose::kWeight; }},
    {"micro_batch", [](RandomKeyInput& in) { ++in.micro_batch; }},
    {"data_rank", [](RandomKeyInput& in) { ++in.data_rank; }},
    {"name", [](RandomKeyInput& in) { in.name_hash = hash_name("layers.1.weight"); }},
};

class RandomInputTest : public testing::TestWithParam<Neighbour> {};
INSTANTIATE_TEST_SUITE_P(All, RandomInputTest, testing::ValuesIn(kNeighbours),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(RandomInputTest, NeighbouringStreamsAreUncorrelated) {
  for (const std::uint64_t step : {0ull, 1ull, 1000ull, 1ull << 24}) {
    RandomKeyInput a{.step = step, .name_hash = hash_name("layers.0.weight")};
    RandomKeyInput b = a;
    GetParam().change(b);
    ASSERT_NE(random_key(a), random_key(b));
    expect_uncorrelated(random_key(a), random_key(b), GetParam().name);
  }
}

// Half of the 32 bits of each draw change when an input does.
TEST_P(RandomInputTest, EachBitChangesHalfOfTheTime) {
  RandomKeyInput a{.name_hash = hash_name("layers.0.weight")};
  RandomKeyInput b = a;
  GetParam().change(b);
  const std::uint64_t key_a = random_key(a), key_b = random_key(b);
  std::array<int, 32> changed{};
  for (std::uint64_t i = 0; i < kN; ++i) {
    const std::uint32_t difference = random_bits(key_a, i) ^ random_bits(key_b, i);
    for (int bit = 0; bit < 32; ++bit) changed[bit] += difference >> bit & 1;
  }
  for (const int count : changed)
    EXPECT_LT(std::fabs(count - kN / 2.0), kLimit * std::sqrt(kN) / 2);
}

TEST(Random, NeighboursInOneStreamAreUncorrelated) {
  const std::uint64_t key = random_key({.seed = 3, .name_hash = hash_name("w")});
  for (const Half half : {Half::kHigh, Half::kLow}) {
    for (const std::uint64_t offset : {0ull, (1ull << 32) - 1024, 1ull << 40}) {
      const std::vector<double> u = stream(key, half, offset);
      for (int lag = 1; lag <= 130; ++lag) {
        EXPECT_LT(std::fabs(correlation_in_sigmas(u, u, lag)), kLimit) << lag;
      }
    }
  }
}

// One draw serves m (high half) and r (low half).
TEST(Random, HalvesOfOneDrawAreUncorrelated) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    const std::uint64_t key = random_key({.seed = seed});
    const std::vector<double> high = stream(key, Half::kHigh), low = stream(key, Half::kLow);
    for (const int lag : {0, 1, 31, 32}) {
      EXPECT_LT(std::fabs(correlation_in_sigmas(high, low, lag)), kLimit);
      EXPECT_LT(std::fabs(correlation_in_sigmas(low, high, lag)), kLimit);
    }
  }
}

// Chi-squared of both halves over 256 bins: mean 255, standard deviation sqrt(510).
TEST(Random, HalvesAreUniform) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    for (const Half half : {Half::kHigh, Half::kLow}) {
      std::array<int, 256> bins{};
      for (const double u : stream(random_key({.seed = seed}), half)) ++bins[int((u + 0.5) * 256)];
      double chi2 = 0;
      for (const int count : bins) chi2 += (count - kN / 256.0) * (count - kN / 256.0) * 256 / kN;
      EXPECT_LT(std::fabs(chi2 - 255), kLimit * std::sqrt(510.0));
    }
  }
}

TEST(Random, KeysOfManyMicroBatchesAndRanksAreDistinct) {
  std::set<std::uint64_t> keys;
  std::size_t count = 0;
  for (const std::uint32_t micro : {0u, 1u, 2u, 3u, 511u, 1u << 27, 1u << 28, 1u << 29, ~0u}) {
    for (const std::uint32_t rank : {0u, 1u, 2u, 3u, 1023u, 1u << 27, 1u << 28, 3u << 28, ~0u}) {
      for (std::uint32_t purpose = 1; purpose <= 4; ++purpose) {
        keys.insert(
            random_key({.purpose = Purpose(purpose), .micro_batch = micro, .data_rank = rank}));
        ++count;
      }
    }
  }
  EXPECT_EQ(keys.size(), count);
}

// The draws that kernels use are these, at whatever offset a call begins.
TEST(Random, KernelsUseTheDrawOfTheElement) {
  const std::vector<float> x(1024, 1.03f);
  const RandomStream whole{.key = random_key({.seed = 9}), .offset = 4096};
  for (const int block : test::kBlockSizes) {
    test::Stored stored(Storage::kBf16, 1024, block);
    stored.encode(cpu_ops(), x, Rounding::kStochastic, whole);
    const auto* codes = reinterpret_cast<const std::uint16_t*>(stored.codes().data());
    for (std::uint64_t i = 0; i < x.size(); ++i) {
      const std::uint32_t r16 = random_bits(whole.key, 4096 + i) >> 16;
      ASSERT_EQ(codes[i], element::encode_bf16_stochastic(x[i], r16));
    }
  }
}

class UnbiasedTest : public testing::TestWithParam<test::Codec> {};
INSTANTIATE_TEST_SUITE_P(All, UnbiasedTest, testing::ValuesIn(test::codecs()), test::codec_name);

// A million draws of one value: the mean lies within 4 standard errors of it. Normal codes and
// subnormal ones.
TEST_P(UnbiasedTest, MeanOfAMillionDraws) {
  constexpr int kDraws = 1000000;
  const ref::Format& f = *GetParam().format;
  int stream_index = 0;
  std::vector<float> values = {1.0f + 0.31f * static_cast<float>(f.ulp(1.0)), 1.777f, 0.0613f};
  if (GetParam().dtype != DType::kBf16) {
    for (const double steps : {0.1, 0.5, 1.37, 2.71}) {
      values.push_back(static_cast<float>(steps * f.min_subnormal()));
    }
  }
  for (const float x : values) {
    const std::uint64_t key = random_key({.seed = 11, .step = std::uint64_t(stream_index++)});
    for (const int shift : {0, 16}) {
      std::int64_t ups = 0;
      const ref::Bracket b = f.bracket(x);
      for (int i = 0; i < kDraws; ++i) {
        const std::uint32_t r16 = (random_bits(key, std::uint64_t(i)) >> shift) & 0xFFFF;
        ups += GetParam().stochastic(x, r16) == b.high_code;
      }
      const double sigma = std::sqrt(kDraws * b.fraction * (1 - b.fraction));
      EXPECT_NEAR(double(ups), kDraws * b.fraction, 4 * sigma) << x << " half " << shift;
    }
  }
}

// The same through kernels and blocks, where a scale stands between value and code.
TEST_P(UnbiasedTest, MeanOfAMillionDrawsThroughBlocks) {
  constexpr std::int64_t kDraws = 1 << 20;
  const float value = 0.00721f;
  std::vector<float> x(kDraws, value);
  for (std::size_t i = 0; i < x.size(); i += 128) x[i] = 0.9f;  // amax of each block
  test::Stored stored(GetParam().block_storage, kDraws, 128);
  stored.encode(cpu_ops(), x, Rounding::kStochastic, {.key = random_key({.seed = 21})});
  double sum = 0, squares = 0;
  std::int64_t count = 0;
  const std::vector<float> back = stored.decode(cpu_ops());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i % 128 == 0) continue;
    const double error = double{back[i]} - value;
    sum += error;
    squares += error * error;
    ++count;
  }
  EXPECT_LT(std::fabs(sum), 4 * std::sqrt(squares) + double(count) * value * 0x1p-22);
}

}  // namespace
}  // namespace zerofp8
