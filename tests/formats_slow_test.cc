// All 2^32 floats through each encoder. Takes a minute or two: runs only where ZEROFP8_SLOW=1.
#include <gtest/gtest.h>

#include <array>

#include "tests/codecs.h"

namespace zerofp8 {
namespace {

using test::Codec;
using test::from_bits;

constexpr std::uint32_t kInfBits = 0x7F800000u;

// Walks through non-negative finite floats in order, with the code that each must get: the next
// boundary is the midpoint above the current value, and belongs to it if its code is even.
class Walk {
 public:
  explicit Walk(const Codec& codec) : values_(codec.format->values()), saturates_(codec.saturates) {
    set_boundary();
  }
  std::uint32_t code_of(float x) {
    while (x > boundary_ || (x == boundary_ && code_ % 2 == 1)) {
      ++code_;
      set_boundary();
    }
    return code_;
  }

 private:
  void set_boundary() {
    const double top = values_.back(), gap = top - values_[values_.size() - 2];
    const double next = code_ + 1 < values_.size() ? values_[code_ + 1] : top + gap;
    const bool last = code_ + 1 >= values_.size();
    boundary_ = last && (saturates_ || code_ >= values_.size())
                    ? std::numeric_limits<double>::infinity()
                    : (values_[code_] + next) / 2;
  }
  const std::vector<double>& values_;
  bool saturates_;
  std::uint32_t code_ = 0;
  double boundary_ = 0;
};

class FormatsSlowTest : public testing::TestWithParam<Codec> {
 protected:
  void SetUp() override {
    if (!test::slow_tests()) GTEST_SKIP() << "set ZEROFP8_SLOW=1 to run";
  }
};
INSTANTIATE_TEST_SUITE_P(All, FormatsSlowTest, testing::ValuesIn(test::codecs()), test::codec_name);

TEST_P(FormatsSlowTest, ElementCodecOverAllFloats) {
  const Codec& codec = GetParam();
  const std::uint32_t sign_bit = codec.format->sign_bit();
  Walk walk(codec);
  std::uint64_t wrong = 0;
  for (std::uint32_t u = 0; u < kInfBits; ++u) {
    const float x = from_bits(u);
    const std::uint32_t expected = walk.code_of(x);
    wrong += codec.nearest(x) != expected;
    wrong += codec.nearest(from_bits(u | 0x80000000u)) != (expected | sign_bit);
    ASSERT_EQ(wrong, 0u) << std::hexfloat << x;
  }
  if (!codec.format->has_nan()) return;
  for (std::uint32_t u = kInfBits; u < 0x80000000u; ++u) {
    const bool finite = std::isfinite(codec.format->value(codec.nearest(from_bits(u))));
    ASSERT_FALSE(finite) << u;
    ASSERT_FALSE(std::isfinite(codec.format->value(codec.nearest(from_bits(u | 0x80000000u)))));
  }
}

// The vectorised kernel: a leading 448 keeps a block's scale at exactly 1, so codes are those of
// the floats themselves. Covers every float that a scale of 1 can meet, |x| <= 448, both signs.
TEST(FormatsSlow, E4m3KernelOverAllFloats) {
  if (!test::slow_tests()) GTEST_SKIP() << "set ZEROFP8_SLOW=1 to run";
  constexpr int kBlock = 256;
  constexpr std::uint32_t kLast = 0x43E00000u;  // 448
  std::array<float, kBlock> x{};
  std::array<std::uint8_t, kBlock> codes{};
  float scale = 0;
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    Walk walk(test::codecs()[0]);
    for (std::uint32_t begin = 0; begin <= kLast; begin += kBlock - 1) {
      x[0] = 448.0f;
      for (std::uint32_t i = 1; i < kBlock; ++i) {
        x[i] = from_bits(std::min(begin + i - 1, kLast) | sign);
      }
      cpu_ops().encode(x.data(), {Storage::kE4m3Block, codes.data(), &scale}, kBlock, kBlock,
                       Rounding::kNearest, {});
      ASSERT_EQ(scale, 1.0f);
      for (int i = 1; i < kBlock; ++i) {
        ASSERT_EQ(codes[i], walk.code_of(std::fabs(x[i])) | sign >> 24) << std::hexfloat << x[i];
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8
