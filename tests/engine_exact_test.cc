// Where bits are promised: O0 is a plain float loop; states do not depend on buckets, overlap,
// threads, instruction set, timing, number of ranks or stage.
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "tests/engine_fixture.h"
#include "zerofp8/ops.h"

namespace zerofp8::test {
namespace {

// One element of the documented AdamW step in FP32, written again: every line is one rounding.
struct FloatAdam {
  float p = 0, m = 0, v = 0;
  void step(float g, const ref::AdamHyper& h, int t) {
    const auto step_size = static_cast<float>(h.lr / (1 - std::pow(h.beta1, t)));
    const auto inverse_root = static_cast<float>(1 / std::sqrt(1 - std::pow(h.beta2, t)));
    const volatile float fresh_m = static_cast<float>(1 - h.beta1) * g;
    m = std::fma(static_cast<float>(h.beta1), m, fresh_m);
    const volatile float part = static_cast<float>(1 - h.beta2) * g;
    const volatile float fresh_v = part * g;
    v = std::fma(static_cast<float>(h.beta2), v, fresh_v);
    const float denominator = std::fma(std::sqrt(v), inverse_root, static_cast<float>(h.eps));
    const volatile float decayed = p * static_cast<float>(1 - h.lr * h.weight_decay);
    p = std::fma(-step_size, m / denominator, decayed);
  }
};

// The bf16 weight is the master rounded half away from zero.
float bf16_half_away(float master) {
  std::uint32_t u;
  std::memcpy(&u, &master, 4);
  u = (u + 0x8000u) & 0xFFFF0000u;
  float w;
  std::memcpy(&w, &u, 4);
  return w;
}

// Gradients with all 24 bits, so that the order of additions matters.
float rough_gradient(int step, int rank, int micro_batch, std::size_t i, std::size_t j) {
  const double g = made_up_gradient(step, rank, micro_batch, i, j);
  return static_cast<float>(g * (1 + 1e-3 * double((j + std::size_t(step)) % 97)));
}

std::vector<ParameterSpec> small_shapes() {
  return {{.name = "one", .shape = {1}},
          {.name = "row", .shape = {1, 17}},
          {.name = "over", .shape = {3, 43}},
          {.name = "square", .shape = {20, 20}}};
}

class PlainFloatLoop : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(PlainFloatLoop, O0HasItsBitsFor1000Steps) {
  const auto& [model_dtype, ranks] = GetParam();
  const Recipe recipe{.model = model_dtype,
                      .stage = ranks == 1 ? 0 : 1,
                      .level = "O0",
                      .micro_batches = 2,
                      .weight_decay = 0.1};
  const ref::AdamHyper hyper{.weight_decay = 0.1};
  run_ranks(ranks, [&, ranks = ranks](Communicator& comm) {
    Model model(small_shapes(), recipe);
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
    std::vector<std::vector<FloatAdam>> plain(model.count());
    for (std::size_t i = 0; i < model.count(); ++i) {
      for (std::size_t j = 0; j < model.numel(i); ++j) {
        plain[i].push_back({.p = static_cast<float>(model.at(i, j))});
      }
    }
    const auto factor = static_cast<float>(1.0 / (ranks * 2));
    for (int t = 1; t <= 1000; ++t) {
      for (int k = 0; k < 2; ++k) {
        for (std::size_t i = 0; i < model.count(); ++i) {
          std::vector<float> g(model.numel(i));
          for (std::size_t j = 0; j < g.size(); ++j) {
            g[j] = rough_gradient(t, comm.rank(), k, i, j);
          }
          add_floats(engine, int(i), g);
        }
        engine.end_micro_batch();
      }
      engine.step();
      if (comm.rank() != ranks - 1) continue;
      for (std::size_t i = 0; i < model.count(); ++i) {
        for (std::size_t j = 0; j < model.numel(i); ++j) {
          volatile float sum = 0;
          for (int r = 0; r < ranks; ++r) {
            const volatile float own =
                rough_gradient(t, r, 0, i, j) + rough_gradient(t, r, 1, i, j);
            sum = r == 0 ? own : sum + own;
          }
          plain[i][j].step(sum * factor, hyper, t);
        }
      }
    }
    const Snapshot s = snapshot(engine, model);
    for (std::size_t i = 0; comm.rank() == ranks - 1 && i < model.count(); ++i) {
      for (std::size_t j = 0; j < model.numel(i); ++j) {
        ASSERT_EQ(s.states[3 * i][j], plain[i][j].p) << "master " << i << " " << j;
        ASSERT_EQ(s.states[3 * i + 1][j], plain[i][j].m) << "exp_avg " << i << " " << j;
        ASSERT_EQ(s.states[3 * i + 2][j], plain[i][j].v) << "exp_avg_sq " << i << " " << j;
        const float p = plain[i][j].p;
        ASSERT_EQ(model.at(i, j), double(model_dtype == "bf16" ? bf16_half_away(p) : p));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    ModelsAndRanks, PlainFloatLoop,
    testing::Combine(testing::Values("fp32", "bf16"), testing::Values(1, 2, 3)), [](const auto& p) {
      return fmt::format("{}_on_{}", std::get<0>(p.param), std::get<1>(p.param));
    });

Snapshot train(const Recipe& recipe, int ranks, int steps,
               const std::function<void(Engine&, Communicator&, int)>& one_step,
               std::vector<ParameterSpec> specs = small_shapes(), int threads = 1) {
  Snapshot result;
  run_ranks(ranks, [&](Communicator& comm) {
    Model model(specs, recipe);
    EngineOptions options = quiet();
    options.threads = threads;
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, options);
    for (int t = 0; t < steps; ++t) one_step(engine, comm, t);
    const Snapshot s = snapshot(engine, model);
    if (comm.rank() == 0) result = s;
  });
  return result;
}

void usual_step(Engine& engine, Communicator& comm, int t) { made_up_step(engine, t, comm.rank()); }

// Case 44. Some runs have a rank that is late, by turns before its gradients and before its step.
TEST(EngineExact, Case44_BucketSizesOverlapAndTimingDoNotChangeBits) {
  for (const int ranks : {2, 3, 4}) {
    for (const int stage : {1, 2}) {
      std::optional<Snapshot> first;
      for (const char* bucket : {"1", "7", "4096", "1000000000"}) {
        for (const bool overlap : {false, true}) {
          for (int run = 0; run < 5; ++run) {
            const Recipe recipe{
                .model = "bf16",
                .stage = stage,
                .level = stage == 1 ? "O3" : "O2",
                .micro_batches = 2,
                .zero =
                    fmt::format(R"("reduce_bucket_size": {}, "overlap_comm": {})", bucket, overlap),
                .zerofp8 = R"("fp32_moments_below": 0)"};
            const Snapshot s =
                train(recipe, ranks, 100 / 4, [&](Engine& e, Communicator& c, int t) {
                  if (run > 2 && c.rank() == (t + run) % ranks) {
                    std::this_thread::sleep_for(std::chrono::microseconds(300));
                  }
                  usual_step(e, c, t);
                });
            if (!first) first = s;
            ASSERT_EQ(s, *first) << ranks << " ranks, stage " << stage << ", bucket " << bucket
                                 << ", overlap " << overlap << ", run " << run;
          }
        }
      }
    }
  }
}

TEST(EngineExact, Case44_HundredStepsWithOverlap) {
  for (const int ranks : {2, 3, 4}) {
    std::vector<Snapshot> all;
    for (const char* zero : {R"("reduce_bucket_size": 7, "overlap_comm": true)",
                             R"("reduce_bucket_size": 4096, "overlap_comm": false)"}) {
      const Recipe recipe{
          .stage = 2, .level = "O2", .zero = zero, .zerofp8 = R"("fp32_moments_below": 0)"};
      all.push_back(train(recipe, ranks, 100, usual_step));
    }
    EXPECT_EQ(all[0], all[1]) << ranks;
  }
}

// More than 16 micro-batches: the accumulators round stochastically.
TEST(EngineExact, Case44_StochasticAccumulatorsDoNotDependOnBucketsOrOverlap) {
  for (const int stage : {1, 2}) {
    for (const bool feedback : {false, true}) {
      std::optional<Snapshot> first;
      for (const char* zero : {R"("reduce_bucket_size": 1, "overlap_comm": true)",
                               R"("reduce_bucket_size": 300, "overlap_comm": false)",
                               R"("reduce_bucket_size": 100000, "overlap_comm": true)"}) {
        const Recipe recipe{.stage = stage,
                            .level = "O2",
                            .error_feedback = feedback,
                            .micro_batches = 20,
                            .zero = zero};
        const Snapshot s = train(recipe, 3, 4, usual_step);
        if (!first) first = s;
        EXPECT_EQ(s, *first) << "stage " << stage << " feedback " << feedback << " " << zero;
      }
    }
  }
}

TEST(EngineExact, WeightGatherInPiecesGivesTheSameBits) {
  std::vector<Snapshot> all;
  for (const char* bucket : {"1", "300", "500000000"}) {
    const Recipe recipe{
        .model = "bf16", .stage = 1, .zero = fmt::format(R"("allgather_bucket_size": {})", bucket)};
    all.push_back(train(recipe, 3, 3, usual_step, odd_shapes()));
  }
  EXPECT_EQ(all[0], all[1]);
  EXPECT_EQ(all[0], all[2]);
}

TEST(EngineExact, ThreadsOfARankDoNotChangeBits) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const bool feedback : {false, true}) {
      if (feedback && level[1] == '0') continue;
      const Recipe recipe{.model = "bf16", .level = level, .error_feedback = feedback};
      std::vector<Snapshot> all;
      for (const int threads : {1, 2, 3}) {
        all.push_back(
            train(recipe, 1, 2, usual_step, {{.name = "w", .shape = {401, 251}}}, threads));
      }
      EXPECT_EQ(all[0], all[1]) << level;
      EXPECT_EQ(all[0], all[2]) << level;
    }
  }
}

// One block has the shape of its gradient's largest code, so that 3 equal gradients sum exactly.
double same_gradient(int step, std::size_t i, std::size_t j) {
  if (j % 128 == 0) return 448 * 0x1p-12;
  const double g = made_up_gradient(step, 0, 0, i, j);
  return std::clamp(g, -440 * 0x1p-12, 440 * 0x1p-12);
}

void same_step(Engine& engine, Communicator&, int t) {
  for (std::size_t i = 0; i < engine.parameters().size(); ++i) {
    std::vector<double> g(static_cast<std::size_t>(engine.parameters()[i].spec.numel()));
    for (std::size_t j = 0; j < g.size(); ++j) g[j] = same_gradient(t, i, j) * engine.loss_scale();
    add(engine, int(i), g);
  }
  engine.step();
}

class SameAverage : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

// Every rank contributes the same gradient, so the average is it, whatever the number of ranks.
TEST_P(SameAverage, AnyNumberOfRanksAndAnyStageGiveTheSameBits) {
  const auto& [model, level] = GetParam();
  for (const char* below : {"0", "4096"}) {
    std::optional<Snapshot> first;
    for (const int ranks : {1, 2, 3, 4}) {
      for (const int stage : {0, 1, 2}) {
        const Recipe recipe{.model = model,
                            .stage = stage,
                            .level = level,
                            .weight_decay = 0.01,
                            .fp16 = R"("loss_scale": 256)",
                            .zerofp8 = fmt::format(R"("fp32_moments_below": {})", below)};
        const Snapshot s = train(recipe, ranks, 10, same_step, odd_shapes());
        if (!first) first = s;
        ASSERT_EQ(s, *first) << ranks << " ranks, stage " << stage;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ModelsAndLevels, SameAverage,
                         testing::Combine(testing::Values("fp32", "bf16", "fp16"),
                                          testing::Values("O0", "O1", "O2", "O3")),
                         [](const auto& p) {
                           return std::get<0>(p.param) + "_" + std::get<1>(p.param);
                         });

// Different gradients on each rank, exact sums: where they are added first makes no difference.
TEST(EngineExact, StagesGiveTheSameBitsWhereTheAccumulatorIsExact) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const int ranks : {2, 4}) {
      std::optional<Snapshot> first;
      for (const int stage : {0, 1, 2}) {
        const Recipe recipe{.model = "bf16",
                            .stage = stage,
                            .level = level,
                            .accumulation = "fp32",
                            .wire = "fp32",
                            .micro_batches = 3,
                            .clipping = 0.3,
                            .zerofp8 = R"("fp32_moments_below": 0)"};
        const Snapshot s = train(recipe, ranks, 10, usual_step, odd_shapes());
        if (!first) first = s;
        EXPECT_EQ(s, *first) << level << " on " << ranks << " ranks, stage " << stage;
      }
    }
  }
}

// The table is chosen once per process, so each instruction set gets one.
std::uint64_t state_hash() {
  std::uint64_t hash = 0xCBF29CE484222325ull;
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    for (const char* model : {"fp32", "bf16", "fp16"}) {
      const Recipe recipe{.model = model,
                          .stage = 1,
                          .level = level,
                          .micro_batches = 2,
                          .fp16 = R"("loss_scale": 256)",
                          .zerofp8 = R"("fp32_moments_below": 0)"};
      const Snapshot s = train(recipe, 2, 5, usual_step, odd_shapes());
      const auto mix = [&](const void* data, std::size_t bytes) {
        for (std::size_t i = 0; i < bytes; ++i) {
          hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001B3ull;
        }
      };
      for (const auto& w : s.weights) mix(w.data(), w.size());
      for (const auto& state : s.states) mix(state.data(), state.size() * 4);
    }
  }
  return hash;
}

TEST(EngineExact, InstructionSetsGiveTheSameBits) {
  if (std::getenv("ZEROFP8_TEST_PRINT_HASH") != nullptr) {
    std::printf("hash %016llx\n", static_cast<unsigned long long>(state_hash()));
    return;
  }
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto hash_with = [&](std::string_view isa) {
    const std::string command = fmt::format(
        "ZEROFP8_ISA={} ZEROFP8_TEST_PRINT_HASH=1 timeout 120 '{}' "
        "--gtest_filter=EngineExact.InstructionSetsGiveTheSameBits",
        isa, self);
    FILE* pipe = ::popen(command.c_str(), "r");
    if (pipe == nullptr) return std::string("(cannot start)");
    std::string hash;
    std::array<char, 256> line;
    while (std::fgets(line.data(), int(line.size()), pipe) != nullptr) {
      if (std::strncmp(line.data(), "hash ", 5) == 0) hash = line.data();
    }
    return ::pclose(pipe) == 0 ? hash : std::string("(failed)");
  };
  const std::string expected = hash_with("base");
  EXPECT_EQ(expected.rfind("hash ", 0), 0u) << expected;
  for (const Ops* ops : runnable_cpu_ops()) EXPECT_EQ(hash_with(ops->name), expected) << ops->name;
}

}  // namespace
}  // namespace zerofp8::test
