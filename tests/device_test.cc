// What device kernels do beyond the CPU's: memory of the caller that ends anywhere and is aligned
// anyhow, maxima and sums that stay on the device, launches of any size. The bits of single blocks
// are compared in isa_test.cc.
#include "zerofp8/device.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/lane_programs.h"
#include "src/optim/adam_scalars.h"
#include "src/optim/exact_sum.h"
#include "tests/device_fixture.h"
#include "tests/stored.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using test::DeviceTest;
using test::kBlock;
ZEROFP8_ON_ALL_DEVICES(DeviceTest);

constexpr std::int64_t kLengths[] = {1, 15, 16, 17, 127, 128, 129, 300, 1000};

std::int64_t whole(std::int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

// A gradient of n elements at any alignment has the bits of one that is padded with zeros.
TEST_P(DeviceTest, GradientsEndAnywhereAndAreAlignedAnyhow) {
  for (const std::int64_t n : kLengths) {
    for (const std::int64_t shift : {0, 1, 3, 8}) {
      for (const Storage storage : {Storage::kFp32, Storage::kBf16, Storage::kFp16}) {
        SCOPED_TRACE(testing::Message()
                     << n << " of " << test::storage_name(storage) << " at " << shift);
        std::vector<float> x = test::gaussian(n, 7);
        x.resize(static_cast<std::size_t>(whole(n)));
        test::Stored padded(storage, whole(n), kBlock),
            expected(Storage::kE4m3Block, whole(n), kBlock);
        padded.encode(cpu_ops(), x);
        const std::uint32_t amax =
            cpu_ops().accumulate(expected.view(), {}, padded.view(), whole(n), kBlock,
                                 Rounding::kStochastic, {.key = 3, .offset = 96});
        // Ones before and behind, which must not be seen.
        const auto size = static_cast<std::size_t>(bytes_of(storage));
        std::vector<std::uint8_t> around(static_cast<std::size_t>(n + shift + 40) * size, 0x3F);
        std::memcpy(around.data() + static_cast<std::size_t>(shift) * size, padded.view().codes,
                    static_cast<std::size_t>(n) * size);
        Buffer gradient = upload(around);
        Buffer codes = zeros(static_cast<std::size_t>(whole(n)));
        Buffer scales = zeros(static_cast<std::size_t>(whole(n)) / kBlock * sizeof(float));
        Buffer largest = zeros(sizeof(std::uint32_t));
        device().accumulate(
            {.acc = {Storage::kE4m3Block, codes.data(), scales.as<float>()},
             .residual = {},
             .gradient = {storage, gradient.data() + static_cast<std::size_t>(shift) * size,
                          nullptr},
             .sum = {},
             .elements = n,
             .block = kBlock,
             .rounding = Rounding::kStochastic,
             .stream = {.key = 3, .offset = 96},
             .amax = largest.as<std::uint32_t>()});
        EXPECT_EQ(download<std::uint8_t>(codes), expected.codes());
        EXPECT_EQ(download<float>(scales), expected.scales());
        EXPECT_EQ(download_amax(largest), amax);
      }
    }
  }
}

// Adam writes a weight's n elements and nothing around them, and pads its own state with zeros.
TEST_P(DeviceTest, WeightsEndAnywhereAndAreAlignedAnyhow) {
  const AdamOptions options{.lr = 0.01, .weight_decay = 0.1};
  const AdamScalars scalars = adam_scalars(options, 1, 0.0);
  for (const std::int64_t n : kLengths) {
    for (const std::int64_t shift : {0, 1, 5}) {
      SCOPED_TRACE(testing::Message() << n << " at " << shift);
      const auto count = static_cast<std::size_t>(n), all = static_cast<std::size_t>(whole(n));
      std::vector<float> g = test::gaussian(n, 1), p = test::gaussian(n, 2);
      g.resize(all), p.resize(all);
      // On the host, in padded memory.
      std::vector<std::uint16_t> weight(all);
      std::vector<std::uint8_t> rest(all);
      std::vector<float> m(all), v(all);
      cpu_ops().split_master(p.data(), DType::kBf16, weight.data(), 8, rest.data(), whole(n));
      AdamArgs args{.elements = whole(n),
                    .block = kBlock,
                    .grad = {Storage::kFp32, g.data(), nullptr},
                    .grad_residual = {},
                    .exp_avg = {Storage::kFp32, m.data(), nullptr},
                    .exp_avg_sq = {Storage::kFp32, v.data(), nullptr},
                    .weight_dtype = DType::kBf16,
                    .weight = weight.data(),
                    .master_bits = 8,
                    .master = rest.data(),
                    .scalars = scalars,
                    .moments = {},
                    .weights = {}};
      const auto at = static_cast<std::size_t>(shift);
      std::vector<std::uint16_t> around(count + at + 20, 0x1234);
      std::copy_n(weight.begin(), count, around.begin() + shift);
      Buffer dw = upload(around), dr = upload(rest), dg = upload(g), dm = upload(m), dv = upload(v);
      Buffer largest = zeros(sizeof(std::uint32_t));
      const std::uint32_t amax = cpu_ops().adam(args);
      args.grad.codes = dg.data(), args.exp_avg.codes = dm.data(),
      args.exp_avg_sq.codes = dv.data();
      args.weight = dw.as<std::uint16_t>() + shift, args.master = dr.data();
      device().adam({.args = args, .weight_elements = n, .amax = largest.as<std::uint32_t>()});
      const auto written = download<std::uint16_t>(dw);
      for (std::size_t i = 0; i < written.size(); ++i) {
        const bool inside = i >= at && i < at + count;
        EXPECT_EQ(written[i], inside ? weight[i - at] : 0x1234) << i;
      }
      EXPECT_EQ(download<std::uint8_t>(dr), rest);
      EXPECT_EQ(download<float>(dm), m);
      EXPECT_EQ(download<float>(dv), v);
      EXPECT_EQ(download_amax(largest), amax);
    }
  }
}

// Several calls leave one maximum, and a NaN stays one.
TEST_P(DeviceTest, MaximaAreCombined) {
  Buffer largest = zeros(sizeof(std::uint32_t));
  const auto encode = [&](float x) {
    Buffer in = upload(std::vector<float>(kBlock, x)), out = zeros(kBlock), scale = zeros(4);
    device().recode({.in = {.part = {Storage::kFp32, in.data(), nullptr}, .residual = {}},
                     .out = {Storage::kE4m3Block, out.data(), scale.as<float>()},
                     .elements = kBlock,
                     .stream = {},
                     .amax = largest.as<std::uint32_t>()});
    float value;
    const std::uint32_t bits = download_amax(largest);
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  EXPECT_EQ(encode(2.0f), 2.0f);
  EXPECT_EQ(encode(-5.0f), 5.0f);
  EXPECT_EQ(encode(3.0f), 5.0f);
  EXPECT_EQ(encode(-INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(encode(NAN)));
  EXPECT_TRUE(std::isnan(encode(1.0f)));
}

// The device's limbs are the exact sum of the CPU's blocks, in any number of calls; blocks that are
// not finite add nothing.
TEST_P(DeviceTest, SumsOfSquaresAreExact) {
  for (const Storage storage : {Storage::kFp32, Storage::kE4m3Block, Storage::kBf16}) {
    for (const int block : test::kBlockSizes) {
      const std::int64_t n = 61 * block;
      std::vector<float> x = test::heavy_tailed(n, 11);
      if (storage == Storage::kFp32) {
        for (std::int64_t i = 0; i < block; ++i) x[i] = std::ldexp(x[i], 60);
        for (std::int64_t i = block; i < 2 * block; ++i) x[i] = std::ldexp(x[i], -70);
        x[static_cast<std::size_t>(5 * block + 3)] = INFINITY;
        x[static_cast<std::size_t>(7 * block)] = NAN;
      }
      test::Stored stored(storage, n, block);
      stored.encode(cpu_ops(), x);
      std::vector<double> squares(61);
      const std::uint32_t amax =
          cpu_ops().sum_squares(stored.view(), {}, 0.37f, squares.data(), n, block);
      ExactSum expected;
      for (const double s : squares) {
        if (std::isfinite(s)) expected.add(s);
      }
      Buffer codes = upload(stored.codes()), scales = upload(stored.scales());
      Buffer limbs = zeros(ExactLimbs::kWords * sizeof(std::int64_t));
      Buffer largest = zeros(sizeof(std::uint32_t));
      const View view{storage, codes.data(), is_block(storage) ? scales.as<float>() : nullptr};
      for (const auto& [begin, blocks] : {std::pair{0, 9}, {9, 1}, {10, 51}}) {
        device().sum_squares({.x = view.at(begin * block, block),
                              .residual = {},
                              .factor = 0.37f,
                              .elements = blocks * block,
                              .block = block,
                              .limbs = limbs.as<std::int64_t>(),
                              .amax = largest.as<std::uint32_t>()});
      }
      EXPECT_EQ(ExactSum(download<std::int64_t>(limbs).data()).value(), expected.value());
      EXPECT_EQ(not_finite(download_amax(largest)), not_finite(amax));
    }
  }
}

TEST_P(DeviceTest, NothingIsFine) {
  device().zero(nullptr, 0);
  device().copy(nullptr, nullptr, 0);
  device().upload(nullptr, nullptr, 0);
  device().download(nullptr, nullptr, 0);
  device().recode({});
  device().accumulate({});
  device().decode_sum({});
  device().sum_squares({});
  device().adam({});
  device().split_master({});
  device().join_master({});
  device().follow_weights({});
  device().synchronize();
}

// Every lane is visited once, whatever the grid; lanes of a block are in one warp.
TEST(Launch, CoversEachLaneOnce) {
  for (const std::int64_t elements : {1, 128, 129, 4096, 100000}) {
    for (const int block : test::kBlockSizes) {
      for (const unsigned max_grid : {1u, 2u, 7u, 1000u}) {
        const int width = block / lane::kElements;
        const lane::LaunchShape shape = lane::launch_shape(elements, block, width, max_grid);
        EXPECT_GE(shape.lanes * lane::kElements, elements);
        EXPECT_EQ(shape.lanes % width, 0);
        EXPECT_LE(shape.grid, max_grid);
        std::vector<int> visits(static_cast<std::size_t>(shape.lanes));
        for (unsigned b = 0; b < shape.grid; ++b) {
          for (unsigned thread = 0; thread < unsigned{lane::kThreads}; ++thread) {
            for (std::int64_t warp = lane::first_lane(b, thread); warp < shape.lanes;
                 warp += lane::lane_stride(shape.grid)) {
              EXPECT_EQ(warp % 32, 0);
              const std::int64_t mine = warp + thread % 32;
              if (mine < shape.lanes) ++visits[static_cast<std::size_t>(mine)];
            }
          }
        }
        for (const int count : visits) ASSERT_EQ(count, 1);
      }
    }
  }
}

// Case 29: beyond 2^31 elements, and 2^31 lanes.
TEST(Launch, Case29OffsetsAre64Bit) {
  for (const std::int64_t elements : {std::int64_t{1} << 33, (std::int64_t{1} << 40) + 5}) {
    for (const int block : test::kBlockSizes) {
      const lane::LaunchShape shape =
          lane::launch_shape(elements, block, block / lane::kElements, 1056);
      EXPECT_EQ(shape.lanes, (elements + block - 1) / block * (block / lane::kElements));
      EXPECT_EQ(shape.grid, 1056u);
      const lane::Position last = lane::position(shape.lanes - 1, block);
      EXPECT_EQ(last.first, shape.lanes * lane::kElements - lane::kElements);
      EXPECT_EQ(last.block, (elements - 1) / block);
      EXPECT_FALSE(last.leads);
      EXPECT_EQ(lane::valid(last.first - block, elements), lane::kElements);
    }
  }
  EXPECT_EQ(lane::first_lane(0x7FFFFFFFu, 255), (std::int64_t{0x7FFFFFFF} << 8) + 224);
  EXPECT_EQ(lane::valid(160, 128), 0);
}

TEST(EmulatedDevice, HostCannotTouchItsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto device = test::make_emulated_device();
  Buffer memory(device->allocator(), Component::kTransient, 64);
  EXPECT_DEATH(std::memset(memory.data(), 1, 1), "");
}

TEST(Cuda, ReasonIsTold) {
  const std::string why = why_no_cuda();
  if (!why.empty()) {
    try {
      make_cuda_device();
      ADD_FAILURE();
    } catch (const DeviceError& error) {
      EXPECT_EQ(error.what(), why);
    }
    GTEST_SKIP() << why;
  }
  try {
    make_cuda_device(4096);
    ADD_FAILURE();
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("cuda:4096"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace zerofp8
