// Every code and every rounding boundary of each format against the table-search reference.
#include <gtest/gtest.h>

#include <array>

#include "tests/codecs.h"
#include "zerofp8/dtype.h"

namespace zerofp8 {
namespace {

using test::bits;
using test::Codec;
using test::from_bits;
using test::next_down;
using test::next_up;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kFltMax = std::numeric_limits<float>::max();

class FormatsTest : public testing::TestWithParam<Codec> {
 protected:
  const Codec& codec() const { return GetParam(); }
  const ref::Format& format() const { return *codec().format; }
  std::uint32_t expected(float x) const {
    if (!format().has_sign()) x = std::fabs(x);
    return codec().saturates ? format().nearest(x) : format().nearest_ieee(x);
  }
  void expect_nearest(float x) const {
    ASSERT_EQ(codec().nearest(x), expected(x)) << std::hexfloat << x;
    if (!format().has_sign()) return;
    ASSERT_EQ(codec().nearest(-x), expected(-x)) << std::hexfloat << -x;
  }
};

INSTANTIATE_TEST_SUITE_P(All, FormatsTest, testing::ValuesIn(test::codecs()), test::codec_name);

TEST_P(FormatsTest, DescriptorAgreesWithTheReference) {
  const FormatInfo& info = format_info(codec().dtype);
  EXPECT_EQ(info.name, format().name());
  EXPECT_EQ(info.bytes * 8, format().bits());
  EXPECT_EQ(info.max_finite, format().max_finite());
  EXPECT_EQ(info.min_normal, format().min_normal());
  EXPECT_EQ(info.min_subnormal, format().min_subnormal());
  EXPECT_EQ(info.has_sign, format().has_sign());
  EXPECT_EQ(info.has_infinity, format().has_infinity());
  EXPECT_EQ(info.has_nan, format().has_nan());
}

TEST_P(FormatsTest, EveryCodeDecodesToItsValueAndEncodesToItself) {
  const std::uint32_t codes = 1u << format().bits();
  for (std::uint32_t code = 0; code < codes; ++code) {
    const double value = format().value(code);
    const float decoded = codec().decode(code);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(decoded)) << code;
      ASSERT_TRUE(format().is_nan(codec().nearest(decoded))) << code;
      continue;
    }
    ASSERT_EQ(double{decoded}, value) << code;
    ASSERT_EQ(std::signbit(decoded), std::signbit(value)) << code;
    ASSERT_EQ(codec().nearest(decoded), code) << decoded;
    for (const std::uint32_t r16 : {0u, 1u, 0x7FFFu, 0x8000u, 0xFFFEu, 0xFFFFu}) {
      ASSERT_EQ(codec().stochastic(decoded, r16), code) << decoded << " with draw " << r16;
      ASSERT_EQ(codec().mixed(decoded, r16), code) << decoded << " with draw " << r16;
    }
  }
}

// For each pair of neighbours: both, the midpoint (a tie), quarter points, and the floats next to
// each.
TEST_P(FormatsTest, NearestIsExactAroundEveryBoundary) {
  const std::vector<double>& values = format().values();
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    const double low = values[i], gap = values[i + 1] - low;
    for (const double at : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      const float x = static_cast<float>(low + at * gap);
      expect_nearest(x);
      expect_nearest(next_up(x));
      if (x > 0) expect_nearest(next_down(x));
    }
  }
}

TEST_P(FormatsTest, TiesGoToTheEvenCode) {
  const std::vector<double>& values = format().values();
  for (std::uint32_t i = 0; i + 1 < values.size(); ++i) {
    const auto tie = static_cast<float>((values[i] + values[i + 1]) / 2);
    ASSERT_EQ(codec().nearest(tie), i % 2 == 0 ? i : i + 1) << tie;
  }
}

TEST_P(FormatsTest, BeyondTheLargestFiniteValue) {
  const auto largest = static_cast<float>(format().max_finite());
  const double gap = format().max_finite() - format().values()[format().max_code() - 1];
  const auto tie = static_cast<float>(format().max_finite() + gap / 2);
  for (const float x : {largest, next_up(largest), next_down(tie), tie, next_up(tie),
                        static_cast<float>(format().max_finite() + gap), 1e30f, kFltMax}) {
    if (std::isinf(x)) continue;
    expect_nearest(x);
    if (!codec().saturates) continue;
    for (const std::uint32_t r16 : {0u, 0x8000u, 0xFFFFu}) {
      EXPECT_EQ(codec().stochastic(x, r16), format().max_code()) << x;
      EXPECT_EQ(codec().mixed(x, r16), format().max_code()) << x;
    }
  }
}

TEST_P(FormatsTest, TinyInputs) {
  for (const float x : {0.0f, 0x1p-149f, 0x1.8p-148f, 0x1.fffffcp-127f, 0x1p-126f, 0x1p-125f,
                        1e-40f, 1e-30f, static_cast<float>(format().min_subnormal() / 2)}) {
    expect_nearest(x);
    expect_nearest(next_up(x));
  }
}

TEST_P(FormatsTest, InfinityAndNanNeverBecomeFinite) {
  if (!format().has_nan()) GTEST_SKIP() << "every code is finite: the amax flag carries it";
  for (const std::uint32_t payload : {0u, 1u, 0x1FFFu, 0x8000u, 0xFFFFu, 0x400000u, 0x7FFFFFu}) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = from_bits(sign | 0x7F800000u | payload);
      for (const std::uint32_t r16 : {0u, 0x8000u, 0xFFFFu}) {
        for (const std::uint32_t code :
             {codec().nearest(x), codec().stochastic(x, r16), codec().mixed(x, r16)}) {
          const double back = format().value(code);
          if (payload == 0 && format().has_infinity()) {
            EXPECT_TRUE(std::isinf(back));
            EXPECT_EQ(std::signbit(back), sign != 0);
          } else {
            EXPECT_TRUE(std::isnan(back)) << bits(x);
          }
        }
      }
    }
  }
}

