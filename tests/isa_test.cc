// Every instruction set, and every device, gives the bits of "base", over adversarial inputs and
// any floating-point mode.
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <functional>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "tests/adam_state.h"
#include "tests/codecs.h"
#include "tests/device_as_ops.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

using test::AdamLayout;
using test::AdamState;
using test::Stored;

constexpr std::int64_t kN = 8 * 256;

// Inputs by block of 256: plain, wide range, subnormal, zeros, huge, ties, all kinds of bits.
std::vector<float> adversarial(std::uint32_t seed, bool non_finite) {
  std::vector<float> x = test::gaussian(kN, seed);
  for (std::int64_t i = 0; i < kN; ++i) {
    const std::uint32_t h = element::lowbias32(seed * 7919 + static_cast<std::uint32_t>(i));
    float& v = x[i];
    switch (i / 256) {
      case 1:
        v = std::ldexp(v, int(h % 60) - 40);
        break;
      case 2:
        v = test::from_bits(h & 0x807FFFFFu);
        break;  // subnormal
      case 3:
        v = h % 2 == 0 ? 0.0f : -0.0f;
        break;
      case 4:
        v = std::copysign(test::from_bits(0x7F7FFFFFu - h % 4096), v);
        break;
      case 5:
        v = (float(h % 1024) - 512) / 16;
        break;  // ties of every format
      case 6:
        v = test::from_bits(h % 0x7F800000u);
        break;
      case 7:
        if (non_finite) v = h % 3 == 0 ? INFINITY : h % 3 == 1 ? -INFINITY : NAN;
        break;
      default:
        break;
    }
  }
  return x;
}

// NaNs may differ in sign and payload (x86 propagates operands in the order that the compiler
// chose).
std::vector<float> canonical(std::vector<float> x) {
  for (float& v : x) v = std::isnan(v) ? std::numeric_limits<float>::quiet_NaN() : v;
  return x;
}
std::string bytes_of_floats(const std::vector<float>& x) {
  return std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float));
}
std::uint32_t flag(std::uint32_t amax) { return std::min(amax, 0x7F800001u); }

// Runs `work` under the floating-point modes a program may have set; all must give the same result.
void in_every_mode(const std::function<void()>& work) {
#if defined(__SSE__)
  const unsigned saved = _mm_getcsr();
  for (const unsigned mode : {0x1F80u, 0x1F80u | 0x8040u, 0x1F80u | 0x2000u, 0x1F80u | 0x6000u}) {
    _mm_setcsr(mode);
    work();
    EXPECT_EQ(_mm_getcsr() & 0xFFC0u, mode & 0xFFC0u) << "the program's mode was not put back";
    _mm_setcsr(saved);
  }
#else
  work();
#endif
}

class IsaTest : public testing::TestWithParam<const Ops*> {
 protected:
  // `work(ops)` returns all that it computed, as bytes. It must not compute its own inputs: those
  // would depend on the floating-point mode.
  void expect_same(const std::function<std::string(const Ops&)>& work) {
    const std::string expected = work(*runnable_cpu_ops().front());
    in_every_mode([&] {
      const std::string got = work(*GetParam());
      const auto [a, b] = std::mismatch(got.begin(), got.end(), expected.begin(), expected.end());
      ASSERT_EQ(got.size(), expected.size());
      ASSERT_EQ(a - got.begin(), static_cast<std::int64_t>(expected.size())) << "first difference";
    });
  }
};
INSTANTIATE_TEST_SUITE_P(All, IsaTest, testing::ValuesIn(test::all_ops()),
                         [](const auto& param) { return std::string(param.param->name); });

void for_each_storage(const std::function<void(Storage, int block, Rounding)>& f) {
  for (const Storage storage : test::kAllStorages) {
    for (const int block : test::kBlockSizes) {
      for (const Rounding rounding :
           {Rounding::kNearest, Rounding::kStochastic, Rounding::kMixed}) {
        SCOPED_TRACE(test::storage_name(storage) + ", block " + std::to_string(block) +
                     ", rounding " + std::to_string(int(rounding)));
        f(storage, block, rounding);
      }
    }
  }
}

