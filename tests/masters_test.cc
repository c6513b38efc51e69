// Masters split into a 16-bit weight and remainder bits: what is exact, and how far the rest is
// off.
#include <gtest/gtest.h>

#include <functional>

#include "kernels/master_element.h"
#include "tests/codecs.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

using element::SplitWeight;
using test::bits;
using test::from_bits;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kFltMax = std::numeric_limits<float>::max();

struct Scheme {
  const char* name;
  DType dtype;
  int master_bits;
  SplitWeight (*split)(float);
  float (*join)(std::uint32_t, std::uint32_t);
};
template <DType kDtype, int kBits>
constexpr Scheme scheme(const char* name) {
  return {name, kDtype, kBits, [](float x) { return element::split_master<kDtype, kBits>(x); },
          [](std::uint32_t weight, std::uint32_t rest) {
            return element::join_master<kDtype, kBits>(weight, rest);
          }};
}
constexpr Scheme kSchemes[] = {
    scheme<DType::kBf16, 16>("bf16_16"), scheme<DType::kBf16, 8>("bf16_8"),
    scheme<DType::kFp16, 16>("fp16_16"), scheme<DType::kFp16, 8>("fp16_8")};

// Largest error of a master: half a unit of its last bit.
double error_bound(const Scheme& s, double x) {
  const double a = std::fabs(x);
  if (s.dtype == DType::kBf16) {
    if (s.master_bits == 16) return 0;
    const int exponent = std::max(a > 0 ? std::ilogb(a) : -126, -126);
    return std::ldexp(0.5, exponent - 15);  // 1 + 15 significant bits
  }
  if (s.master_bits == 16) return a >= 0x1p-17 ? 0 : 0x1p-41;
  return a < 0x1p-14 ? 0x1p-33 : std::ldexp(0.5, std::ilogb(a) - 18);  // 1 + 18 significant bits
}

// The master's value as the format defines it, then rounded half away from zero to 16 bits.
std::uint32_t half_away(const ref::Format& f, double x) {
  const ref::Bracket b = f.bracket(x);
  if (std::fabs(x) > f.max_finite()) {  // beyond the last midpoint: infinity
    const double gap = f.max_finite() - f.values()[f.max_code() - 1];
    const bool over = std::fabs(x) >= f.max_finite() + gap / 2;
    return (over ? f.infinity_code() : f.max_code()) | (std::signbit(x) ? 0x8000u : 0u);
  }
  return (b.fraction >= 0.5 ? b.high_code : b.low_code) | (std::signbit(x) ? 0x8000u : 0u);
}

void PrintTo(const Scheme& s, std::ostream* out) { *out << s.name; }

class MastersTest : public testing::TestWithParam<Scheme> {
 protected:
  const Scheme& s() const { return GetParam(); }
  const ref::Format& format() const {
    return s().dtype == DType::kBf16 ? ref::bf16() : ref::fp16();
  }
  bool in_range(float x) const {
    const float limit = s().dtype == DType::kFp16 ? 65520.0f
                        : s().master_bits == 8    ? 0x1.ffffp127f  // rounds to 2^128
                                                  : kInf;
    return std::fabs(x) < limit;
  }
  void check(float x) const {
    const SplitWeight split = s().split(x);
    ASSERT_LT(split.weight, 0x10000u);
    ASSERT_LT(split.rest, 1u << s().master_bits);
    const float master = s().join(split.weight, split.rest);
    if (!in_range(x)) return check_out_of_range(x, split, master);
    ASSERT_LE(std::fabs(double{master} - x), error_bound(s(), x)) << std::hexfloat << x;
    ASSERT_EQ(std::signbit(master), std::signbit(x));
    ASSERT_EQ(split.weight, half_away(format(), master)) << std::hexfloat << x;
    // A master is a fixed point: splitting it again changes nothing.
    const SplitWeight again = s().split(master);
    ASSERT_EQ(again.weight, split.weight) << std::hexfloat << x;
    ASSERT_EQ(again.rest, split.rest) << std::hexfloat << x;
  }
  void check_out_of_range(float x, const SplitWeight& split, float master) const {
    const double weight = format().value(split.weight);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(weight)) << std::hex << bits(x);
      ASSERT_TRUE(std::isnan(master)) << std::hex << bits(x);
    } else {
      ASSERT_TRUE(std::isinf(weight)) << std::hexfloat << x;
      ASSERT_EQ(std::signbit(weight), std::signbit(x));
      ASSERT_GE(std::fabs(master), 65520.0f);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, MastersTest, testing::ValuesIn(kSchemes),
                         [](const auto& param) { return std::string(param.param.name); });

