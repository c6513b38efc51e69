// Sums of the parts of a message and masters that follow weights, on each device under test against
// the CPU's tables.
#include <cstring>

#include "tests/device_fixture.h"
#include "tests/stored.h"

namespace zerofp8 {
namespace {

using test::kBlock;
class DeviceSums : public test::DeviceTest {};
ZEROFP8_ON_ALL_DEVICES(DeviceSums);

// Parts of a message are added in their order: into FP32, into another message, into an
// accumulator.
TEST_P(DeviceSums, PartsAreAddedWhereverTheyGo) {
  constexpr std::int64_t kN = 9 * kBlock, kPart = kN + 9 * 4 + 12;  // codes, scales, padding
  for (const bool residual : {false, true}) {
    std::vector<test::Stored> parts, rests;
    std::vector<View> views, rest_views;
    std::vector<std::byte> message(static_cast<std::size_t>(2 * 3 * kPart));
    for (int k = 0; k < 3; ++k) {
      for (auto* list : {&parts, &rests}) {
        list->emplace_back(Storage::kE4m3Block, kN, kBlock);
        list->back().encode(cpu_ops(), test::gaussian(kN, static_cast<std::uint32_t>(k) + 5));
      }
    }
    for (int k = 0; k < 3; ++k) {
      const auto place = [&](test::Stored& from, std::int64_t at) {
        std::memcpy(message.data() + at, from.view().codes, kN);
        std::memcpy(message.data() + at + kN, from.view().scales, 9 * 4);
        return from.view();
      };
      views.push_back(place(parts[static_cast<std::size_t>(k)], 2 * k * kPart));
      rest_views.push_back(place(rests[static_cast<std::size_t>(k)], (2 * k + 1) * kPart));
    }
    Buffer in = upload(message);
    const auto view = [&](std::int64_t at) {
      std::byte* codes = in.data() + at;
      return View{Storage::kE4m3Block, codes, reinterpret_cast<float*>(codes + kN)};
    };
    const Summands sum{.part = view(0),
                       .residual = residual ? view(kPart) : View{},
                       .count = 3,
                       .part_bytes = 2 * kPart};
    std::vector<float> expected(kN);
    cpu_ops().decode_sum(views.data(), residual ? rest_views.data() : nullptr, 3, 1.0f,
                         expected.data(), kN, kBlock);
    Buffer out = zeros(kN * sizeof(float));
    device().decode_sum({.in = sum, .out = out.as<float>(), .elements = kN, .block = kBlock});
    EXPECT_EQ(download<float>(out), expected);

    test::Stored encoded(Storage::kE5m2Block, kN, kBlock), acc(Storage::kFp16Block, kN, kBlock);
    encoded.encode(cpu_ops(), expected);
    Buffer codes = zeros(kN), scales = zeros(9 * sizeof(float));
    device().recode({.in = sum,
                     .out = {Storage::kE5m2Block, codes.data(), scales.as<float>()},
                     .elements = kN,
                     .block = kBlock,
                     .stream = {}});
    EXPECT_EQ(download<std::uint8_t>(codes), encoded.codes());
    EXPECT_EQ(download<float>(scales), encoded.scales());

    acc.encode(cpu_ops(), test::gaussian(kN, 77));
    Buffer acc_codes = upload(acc.codes()), acc_scales = upload(acc.scales());
    Buffer largest = zeros(sizeof(std::uint32_t));
    const RandomStream stream{.key = 9, .offset = 64};
    const std::uint32_t amax =
        cpu_ops().accumulate(acc.view(), {}, {Storage::kFp32, expected.data(), nullptr}, kN, kBlock,
                             Rounding::kStochastic, stream);
    device().accumulate({.acc = {Storage::kFp16Block, acc_codes.data(), acc_scales.as<float>()},
                         .residual = {},
                         .gradient = {},
                         .sum = sum,
                         .elements = kN,
                         .block = kBlock,
                         .rounding = Rounding::kStochastic,
                         .stream = stream,
                         .amax = largest.as<std::uint32_t>()});
    EXPECT_EQ(download<std::uint8_t>(acc_codes), acc.codes());
    EXPECT_EQ(download<float>(acc_scales), acc.scales());
    EXPECT_EQ(download_amax(largest), amax);
  }
}

// A join may only look.
TEST_P(DeviceSums, TheLargestMasterIsFoundWithoutMemoryForThem) {
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{300}, std::int64_t{5000}}) {
    std::vector<std::uint16_t> weight(static_cast<std::size_t>(n), 0x3C00);
    weight.back() = 0xC500;  // -5 in fp16
    Buffer w = upload(weight), largest = zeros(sizeof(std::uint32_t));
    device().join_master({.dtype = DType::kFp16,
                          .weight = w.data(),
                          .elements = n,
                          .amax = largest.as<std::uint32_t>()});
    float value;
    const std::uint32_t bits = download_amax(largest);
    std::memcpy(&value, &bits, sizeof value);
    EXPECT_EQ(value, 5.0f);
  }
}