TEST_P(IsaTest, EncodeAndDecode) {
  const std::vector<float> x = adversarial(1, true);
  for_each_storage([&](Storage storage, int block, Rounding rounding) {
    expect_same([&](const Ops& ops) {
      Stored stored(storage, kN, block);
      const std::uint32_t amax = stored.encode(ops, x, rounding, {.key = 3, .offset = 64});
      const std::vector<float> back = canonical(stored.decode(ops));
      std::string codes(stored.codes().begin(), stored.codes().end());
      const auto size = codes.size() / back.size();
      for (std::size_t i = 0; i < back.size(); ++i) {
        if (std::isnan(back[i])) codes.replace(i * size, size, size, 'N');
      }
      return std::to_string(flag(amax)) + codes + bytes_of_floats(canonical(stored.scales())) +
             bytes_of_floats(back);
    });
  });
}

TEST_P(IsaTest, EveryCodeDecodesAlike) {
  for (const Storage storage : test::kAllStorages) {
    if (storage == Storage::kFp32) continue;
    expect_same([&](const Ops& ops) {
      const int bytes = bytes_of(storage);
      const int n = bytes == 1 ? 256 : 65536;
      std::vector<std::uint16_t> codes(n);
      for (int i = 0; i < n; ++i) {
        if (bytes == 1) reinterpret_cast<std::uint8_t*>(codes.data())[i] = std::uint8_t(i);
        if (bytes == 2) codes[i] = std::uint16_t(i);
      }
      std::vector<float> scales(n / 32, 0.375f), out(n);
      ops.decode({storage, codes.data(), scales.data()}, out.data(), n, 32);
      return bytes_of_floats(canonical(out));
    });
  }
}

TEST_P(IsaTest, Accumulate) {
  std::vector<std::vector<float>> gradients;
  for (std::uint32_t k = 0; k < 3; ++k) gradients.push_back(adversarial(10 + k, false));
  for_each_storage([&](Storage storage, int block, Rounding rounding) {
    for (const bool feedback : {false, true}) {
      expect_same([&](const Ops& ops) {
        Stored acc(storage, kN, block), residual(storage, kN, block);
        std::string result;
        for (std::uint32_t k = 0; k < 3; ++k) {
          std::vector<float> g = gradients[k];
          if (storage == Storage::kUe4m4Block) {
            for (float& v : g) v = std::fabs(v);
          }
          Stored gradient(k == 1 ? Storage::kBf16 : Storage::kFp32, kN, block);
          gradient.encode(ops, g);
          const std::uint32_t amax =
              ops.accumulate(acc.view(), feedback ? residual.view() : View{}, gradient.view(), kN,
                             block, rounding, {.key = k});
          result += std::to_string(flag(amax)) + bytes_of_floats(canonical(acc.decode(ops))) +
                    bytes_of_floats(canonical(residual.decode(ops)));
        }
        return result;
      });
    }
  });
}

TEST_P(IsaTest, DecodeSumAndSumSquares) {
  std::vector<std::vector<float>> inputs;
  for (std::uint32_t k = 0; k < 10; ++k) inputs.push_back(adversarial(20 + k, k == 3));
  for (const Storage storage : test::kAllStorages) {
    for (const int block : test::kBlockSizes) {
      for (const bool feedback : {false, true}) {
        expect_same([&](const Ops& ops) {
          std::vector<Stored> parts;
          std::vector<View> views, residuals;
          for (std::uint32_t k = 0; k < 10; ++k) {
            parts.emplace_back(storage, kN, block);
            parts.back().encode(ops, inputs[k]);
          }
          for (std::size_t k = 0; k < 5; ++k) {
            views.push_back(parts[k].view());
            residuals.push_back(parts[k + 5].view());
          }
          std::vector<float> out(kN);
          const std::uint32_t amax = ops.decode_sum(
              views.data(), feedback ? residuals.data() : nullptr, 5, 0.3f, out.data(), kN, block);
          std::vector<double> squares(kN / block);
          const std::uint32_t largest = ops.sum_squares(views[0], feedback ? residuals[0] : View{},
                                                        0.7f, squares.data(), kN, block);
          for (double& s : squares) s = std::isnan(s) ? -1 : s;
          return std::to_string(flag(amax)) + "," + std::to_string(flag(largest)) +
                 bytes_of_floats(canonical(out)) +
                 std::string(reinterpret_cast<const char*>(squares.data()), squares.size() * 8);
        });
      }
    }
  }
}

