// Block scales: amax from 0 to FLT_MAX, every block size, error bounds, non-finite values.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/codecs.h"
#include "tests/device_as_ops.h"
#include "tests/stored.h"

namespace zerofp8 {
namespace {

using test::bits;
using test::Stored;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kFltMax = std::numeric_limits<float>::max();
constexpr std::uint32_t kInfBits = 0x7F800000u;

struct BlockFormat {
  Storage storage;
  const ref::Format* format;
};
const BlockFormat kBlockFormats[] = {{Storage::kE4m3Block, &ref::e4m3()},
                                     {Storage::kE5m2Block, &ref::e5m2()},
                                     {Storage::kUe4m4Block, &ref::ue4m4()},
                                     {Storage::kFp16Block, &ref::fp16()}};

class BlocksTest : public testing::TestWithParam<std::tuple<BlockFormat, int>> {
 protected:
  Storage storage() const { return std::get<0>(GetParam()).storage; }
  const ref::Format& format() const { return *std::get<0>(GetParam()).format; }
  int block() const { return std::get<1>(GetParam()); }
  bool fp16() const { return storage() == Storage::kFp16Block; }

  // One block filled with a pattern below `amax`, which itself stands at `where`.
  std::vector<float> pattern(float amax, int where) const {
    std::vector<float> x(static_cast<std::size_t>(block()));
    for (int i = 0; i < block(); ++i) {
      const float factor = std::ldexp(0.5f + 0.5f * float(i) / float(block()), -(i % 19));
      x[i] = (format().has_sign() && i % 3 == 0 ? -amax : amax) * factor;
    }
    x[where] = amax;
    return x;
  }
  // The error that the format's definition allows; scales below 2^-127 are floored. `subnormal`: a
  // product that is an FP32 subnormal is rounded once more, to a multiple of 2^-149.
  double bound(float x, float amax) const {
    double scale = std::max(double{amax} / format().max_finite(), 0x1p-127);
    if (fp16()) scale = std::ldexp(1.0, std::max(std::ilogb(amax), -112) - 14);
    const double relative = 0.5 / double(1 << mantissa_bits());
    const double saturation = fp16() && std::ilogb(amax) == 127 ? std::fabs(x) * 0x1p-11 : 0;
    return std::max(relative * std::fabs(x), format().min_subnormal() / 2 * scale) * (1 + 0x1p-20) +
           0x1p-150 + saturation;
  }
  int mantissa_bits() const { return static_cast<int>(std::lround(-std::log2(format().ulp(1.0)))); }
};

INSTANTIATE_TEST_SUITE_P(All, BlocksTest,
                         testing::Combine(testing::ValuesIn(kBlockFormats),
                                          testing::ValuesIn(test::kBlockSizes)),
                         [](const auto& param) {
                           return test::storage_name(std::get<0>(param.param).storage) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

// Case 35 over its kind: no amax gives an infinite scale, an infinity or a NaN, and each element
// comes back within the format's bound.
TEST_P(BlocksTest, ErrorBoundForEveryAmax) {
  std::vector<float> all_amax = {0x1p-149f,
                                 1e-40f,
                                 0x1p-127f,
                                 0x1p-126f,
                                 2.63e-36f,
                                 448e-30f,
                                 1.0f,
                                 448.0f,
                                 65504.0f,
                                 65505.0f,
                                 1e30f,
                                 0x1p127f,
                                 0x1.fffffep126f,
                                 test::next_down(kFltMax),
                                 kFltMax};
  for (int e = -149; e < 128; e += 3) all_amax.push_back(std::ldexp(1.37f, e));
  for (const float amax : all_amax) {
    for (const int where : {0, 1, block() / 2, block() - 1}) {
      const std::vector<float> x = pattern(amax, where);
      Stored stored(storage(), block(), block());
      ASSERT_EQ(stored.encode(test::ops_under_test(), x), bits(amax));
      const float scale = stored.scales()[0];
      ASSERT_TRUE(std::isfinite(scale) && scale > 0) << amax;
      const std::vector<float> back = stored.decode(test::ops_under_test());
      for (int i = 0; i < block(); ++i) {
        ASSERT_LE(std::fabs(double{back[i]} - x[i]), bound(x[i], amax))
            << x[i] << " came back as " << back[i] << " in a block of amax " << amax;
      }
    }
  }
}

// Every float with an odd mantissa near FLT_MAX, as amax and as element: finite in, finite out.
TEST_P(BlocksTest, FiniteStaysFinite) {
  for (std::uint32_t below = 0; below < 64; ++below) {
    const float amax = test::from_bits(bits(kFltMax) - below);
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic, Rounding::kMixed}) {
      Stored stored(storage(), block(), block());
      stored.encode(test::ops_under_test(), pattern(amax, 3), rounding, {.key = below});
      for (const float value : stored.decode(test::ops_under_test()))
        ASSERT_TRUE(std::isfinite(value)) << amax;
    }
  }
}

TEST_P(BlocksTest, Case35ZeroBlockIsExactlyZero) {
  for (const float zero : {0.0f, -0.0f}) {
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic, Rounding::kMixed}) {
      const std::vector<float> x(static_cast<std::size_t>(block()), zero);
      Stored stored(storage(), block(), block());
      EXPECT_EQ(stored.encode(test::ops_under_test(), x, rounding, {.key = 77}), 0u);
      EXPECT_TRUE(std::isfinite(stored.scales()[0]));
      for (const float value : stored.decode(test::ops_under_test())) EXPECT_EQ(value, 0.0f);
    }
  }
}