// All 65536 draws: always one of the two neighbours, more often up for larger draws only, and up as
// often as the fraction says (to one draw).
TEST_P(FormatsTest, StochasticHasTheProbabilityOfTheRemainder) {
  const std::vector<double>& values = format().values();
  const std::size_t stride = values.size() > 300 ? values.size() / 61 : 1;
  for (std::size_t i = 0; i + 1 < values.size(); i += stride) {
    const double low = values[i], gap = values[i + 1] - low;
    for (const double at : {0x1p-16, 0.3, 0.5, 0.9, 1 - 0x1p-16}) {
      const auto x = static_cast<float>(low + at * gap);
      const ref::Bracket b = format().bracket(x);
      int ups = 0;
      bool was_up = false;
      for (std::uint32_t r16 = 0; r16 < 0x10000; ++r16) {
        const std::uint32_t code = codec().stochastic(x, r16);
        ASSERT_TRUE(code == b.low_code || code == b.high_code) << x << " gave " << code;
        const bool up = code != b.low_code;
        ASSERT_TRUE(up || !was_up) << x << " goes down again at draw " << r16;
        was_up = up;
        ups += up;
      }
      // fp16 drops 13 bits of a normal value and uses 13; of a subnormal it drops more.
      const bool fp16_subnormal = codec().dtype == DType::kFp16 && x < format().min_normal();
      ASSERT_NEAR(ups, b.fraction * 65536, fp16_subnormal ? 4.0 : 1.0) << std::hexfloat << x;
    }
  }
}

TEST_P(FormatsTest, MixedIsNearestForNormalCodesAndStochasticBelow) {
  const auto min_normal = static_cast<float>(format().min_normal());
  for (const float factor : {1.0f, 1.0313f, 1.47f, 2.77f, 101.3f}) {
    for (const std::uint32_t r16 : {0u, 0x5555u, 0xFFFFu}) {
      EXPECT_EQ(codec().mixed(min_normal * factor, r16), codec().nearest(min_normal * factor));
      if (codec().dtype == DType::kBf16) continue;  // no gradual underflow that could stall
      const float below = min_normal * 0.37f / factor;
      EXPECT_EQ(codec().mixed(below, r16), codec().stochastic(below, r16));
    }
  }
}

// Case 34, literally; 465 gives NaN and 61440 infinity elsewhere.
TEST(Formats, Case34OverflowingCastsSaturate) {
  for (const float x : {448.0f, 463.9f, 464.0f, 465.0f, 1e30f}) {
    const auto code = element::encode_nearest<DType::kE4m3>(x);
    EXPECT_EQ(element::decode<DType::kE4m3>(code), 448.0f) << x;
    EXPECT_EQ(element::decode<DType::kE4m3>(element::encode_nearest<DType::kE4m3>(-x)), -448.0f);
  }
  for (const float x : {57344.0f, 61439.0f, 61440.0f, 1e30f}) {
    const auto code = element::encode_nearest<DType::kE5m2>(x);
    EXPECT_EQ(element::decode<DType::kE5m2>(code), 57344.0f) << x;
  }
  for (const float x : {kInf, -kInf, std::nanf("")}) {
    const auto e4m3 = element::encode_nearest<DType::kE4m3>(x);
    const auto e5m2 = element::encode_nearest<DType::kE5m2>(x);
    EXPECT_TRUE(std::isnan(element::decode<DType::kE4m3>(e4m3)));
    EXPECT_FALSE(std::isfinite(element::decode<DType::kE5m2>(e5m2)));
  }
}

TEST(Formats, PlainFp16IsIeee) {
  const ref::Format& f = ref::fp16();
  for (std::uint32_t i = 0; i + 1 < f.values().size(); ++i) {
    for (const double at : {0.0, 0.5, 0.75}) {
      const auto x = static_cast<float>(f.values()[i] + at * (f.values()[i + 1] - f.values()[i]));
      for (const float near : {x, next_up(x), -x, -next_up(x)}) {
        ASSERT_EQ(element::encode_fp16_ieee(near), f.nearest_ieee(near)) << near;
      }
    }
  }
  for (const float x : {65504.0f, 65519.996f, 65520.0f, 65536.0f, 99840.0f, 1e30f, kFltMax}) {
    EXPECT_EQ(element::encode_fp16_ieee(x), f.nearest_ieee(x)) << x;
    EXPECT_EQ(element::encode_fp16_ieee(-x), f.nearest_ieee(-x)) << x;
  }
  EXPECT_EQ(element::encode_fp16_ieee(kInf), 0x7C00u);
  EXPECT_EQ(element::encode_fp16_ieee(-kInf), 0xFC00u);
  EXPECT_TRUE(f.is_nan(element::encode_fp16_ieee(std::nanf(""))));
}

TEST(Formats, NamesAndSpellings) {
  for (const FormatInfo& info : kFormats) EXPECT_EQ(dtype_from_string(info.name), info.dtype);
  EXPECT_EQ(dtype_from_string("fp8"), DType::kE4m3);
  EXPECT_EQ(dtype_from_string("bfloat16"), DType::kBf16);
  EXPECT_EQ(dtype_from_string("half"), DType::kFp16);
  for (const char* wrong : {"", "fp7", "FP32", "fp8 ", "e4m3x"}) {
    EXPECT_EQ(dtype_from_string(wrong), std::nullopt) << wrong;
  }
}

}  // namespace
}  // namespace zerofp8