// Every exponent with mantissas that end in every kind of tie, and a dense pseudo-random sample.
TEST_P(MastersTest, ErrorWeightAndFixedPoint) {
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low :
         {0u, 1u, 0x7Fu, 0x80u, 0x81u, 0x100u, 0x180u, 0x0FFFu, 0x1000u, 0x1001u, 0x7F7Fu, 0x7F80u,
          0x7FFFu, 0x8000u, 0x8001u, 0xFF7Fu, 0xFF80u, 0xFFFFu}) {
      ASSERT_NO_FATAL_FAILURE(check(from_bits(high << 16 | low)));
    }
  }
  std::uint32_t u = 12345;
  for (int i = 0; i < 2000000; ++i) {
    u = element::lowbias32(u + 0x9E3779B9u);
    ASSERT_NO_FATAL_FAILURE(check(from_bits(u)));
  }
}

// Every float for the exact scheme, every seventh for the others.
TEST_P(MastersTest, SlowEveryFloat) {
  if (!test::slow_tests()) GTEST_SKIP() << "set ZEROFP8_SLOW=1 to run";
  const bool exact = s().dtype == DType::kBf16 && s().master_bits == 16;
  for (std::uint64_t u = 0; u < 1ull << 32; u += exact ? 1 : 7) {
    const float x = from_bits(static_cast<std::uint32_t>(u));
    if (!exact || std::isnan(x)) {
      ASSERT_NO_FATAL_FAILURE(check(x));
    } else {
      const SplitWeight split = element::split_master<DType::kBf16, 16>(x);
      ASSERT_EQ(bits(element::join_master<DType::kBf16, 16>(split.weight, split.rest)), u);
    }
  }
}

TEST(Masters, Bf16With16BitsIsTheFp32MasterBitForBit) {
  for (std::uint32_t u = 0; u < 0x7F800000u; u += 997) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const SplitWeight split = element::split_master<DType::kBf16, 16>(from_bits(u | sign));
      ASSERT_EQ(bits(element::join_master<DType::kBf16, 16>(split.weight, split.rest)), u | sign);
    }
  }
  // Case 39 b: a master that bf16 alone would round to 1.
  const SplitWeight split = element::split_master<DType::kBf16, 16>(1.000244140625f);
  EXPECT_EQ(split.weight, 0x3F80u);
  EXPECT_EQ((element::join_master<DType::kBf16, 16>(split.weight, split.rest)), 1.000244140625f);
}

TEST_P(MastersTest, OverflowIsInfinityNeverFinite) {
  std::vector<float> beyond = {kFltMax, kInf, std::nanf("")};
  if (s().dtype == DType::kFp16) {
    for (const float x : {65520.0f, 65535.996f, 65536.0f, 99840.0f, 1e30f}) beyond.push_back(x);
  }
  for (const float x : beyond) {
    EXPECT_FALSE(std::isfinite(format().value(s().split(x).weight))) << x;
    EXPECT_FALSE(std::isfinite(format().value(s().split(-x).weight))) << x;
  }
}