TEST_P(BlocksTest, Case35TinyAmaxComesBackWithinTheStep) {
  std::vector<float> x(static_cast<std::size_t>(block()), 0.0f);
  x[5] = 1e-40f;
  Stored stored(storage(), block(), block());
  stored.encode(test::ops_under_test(), x);
  const double relative = 0.5 / double(1 << mantissa_bits());  // 6.25 % for E4M3
  EXPECT_NEAR(stored.decode(test::ops_under_test())[5], 1e-40f, relative * 1e-40 + 0x1p-149);
  x[5] = 0x1p-149f;
  stored.encode(test::ops_under_test(), x);
  for (const float value : stored.decode(test::ops_under_test())) {
    EXPECT_LE(std::fabs(value), 0x1p-149f);
    EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_P(BlocksTest, ScaleOfFp16IsAPowerOfTwoOthersAreAmaxOverMax) {
  for (int e = -111; e <= 126; ++e) {
    for (const float mantissa : {1.0f, 1.0000001f, 1.5f, 1.9999999f}) {
      const float amax = std::ldexp(mantissa, e);
      Stored stored(storage(), block(), block());
      stored.encode(test::ops_under_test(), pattern(amax, 0));
      const float scale = stored.scales()[0];
      if (fp16()) {
        EXPECT_EQ(bits(scale) & 0x7FFFFFu, 0u);
        EXPECT_GT(amax / scale, 0x1p14f);
        EXPECT_LE(amax / scale, 0x1p15f);
      } else if (amax / format().max_finite() > 0x1p-126) {
        EXPECT_EQ(scale, static_cast<float>(double{amax} / format().max_finite()));
      }
    }
  }
}

// One outlier costs its own block only; scales belong to blocks, in order.
TEST_P(BlocksTest, AnOutlierStaysInItsBlock) {
  const int blocks = 5;
  std::vector<float> x(static_cast<std::size_t>(blocks * block()), 1.0f);
  x[static_cast<std::size_t>(2 * block() + 7)] = 1e6f;
  Stored stored(storage(), blocks * block(), block());
  EXPECT_EQ(stored.encode(test::ops_under_test(), x), bits(1e6f));
  const std::vector<float> back = stored.decode(test::ops_under_test());
  for (int i = 0; i < blocks * block(); ++i) {
    const bool beside = i / block() == 2;
    EXPECT_LE(std::fabs(double{back[i]} - x[i]), bound(x[i], beside ? 1e6f : 1.0f)) << i;
  }
}

TEST_P(BlocksTest, NonFiniteIsFlaggedAndNeverBecomesFinite) {
  for (const float bad : {kInf, -kInf, std::nanf(""), -std::nanf("0x1234")}) {
    for (const int where : {0, block() - 1}) {
      for (const Rounding rounding :
           {Rounding::kNearest, Rounding::kStochastic, Rounding::kMixed}) {
        std::vector<float> x = pattern(3.0f, 1);
        x[where] = bad;
        Stored stored(storage(), block(), block());
        EXPECT_GE(stored.encode(test::ops_under_test(), x, rounding, {.key = 5}), kInfBits);
        EXPECT_FALSE(std::isfinite(stored.decode(test::ops_under_test())[where]));
      }
    }
  }
}

// Plain storages have no scale; the returned amax is that of the input.
TEST(Blocks, PlainStoragesTakeTails) {
  for (const Storage storage : {Storage::kFp32, Storage::kBf16, Storage::kFp16}) {
    for (const int n : {1, 31, 127, 129, 300}) {
      const std::vector<float> x = test::gaussian(n, 3);
      Stored stored(storage, n, 128);
      std::uint32_t amax = 0;
      for (const float value : x) amax = std::max(amax, bits(std::fabs(value)));
      EXPECT_EQ(stored.encode(test::ops_under_test(), x), amax);
      const std::vector<float> back = stored.decode(test::ops_under_test());
      for (int i = 0; i < n; ++i) {
        const double expected = storage == Storage::kFp32   ? x[i]
                                : storage == Storage::kBf16 ? ref::bf16().round_ieee(x[i])
                                                            : ref::fp16().round_ieee(x[i]);
        ASSERT_EQ(back[i], expected);
      }
    }
  }
}

// Stochastic rounding is honoured by every storage that rounds, plain fp16 too.
TEST(Blocks, StochasticRoundingDiffersFromNearestWhereverBitsAreDropped) {
  const std::vector<float> x(2560, 1.0f + 0x1p-12f);
  for (const Storage storage : test::kAllStorages) {
    if (storage == Storage::kFp32) continue;
    std::vector<float> with_one = x;
    for (std::size_t i = 0; i < x.size(); i += 128) with_one[i] = 1.9f;
    Stored stored(storage, 2560, 128);
    stored.encode(test::ops_under_test(), with_one, Rounding::kStochastic, {.key = 99});
    const std::vector<float> back = stored.decode(test::ops_under_test());
    EXPECT_NE(back[1],
              back[std::find_if(back.begin(), back.end(),
                                [&](float value) { return value != back[1] && value < 1.5f; }) -
                   back.begin()])
        << test::storage_name(storage);
  }
}

}  // namespace
}  // namespace zerofp8