TEST_P(IsaTest, Adam) {
  const std::vector<float> start = test::gaussian(kN, 1);
  std::vector<std::vector<float>> gradients;
  std::vector<AdamScalars> exact, guarded;
  for (std::uint32_t t = 1; t <= 3; ++t) {
    gradients.push_back(adversarial(t, false));
    for (float& v : gradients.back()) v = std::clamp(v, -1e18f, 1e18f);
    const AdamOptions options{.algorithm = t == 2 ? Algorithm::kAdam : Algorithm::kAdamW,
                              .lr = 0.01,
                              .weight_decay = 0.1};
    exact.push_back(test::scalars_at(options, t, false));
    guarded.push_back(test::scalars_at(options, t, true));
  }
  for (const test::Moments& moments : test::all_moments()) {
    for (const AdamLayout& layout : test::layouts_of(moments)) {
      SCOPED_TRACE(layout.name());
      const int block = test::kBlockSizes[(int(layout.weight) + int(layout.exp_avg)) & 3];
      expect_same([&](const Ops& ops) {
        AdamState state(layout, start, block);
        std::string result;
        for (int t = 1; t <= 3; ++t) {
          const AdamScalars& k = (layout.exact() ? exact : guarded)[t - 1];
          result += std::to_string(flag(state.step(ops, gradients[t - 1], k, t))) + state.bytes();
        }
        return result;
      });
    }
  }
}

TEST_P(IsaTest, AdamOfEveryGradientStorage) {
  const std::vector<float> start = test::gaussian(kN, 1), rest = test::gaussian(kN, 5, 0.01f);
  const std::vector<float> gradient = test::heavy_tailed(kN, 4);
  const AdamScalars k = test::scalars_at({}, 1, true);
  for (const Storage storage : test::kAllStorages) {
    for (const int block : test::kBlockSizes) {
      expect_same([&](const Ops& ops) {
        AdamState state({.exp_avg = Storage::kE4m3Block,
                         .exp_avg_sq = Storage::kFp16Block,
                         .weight = DType::kBf16,
                         .master_bits = 8,
                         .exp_avg_rounding = Rounding::kStochastic},
                        start, block);
        Stored grad(storage, kN, block), residual(storage, kN, block);
        grad.encode(ops, gradient);
        residual.encode(ops, rest);
        state.step(ops, grad, k, 1, true, residual.view());
        return state.bytes();
      });
    }
  }
}

TEST_P(IsaTest, Masters) {
  const std::vector<float> x = adversarial(9, true);
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    for (const int master_bits : {0, 8, 16, 32}) {
      expect_same([&](const Ops& ops) {
        std::vector<std::uint16_t> weight(kN);
        std::string rest(kN * master_bits / 8, '\0');
        std::vector<float> back(kN);
        ops.split_master(x.data(), dtype, weight.data(), master_bits, rest.data(), kN);
        ops.join_master(dtype, weight.data(), master_bits, rest.data(), back.data(), kN);
        return std::string(reinterpret_cast<const char*>(weight.data()), kN * 2) + rest +
               bytes_of_floats(canonical(back));
      });
    }
  }
}

TEST(Isa, TablesAreNamedAndBaseComesFirst) {
  const std::vector<const Ops*> tables = runnable_cpu_ops();
  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(tables[0]->name, "base");
  for (std::size_t i = 1; i < tables.size(); ++i) {
    EXPECT_EQ(tables[i]->name, i == 1 ? "v3" : "v4");
  }
}

// Run by CTest with ZEROFP8_ISA set to each name, to nothing, and to names that do not exist.
TEST(Isa, EnvironmentVariableForcesATable) {
  const char* wanted = std::getenv("ZEROFP8_ISA");
  const std::vector<const Ops*> tables = runnable_cpu_ops();
  const std::string name =
      wanted == nullptr || *wanted == '\0' ? std::string(tables.back()->name) : std::string(wanted);
  const bool known =
      std::any_of(tables.begin(), tables.end(), [&](const Ops* ops) { return ops->name == name; });
  if (known) {
    EXPECT_EQ(cpu_ops().name, name);
    return;
  }
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      cpu_ops();
      FAIL() << "ZEROFP8_ISA=" << name << " was accepted";
    } catch (const ArgumentError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("ZEROFP8_ISA"), std::string::npos) << text;
      EXPECT_NE(text.find('"' + name + '"'), std::string::npos) << text;
      for (const Ops* ops : tables) {
        EXPECT_NE(text.find(std::string(ops->name)), std::string::npos) << text;
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8