// The ops over whole arrays, tails included, agree with the element functions; 0 and 32 bits as
// well.
TEST_P(MastersTest, OpsSplitAndJoinWholeArrays) {
  for (const std::int64_t n : {1, 31, 256, 257, 1000}) {
    std::vector<float> masters(n), back(n);
    for (std::int64_t i = 0; i < n; ++i) masters[i] = std::sin(float(i)) * 0.02f;
    std::vector<std::uint16_t> weight(n);
    std::vector<std::uint8_t> rest(n * s().master_bits / 8);
    cpu_ops().split_master(masters.data(), s().dtype, weight.data(), s().master_bits, rest.data(),
                           n);
    cpu_ops().join_master(s().dtype, weight.data(), s().master_bits, rest.data(), back.data(), n);
    for (std::int64_t i = 0; i < n; ++i) {
      const SplitWeight split = s().split(masters[i]);
      ASSERT_EQ(weight[i], split.weight);
      ASSERT_EQ(back[i], s().join(split.weight, split.rest));
    }
  }
}

TEST(Masters, OpsWithoutRemainderAndWithFp32Master) {
  const std::vector<float> masters = {0.1f, -0.2f, 65520.0f, 1e-8f, 0.0f};
  const auto n = static_cast<std::int64_t>(masters.size());
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    const ref::Format& f = dtype == DType::kBf16 ? ref::bf16() : ref::fp16();
    std::vector<std::uint16_t> weight(masters.size());
    std::vector<float> back(masters.size()), rest(masters.size());
    cpu_ops().split_master(masters.data(), dtype, weight.data(), 0, nullptr, n);
    for (std::size_t i = 0; i < masters.size(); ++i) {
      EXPECT_EQ(weight[i], f.nearest_ieee(masters[i]));
    }
    cpu_ops().split_master(masters.data(), dtype, weight.data(), 32, rest.data(), n);
    EXPECT_EQ(rest, masters);
    cpu_ops().join_master(dtype, weight.data(), 32, rest.data(), back.data(), n);
    EXPECT_EQ(back, masters);
    for (std::size_t i = 0; i < masters.size(); ++i) {
      EXPECT_EQ(weight[i], f.nearest_ieee(masters[i]));
    }
  }
}

// "none": a million stochastic roundings into the weight have the mean of the value, and an
// overflow is infinity.
TEST(Masters, StochasticWeightIsUnbiased) {
  struct Row {
    const ref::Format& format;
    std::function<std::uint32_t(float, std::uint32_t)> encode;
  };
  const Row rows[] = {{ref::bf16(), element::encode_bf16_stochastic},
                      {ref::fp16(), element::encode_fp16_ieee_stochastic}};
  for (const Row& row : rows) {
    for (const float x : {0.1f, -0.777f, 3.1e-5f, 1.3e-6f, 12345.678f, -65000.3f}) {
      const std::uint64_t key = random_key({.purpose = Purpose::kWeight});
      const ref::Bracket b = row.format.bracket(x);
      std::int64_t ups = 0;
      constexpr int kDraws = 1000000;
      for (int i = 0; i < kDraws; ++i) {
        const std::uint32_t code = row.encode(x, random_bits(key, std::uint64_t(i)) >> 16);
        ASSERT_EQ(code >> 15, x < 0 ? 1u : 0u);
        ups += (code & 0x7FFFu) == b.high_code;
      }
      const double sigma = std::sqrt(kDraws * b.fraction * (1 - b.fraction));
      EXPECT_NEAR(double(ups), kDraws * b.fraction, 4 * sigma + 1) << row.format.name() << " " << x;
    }
  }
  for (const std::uint32_t r16 : {0u, 0x8000u, 0xFFFFu}) {
    EXPECT_EQ(element::encode_fp16_ieee_stochastic(65504.0f, r16), 0x7BFFu);
    EXPECT_EQ(element::encode_fp16_ieee_stochastic(65504.004f, r16), 0x7C00u);
    EXPECT_EQ(element::encode_fp16_ieee_stochastic(-1e9f, r16), 0xFC00u);
    EXPECT_EQ(element::encode_fp16_ieee_stochastic(kInf, r16), 0x7C00u);
    EXPECT_TRUE(ref::fp16().is_nan(element::encode_fp16_ieee_stochastic(std::nanf(""), r16)));
  }
}

}  // namespace
}  // namespace zerofp8
