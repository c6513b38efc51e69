// The kernels that decide a step in device memory: each device under test leaves what the CPU's
// leave, for more parameters than one launch has threads, and for parts of every kind.
#include <bit>
#include <cmath>
#include <cstring>

#include "src/optim/exact_sum.h"
#include "tests/device_memory.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

using test::Memory;
class DeviceStepTest : public test::DeviceTest {};
ZEROFP8_ON_ALL_DEVICES(DeviceStepTest);

bool same(const StepPart& a, const StepPart& b) {
  return std::equal(std::begin(a.squares), std::end(a.squares), b.squares) &&
         a.digest == b.digest && a.refusal == b.refusal && a.bad == b.bad &&
         a.bad_rank == b.bad_rank && a.bad_slice == b.bad_slice &&
         a.bad_parameter == b.bad_parameter && a.valid == b.valid;
}
std::uint64_t bits(double x) { return std::bit_cast<std::uint64_t>(x); }
bool same(const StepState& a, const StepState& b) {
  return a.applied == b.applied && a.skipped == b.skipped && a.before == b.before &&
         (bits(a.norm) == bits(b.norm) || (a.norm != a.norm && b.norm != b.norm)) &&
         bits(a.clip) == bits(b.clip) && a.skip == b.skip && a.bad_rank == b.bad_rank &&
         a.bad_slice == b.bad_slice && a.bad_parameter == b.bad_parameter;
}

constexpr int kCounts[] = {1, 3, 127, 128, 129, 500, 1500};

std::vector<std::int64_t> squares_of(std::uint64_t seed) {
  std::vector<std::int64_t> words(kExactSumWords);
  for (int i = 0; i < 40; ++i) {
    add_exactly(words.data(),
                std::ldexp(double(element::mix64(seed + std::uint64_t(i)) >> 40), i % 7 * 20 - 80));
  }
  return words;
}

TEST_P(DeviceStepTest, PartsAreMade) {
  for (const int n : kCounts) {
    // None, all of one kind, one each, the last ones.
    for (int kind = 0; kind < 6; ++kind) {
      std::vector<std::uint32_t> maxima(2 * std::size_t(n), 0x40000000u);
      const auto spoil = [&](int i, int which, std::uint32_t to) {
        maxima[2 * std::size_t(i) + std::size_t(which)] = to;
      };
      if (kind == 1) spoil(n - 1, 0, 0x7F800000u);
      if (kind == 2) spoil(n / 2, 1, 0x7FC00000u);
      if (kind == 3) spoil(0, 1, 0x7F800000u), spoil(n - 1, 0, 0x7FFFFFFFu);
      if (kind == 4) {
        for (int i = n / 3; i < n; ++i) spoil(i, 1, 0x7F800001u);
      }
      if (kind == 5) {
        for (int i = n / 3; i < n; ++i) spoil(i, i % 2, 0x7F800001u);
      }
      const auto part_on = [&](Device& d) {
        Memory memory(d);
        StepPart* out = memory.put(std::vector{StepPart{}});
        d.make_part(
            {.squares = memory.put(squares_of(std::uint64_t(kind))),
             .maxima = memory.put(maxima),
             .parameters = n,
             .data_rank = 3,
             .slice = 1,
             .digest = memory.put(std::vector<std::uint64_t>{0x123456789ABCDEF}),
             .refusal = memory.put(std::vector<std::uint32_t>{kind == 2 ? 4u : 0u}),
             .state = memory.put(std::vector{StepState{.applied = std::uint64_t(n), .skipped = 2}}),
             .out = out});
        return memory.get(out);
      };
      const StepPart part = part_on(device());
      EXPECT_TRUE(same(part, part_on(cpu()))) << n << " parameters, kind " << kind;
      // By hand: what was given comes before what was received, then the first one.
      EXPECT_EQ(part.valid, 1u);
      const int first = n / 3, given = first % 2 == 0 ? first : first + 1;
      const int parameter[] = {-1, n - 1, n / 2, n - 1, first, given < n ? given : first};
      const int bad[] = {0, 2, 1, 2, 1, given < n ? 2 : 1};
      EXPECT_EQ(part.bad, bad[kind]);
      EXPECT_EQ(part.bad_parameter, parameter[kind]);
    }
  }
}