// Weights that were written take their masters along; the others keep theirs.
TEST_P(DeviceSums, MastersFollowWhatWasWritten) {
  constexpr std::size_t kN = 300;
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    for (const int bits : {8, 16, 32}) {
      std::vector<std::uint16_t> kept(kN), weight(kN);
      std::vector<std::uint8_t> master(kN * 4 + 16, 0xA5);
      for (std::size_t i = 0; i < kN; ++i) {
        kept[i] = static_cast<std::uint16_t>(0x3C00 + i);
        weight[i] = static_cast<std::uint16_t>(i % 3 == 0 ? 0x4000 + i : kept[i]);
      }
      Buffer w = upload(weight), k = upload(kept), m = upload(master);
      device().follow_weights({.dtype = dtype,
                               .weight = w.data(),
                               .kept = k.data(),
                               .master_bits = bits,
                               .master = m.data(),
                               .elements = kN});
      EXPECT_EQ(download<std::uint16_t>(k), weight);
      EXPECT_EQ(download<std::uint16_t>(w), weight);
      for (std::size_t i = 0; i < kN; i += 3) {
        float value = 0;
        cpu_ops().join_master(dtype, &weight[i], 0, nullptr, &value, 1);
        const std::size_t bytes = static_cast<std::size_t>(bits) / 8;
        bits == 32 ? std::memcpy(&master[i * 4], &value, 4)
                   : std::memset(&master[i * bytes], 0, bytes);
      }
      EXPECT_EQ(download<std::uint8_t>(m), master) << to_string(dtype) << " " << bits;
    }
  }
}

// Packing and unpacking: more copies than one launch takes, of all sizes and alignments, packed
// closely and taken apart again; nothing beside them is written.
TEST_P(DeviceSums, ManyCopiesPackAndUnpack) {
  std::vector<std::int64_t> sizes, packed_at, loose_at;
  std::int64_t packed = 0, loose = 1;
  for (int i = 0; i < 300; ++i) {
    sizes.push_back(i == 150 ? 100'001 : i * 7 % 67);
    packed += i % 3 == 0 ? (16 - packed % 16) % 16 : i % 3 == 1 ? packed % 2 : 0;
    loose += i % 2 == 0 ? (16 - loose % 16) % 16 + i % 16 : 3;
    packed_at.push_back(packed);
    loose_at.push_back(loose);
    packed += sizes.back();
    loose += sizes.back();
  }
  std::vector<std::uint8_t> from(static_cast<std::size_t>(loose));
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 131 + 7);
  std::vector<std::uint8_t> expected_packed(static_cast<std::size_t>(packed) + 16, 0xEE);
  std::vector<std::uint8_t> expected_loose(from.size(), 0xEE);
  Buffer source = upload(from), middle = upload(expected_packed), back = upload(expected_loose);
  std::vector<Copy> pack, unpack;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    pack.push_back({middle.data() + packed_at[i], source.data() + loose_at[i], sizes[i]});
    unpack.push_back({back.data() + loose_at[i], middle.data() + packed_at[i], sizes[i]});
    const auto size = static_cast<std::size_t>(sizes[i]);
    if (size == 0) continue;
    std::memcpy(expected_packed.data() + packed_at[i], from.data() + loose_at[i], size);
    std::memcpy(expected_loose.data() + loose_at[i], from.data() + loose_at[i], size);
  }
  device().copy_many(pack);
  device().copy_many(unpack);
  device().copy_many({});
  EXPECT_EQ(download<std::uint8_t>(middle), expected_packed);
  EXPECT_EQ(download<std::uint8_t>(back), expected_loose);
}

}  // namespace
}  // namespace zerofp8
