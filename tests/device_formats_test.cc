// Every kernel in every combination of formats and roundings, at the ends and alignments that a
// caller's memory may have: each device under test leaves the bytes that the CPU's leaves, also
// around what it was given.
#include "src/optim/exact_sum.h"
#include "tests/adam_state.h"
#include "tests/device_memory.h"

namespace zerofp8 {
namespace {

using test::kAllStorages;
using test::kBlock;
using test::Memory;
using test::Stored;

constexpr Rounding kRoundings[] = {Rounding::kNearest, Rounding::kStochastic, Rounding::kMixed};
constexpr Storage kPlain[] = {Storage::kFp32, Storage::kBf16, Storage::kFp16};
constexpr DType kWeights[] = {DType::kFp32, DType::kBf16, DType::kFp16};

// Blocks of ordinary numbers, of a wide range with subnormals, of ties, of zeros; moderate, so that
// no difference of infinities makes a NaN, whose bits are free.
std::vector<float> numbers(std::int64_t n, std::uint32_t seed, float scale = 1.0f) {
  std::vector<float> x = test::gaussian(n, seed, scale);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t kind = i / kBlock % 4;
    if (kind == 1) x[i] = std::ldexp(x[i], int(i * 37 % 34) - 30);
    if (kind == 2) x[i] = std::round(x[i] * 16) / 16;
    if (kind == 3 && i % 5 != 0) x[i] = i % 2 == 0 ? 0.0f : -0.0f;
  }
  return x;
}
Stored stored(Storage storage, std::int64_t n, std::uint32_t seed, float scale = 1.0f,
              int block = kBlock) {
  std::vector<float> x = numbers(n, seed, scale);
  if (storage == Storage::kUe4m4Block) {
    for (float& v : x) v = std::fabs(v);
  }
  Stored s(storage, n, block);
  s.encode(cpu_ops(), x);
  return s;
}

class DeviceFormats : public test::DeviceTest {
 protected:
  // `call(device, memory)` makes one call.
  template <class F>
  void expect_same(F call) {
    Memory here(cpu()), there(device());
    call(cpu(), here);
    call(device(), there);
    const std::string expected = here.bytes(), got = there.bytes();
    const auto at = std::mismatch(got.begin(), got.end(), expected.begin()).first - got.begin();
    ASSERT_EQ(at, static_cast<std::int64_t>(expected.size())) << "first difference";
  }
};
ZEROFP8_ON_ALL_DEVICES(DeviceFormats);

struct End {
  std::int64_t n;
  int shift;
};
constexpr End kEnds[] = {{5 * kBlock, 0}, {5 * kBlock, 1}, {301, 3}, {1, 0}};

TEST_P(DeviceFormats, GradientsAreAccumulated) {
  for (const Storage storage : kAllStorages) {
    Stored acc = stored(storage, 5 * kBlock, 1), residual = stored(storage, 5 * kBlock, 2, 0.01f);
    for (const Storage caller : kPlain) {
      Stored gradient = stored(caller, 5 * kBlock, 3);
      for (const Rounding rounding : kRoundings) {
        for (const bool feedback : {false, true}) {
          for (const End& end : kEnds) {
            SCOPED_TRACE(test::storage_name(storage) + " + " + test::storage_name(caller) + " " +
                         std::to_string(int(rounding)) + " " + std::to_string(feedback) + " " +
                         std::to_string(end.n));
            expect_same([&](Device& d, Memory& memory) {
              d.accumulate({.acc = memory.put(acc),
                            .residual = feedback ? memory.put(residual) : View{},
                            .gradient = memory.put_plain(gradient, end.n, end.shift),
                            .sum = {},
                            .elements = end.n,
                            .rounding = rounding,
                            .stream = {.key = 5, .offset = 640},
                            .amax = memory.put_amax()});
            });
          }
        }
      }
    }
  }
}

// Three parts, each with its residual behind it, as messages are.
Summands put_parts(Memory& memory, Storage storage, std::int64_t n, bool with_residuals) {
  const auto whole = [](std::size_t bytes) { return (bytes + 15) / 16 * 16; };
  std::string all;
  std::size_t half = 0, scales = 0;
  for (std::uint32_t k = 0; k < 6; ++k) {
    Stored s = stored(storage, n, 10 + k, k % 2 == 0 ? 1.0f : 0.01f);
    scales = s.codes().size();
    half = whole(s.bytes().size());
    all += s.bytes();
    all.resize((k + 1) * half, '\0');
  }
  char* base = memory.put<char>(all.data(), all.size());
  const auto view = [&](std::size_t at) {
    return View{storage, base + at,
                is_block(storage) ? reinterpret_cast<float*>(base + at + scales) : nullptr};
  };
  return {.part = view(0),
          .residual = with_residuals ? view(half) : View{},
          .count = 3,
          .part_bytes = static_cast<std::int64_t>(2 * half)};
}

TEST_P(DeviceFormats, SumsOfPartsGoAnywhere) {
  constexpr std::int64_t kN = 4 * kBlock;
  for (const Storage part : kAllStorages) {
    for (const bool residuals : {false, true}) {
      SCOPED_TRACE(test::storage_name(part) + (residuals ? " with residuals" : ""));
      expect_same([&](Device& d, Memory& memory) {
        std::vector<float> out(kN);
        d.decode_sum({.in = put_parts(memory, part, kN, residuals),
                      .factor = 0.3f,
                      .out = memory.put(out),
                      .elements = kN,
                      .amax = memory.put_amax()});
      });
      for (const Storage storage : kAllStorages) {
        Stored out = stored(storage, kN, 1), rest = stored(storage, kN, 2, 0.01f);
        for (const Rounding rounding : kRoundings) {
          SCOPED_TRACE(test::storage_name(storage) + " " + std::to_string(int(rounding)));
          expect_same([&](Device& d, Memory& memory) {
            d.recode({.in = put_parts(memory, part, kN, residuals),
                      .out = memory.put(out),
                      .elements = kN,
                      .rounding = rounding,
                      .stream = {.key = 6, .offset = 128},
                      .amax = memory.put_amax()});
          });
          for (const bool feedback : {false, true}) {
            expect_same([&](Device& d, Memory& memory) {
              d.accumulate({.acc = memory.put(out),
                            .residual = feedback ? memory.put(rest) : View{},
                            .gradient = {},
                            .sum = put_parts(memory, part, kN, residuals),
                            .elements = kN,
                            .rounding = rounding,
                            .stream = {.key = 7, .offset = 256},
                            .amax = memory.put_amax()});
            });
          }
        }
      }
    }
  }
}

// From and to a caller's memory.
TEST_P(DeviceFormats, NumbersAreRecoded) {
  for (const Storage from : kPlain) {
    for (const Storage to : kPlain) {
      Stored in = stored(from, 5 * kBlock, 4), out(to, 5 * kBlock, kBlock);
      for (const Rounding rounding : kRoundings) {
        for (const End& end : kEnds) {
          SCOPED_TRACE(test::storage_name(from) + " to " + test::storage_name(to));
          expect_same([&](Device& d, Memory& memory) {
            d.recode({.in = {.part = memory.put_plain(in, end.n, end.shift), .residual = {}},
                      .out = memory.put_plain(out, end.n, end.shift + 1),
                      .elements = end.n,
                      .rounding = rounding,
                      .stream = {.key = 8, .offset = 64},
                      .amax = memory.put_amax()});
          });
        }
      }
    }
  }
}

// All states beside all gradients; weights end anywhere, and all steps are also only looked at.
TEST_P(DeviceFormats, AdamOfEveryState) {
  const AdamScalars scalars = test::scalars_at({.lr = 0.01, .weight_decay = 0.1}, 3, true);
  constexpr std::int64_t kN = 3 * kBlock;
  int turn = 0;
  for (const test::Moments& moments : test::all_moments()) {
    Stored m = stored(moments.exp_avg, kN, 1), v = stored(moments.exp_avg_sq, kN, 2);
    for (const test::AdamLayout& layout : test::layouts_of(moments)) {
      const auto bytes = static_cast<std::size_t>(bytes_of(layout.weight));
      const std::vector<float> values = numbers(kN, 5);
      std::vector<std::uint8_t> weight(kN * bytes),
          master(std::size_t(kN * layout.master_bits / 8));
      cpu_ops().split_master(values.data(), layout.weight, weight.data(), layout.master_bits,
                             master.data(), kN);
      for (const Storage storage : kAllStorages) {
        Stored gradient = stored(storage, kN, 3), rest = stored(storage, kN, 4, 0.01f);
        for (int row = 0; row < 12; ++row) {
          const Rounding rounding = kRoundings[row / 4];
          if (moments.exp_avg == Storage::kFp32 && row >= 4) break;  // is not rounded
          const bool feedback = row % 2 != 0;
          const std::int64_t n = row / 2 % 2 == 0 ? kN : kN - 83;  // ends within the last block
          const bool commit = ++turn % 11 != 0;
          SCOPED_TRACE(layout.name() + " " + test::storage_name(storage) + " " +
                       std::to_string(feedback) + " " + std::to_string(int(rounding)));
          expect_same([&](Device& d, Memory& memory) {
            AdamArgs args;
            args.elements = kN;
            args.block = kBlock;
            args.grad = memory.put(gradient);
            if (feedback) args.grad_residual = memory.put(rest);
            args.exp_avg = memory.put(m);
            args.exp_avg_sq = memory.put(v);
            args.weight_dtype = layout.weight;
            args.weight =
                memory.put(weight.data(), static_cast<std::size_t>(n) * bytes, n == kN ? 0 : bytes);
            args.master_bits = layout.master_bits;
            args.master = memory.put(master);
            args.scalars = scalars;
            args.exp_avg_rounding = rounding;
            args.moments = {.key = 9, .offset = 128};
            args.weights = {.key = 10, .offset = 128};
            args.commit = commit;
            d.adam({.args = args, .weight_elements = n, .amax = memory.put_amax()});
          });
        }
      }
    }
  }
}

// At each place of a block; what has the formats of a level has a kernel of its own.
TEST_P(DeviceFormats, TheLargestIsFoundWhereverItIs) {
  const AdamScalars scalars = test::scalars_at({.lr = 0}, 1, false);
  const std::vector<float> zeros(kBlock);
  const std::vector<test::AdamLayout> layouts = {
      {},
      {.weight = DType::kBf16, .master_bits = 16},
      {Storage::kE4m3Block, Storage::kFp16Block, DType::kBf16, 8},
      {Storage::kE4m3Block, Storage::kUe4m4Block, DType::kBf16, 8},
      {Storage::kFp16Block, Storage::kFp32, DType::kFp16, 8},
      {Storage::kBf16, Storage::kBf16, DType::kFp16, 0}};
  for (std::size_t at = 0; at < kBlock; at += at < 16 ? 1 : 17) {
    std::vector<float> x(kBlock, 1.0f);
    x[at] = -5.0f;
    Stored codes(Storage::kE4m3Block, kBlock, kBlock);
    codes.encode(cpu_ops(), x);
    const auto expect_found = [&](auto call) {
      Memory memory(device());
      std::uint32_t* amax = memory.put_amax();
      call(memory, amax);
      EXPECT_EQ(memory.get(amax), 0x40A00000u) << at;  // 5.0f
    };
    expect_found([&](Memory& memory, std::uint32_t* amax) {
      device().recode({.in = {.part = {Storage::kFp32, memory.put(x), nullptr}, .residual = {}},
                       .out = memory.put(codes),
                       .elements = kBlock,
                       .stream = {},
                       .amax = amax});
    });
    expect_found([&](Memory& memory, std::uint32_t* amax) {
      device().decode_sum({.in = {.part = memory.put(codes), .residual = {}},
                           .out = memory.put(zeros),
                           .elements = kBlock,
                           .amax = amax});
    });
    for (const bool sum : {false, true}) {
      for (const bool feedback : {false, true}) {
        expect_found([&](Memory& memory, std::uint32_t* amax) {
          Stored acc(Storage::kE4m3Block, kBlock, kBlock);
          AccumulateArgs args{.acc = memory.put(acc),
                              .residual = feedback ? memory.put(acc) : View{},
                              .gradient = {},
                              .sum = {},
                              .elements = kBlock,
                              .stream = {},
                              .amax = amax};
          if (sum) args.sum = {.part = memory.put(codes), .residual = {}};
          if (!sum) args.gradient = {Storage::kFp32, memory.put(x), nullptr};
          device().accumulate(args);
        });
      }
    }
    for (const test::AdamLayout& layout : layouts) {
      for (const Storage storage : {Storage::kFp32, Storage::kE4m3Block}) {
        std::vector<std::uint8_t> weight(kBlock * std::size_t(bytes_of(layout.weight)));
        std::vector<std::uint8_t> master(std::size_t(kBlock * layout.master_bits / 8));
        cpu_ops().split_master(x.data(), layout.weight, weight.data(), layout.master_bits,
                               master.data(), kBlock);
        Stored gradient(storage, kBlock, kBlock), m(layout.exp_avg, kBlock, kBlock),
            v(layout.exp_avg_sq, kBlock, kBlock);
        expect_found([&](Memory& memory, std::uint32_t* amax) {
          AdamArgs args;
          args.elements = args.block = kBlock;
          args.grad = memory.put(gradient);
          args.exp_avg = memory.put(m);
          args.exp_avg_sq = memory.put(v);
          args.weight_dtype = layout.weight;
          args.weight = memory.put(weight);
          args.master_bits = layout.master_bits;
          args.master = memory.put(master);
          args.scalars = scalars;
          args.commit = true;
          device().adam({.args = args, .weight_elements = kBlock, .amax = amax});
        });
      }
    }
    expect_found([&](Memory& memory, std::uint32_t* amax) {
      device().join_master(
          {.dtype = DType::kFp32, .weight = memory.put(x), .elements = kBlock, .amax = amax});
    });
  }
}

TEST_P(DeviceFormats, MastersAreSplitJoinedAndFollow) {
  for (const DType dtype : kWeights) {
    for (const int bits : {0, 8, 16, 32}) {
      if (dtype == DType::kFp32 && bits != 0) continue;
      for (const End& end : kEnds) {
        SCOPED_TRACE(std::string(to_string(dtype)) + " " + std::to_string(bits) + " " +
                     std::to_string(end.n));
        const auto count = static_cast<std::size_t>(end.n);
        const auto bytes = static_cast<std::size_t>(bytes_of(dtype));
        const auto shift = static_cast<std::size_t>(end.shift);
        std::vector<float> values = numbers(5 * kBlock, 6);
        values.resize(count);
        std::vector<std::uint8_t> weight(count * bytes), rest(count * std::size_t(bits) / 8 + 1);
        const auto split = [&](Device& d, Memory& memory, float* from, bool join) {
          const MasterArgs args{
              .dtype = dtype,
              .weight = memory.put(weight.data(), weight.size(), shift * bytes),
              .master_bits = bits,
              .rest = memory.put(rest.data(), rest.size() - 1, shift * std::size_t(bits) / 8),
              .values = from,
              .elements = end.n,
              .amax = memory.put_amax()};
          join ? d.join_master(args) : d.split_master(args);
        };
        expect_same([&](Device& d, Memory& memory) {
          split(d, memory, memory.put(values, shift * sizeof(float)), false);
        });
        cpu_ops().split_master(values.data(), dtype, weight.data(), bits, rest.data(), end.n);
        for (const bool looks : {false, true}) {
          expect_same([&](Device& d, Memory& memory) {
            float* to = looks ? nullptr : memory.put(std::vector<float>(count), shift * 4);
            split(d, memory, to, true);
          });
        }
        if (dtype == DType::kFp32 || bits == 0) continue;
        std::vector<std::uint8_t> kept = weight;
        for (std::size_t i = 0; i < kept.size(); i += 6) kept[i] ^= 1;
        expect_same([&](Device& d, Memory& memory) {
          d.follow_weights({.dtype = dtype,
                            .weight = memory.put(weight, shift * bytes),
                            .kept = memory.put(kept, shift * bytes),
                            .master_bits = bits,
                            .master = memory.put(rest),
                            .elements = end.n});
        });
      }
    }
  }
}

// Limbs may be carried differently: their value is what counts.
TEST_P(DeviceFormats, SquaresOfEveryFormat) {
  for (const Storage storage : kAllStorages) {
    for (const int block : test::kBlockSizes) {
      const std::int64_t n = 9 * block;
      Stored x = stored(storage, n, 1, 1.0f, block), rest = stored(storage, n, 2, 0.01f, block);
      for (const bool feedback : {false, true}) {
        SCOPED_TRACE(test::storage_name(storage) + " " + std::to_string(block));
        const auto sum_on = [&](Device& d) {
          Memory memory(d);
          std::vector<std::int64_t> limbs(ExactLimbs::kWords);
          auto* words = memory.put(limbs);
          std::uint32_t* largest = memory.put_amax();
          d.sum_squares({.x = memory.put(x),
                         .residual = feedback ? memory.put(rest) : View{},
                         .factor = 0.7f,
                         .elements = n,
                         .block = block,
                         .limbs = words,
                         .amax = largest});
          return std::pair(ExactSum(memory.get(words, limbs.size()).data()).value(),
                           memory.get(largest));
        };
        EXPECT_EQ(sum_on(device()), sum_on(cpu()));
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8