TEST_P(DeviceStepTest, PartsAreCombined) {
  for (const int count : {1, 2, 3, 7}) {
    for (int kind = 0; kind < 7; ++kind) {
      for (const bool compare : {true, false}) {
        std::vector<StepPart> parts(static_cast<std::size_t>(count));
        for (std::size_t k = 0; k < parts.size(); ++k) {
          const auto squares = squares_of(k + 100);
          std::copy(squares.begin(), squares.end(), parts[k].squares);
          parts[k].digest = 77;
          parts[k].valid = 1;
        }
        StepPart& last = parts.back();
        if (kind == 1) last.digest = 78;
        if (kind == 2) last.valid = 0;
        if (kind == 3) last.refusal = 4;
        if (kind >= 4) last.bad = 1, last.bad_rank = 9, last.bad_slice = 8, last.bad_parameter = 7;
        if (kind >= 5) parts[0].bad = kind - 4, parts[0].bad_rank = 1, parts[0].bad_parameter = 2;
        const auto total_on = [&](Device& d) {
          Memory memory(d);
          StepPart* out = memory.put(std::vector{StepPart{}});
          d.combine_parts(
              {.parts = memory.put(parts), .count = count, .compare = compare, .out = out});
          return memory.get(out);
        };
        const StepPart total = total_on(device());
        EXPECT_TRUE(same(total, total_on(cpu()))) << count << " " << kind << " " << compare;
        ExactSum sum;
        for (const StepPart& part : parts) sum.add(ExactSum(part.squares));
        EXPECT_EQ(ExactSum(total.squares).value(), sum.value());
      }
    }
  }
}

TEST_P(DeviceStepTest, StepsAreDecided) {
  const std::vector<HyperParameters> groups = {
      {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .decoupled = 1},
      {.lr = 3e-4, .beta1 = 0, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1},
      {.lr = 2e-3, .beta1 = 0.95, .beta2 = 0, .eps = 0, .weight_decay = 0.1, .decoupled = 1}};
  for (const int n : kCounts) {
    for (int kind = 0; kind < 5; ++kind) {
      StepPart total;
      const auto squares = squares_of(std::uint64_t(n));
      std::copy(squares.begin(), squares.end(), total.squares);
      total.valid = 1;
      if (kind == 1) total.bad = 2, total.bad_rank = 1, total.bad_parameter = n - 1;
      if (kind == 2) total.refusal = 3;
      if (kind == 3) total.squares[ExactLimbs::kLimbs - 1] = std::int64_t{1} << 40;  // too large
      if (kind == 4) total.squares[ExactLimbs::kLimbs] = 1;                          // infinite
      std::vector<ParameterStep> steps(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < steps.size(); ++i) {
        steps[i].step = std::int64_t(i) * i;
        steps[i].guard_c = i % 3 == 0 ? 0 : 1 + 0.01 * double(i);
        steps[i].group = std::int32_t(i % 3);
        steps[i].used = i % 5 != 4;
        steps[i].guarded = i % 2;
      }
      for (const double max_norm : {0.0, 0.5}) {
        const auto decided_on = [&](Device& d) {
          Memory memory(d);
          ParameterStep* all = memory.put(steps);
          StepState* state = memory.put(std::vector{StepState{.applied = 5, .skipped = 1}});
          d.decide({.total = memory.put(std::vector{total}),
                    .max_norm = max_norm,
                    .groups = memory.put(groups),
                    .parameters = n,
                    .steps = all,
                    .state = state});
          return std::pair(memory.get(all, steps.size()), memory.get(state));
        };
        const auto [got, state] = decided_on(device());
        const auto [expected, expected_state] = decided_on(cpu());
        SCOPED_TRACE(testing::Message() << n << " parameters, kind " << kind);
        EXPECT_TRUE(same(state, expected_state));
        const bool applied = kind == 0 || (kind == 3 && max_norm > 0);
        EXPECT_EQ(state.applied, applied ? 6u : 5u);
        EXPECT_EQ(state.skipped, applied ? 1u : 2u);
        EXPECT_EQ(state.before, 5u);
        for (std::size_t i = 0; i < steps.size(); ++i) {
          const bool moves = applied && steps[i].used != 0;
          ASSERT_EQ(got[i].step, steps[i].step + moves) << i;
          ASSERT_EQ(bits(got[i].guard_c), bits(expected[i].guard_c)) << i;
          ASSERT_EQ(std::memcmp(&got[i].scalars, &expected[i].scalars, sizeof(AdamScalars)), 0)
              << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8
