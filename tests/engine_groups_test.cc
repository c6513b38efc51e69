// Groups other than "all data ranks": shard groups smaller than the data-parallel group, and named
// reduce groups (experts, each with its own divisor).
#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

std::vector<ParameterSpec> shapes() {
  return {
      {.name = "a", .shape = {3, 100}}, {.name = "b", .shape = {7}}, {.name = "c", .shape = {1}}};
}

Snapshot train(const Recipe& recipe, int ranks, int steps) {
  std::vector<Snapshot> all(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](Communicator& comm) {
    Model model(shapes(), recipe);
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
    for (int t = 0; t < steps; ++t) EXPECT_TRUE(made_up_step(engine, t, comm.rank()).applied);
    all[std::size_t(comm.rank())] = snapshot(engine, model);
  });
  for (const Snapshot& s : all) EXPECT_EQ(s, all[0]);
  return all[0];
}

// Exact sums: hybrid sharding has the bits of full sharding, for every level.
TEST(EngineHybrid, SameBitsAsFullShardingWhereSumsAreExact) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const int stage : {1, 2}) {
      const auto recipe = [&](int d) {
        return Recipe{
            .model = "bf16",
            .stage = stage,
            .level = level,
            .accumulation = "fp32",
            .wire = "fp32",
            .micro_batches = 2,
            .clipping = 0.5,
            .zerofp8 = fmt::format(R"("fp32_moments_below": 0, "shard_group_size": {})", d)};
      };
      const Snapshot full = train(recipe(4), 4, 5);
      EXPECT_EQ(train(recipe(2), 4, 5), full) << level << stage;
      EXPECT_EQ(train(recipe(1), 4, 5), full) << level << stage;
      EXPECT_EQ(train(recipe(3), 6, 5), train(recipe(2), 6, 5));
    }
  }
}

TEST(EngineHybrid, GradientNormAndSkips) {
  for (const char* level : {"O0", "O2"}) {
    for (const int stage : {1, 2}) {
      const Recipe recipe{.stage = stage, .level = level, .zerofp8 = R"("shard_group_size": 2)"};
      run_ranks(4, [&](Communicator& comm) {
        Model model(shapes(), recipe);
        Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
        add_constant(engine, 0, comm.rank() + 1.0);
        engine.reduce_gradients();
        // One value per block, so FP8 is exact up to FP32 rounding.
        for (const float x : engine.full_state(0, StateKind::kGradient)) EXPECT_NEAR(x, 2.5, 1e-5);
        EXPECT_NEAR(engine.step().grad_norm, 2.5 * std::sqrt(300.0), 1e-4);
        const Snapshot before = snapshot(engine, model);
        add_constant(engine, 0, comm.rank() == 3 ? NAN : 1.0);
        const StepReport report = engine.step();
        EXPECT_FALSE(report.applied);
        EXPECT_EQ(report.bad_rank, 3);
        EXPECT_EQ(snapshot(engine, model), before);
      });
    }
  }
}

TEST(EngineHybrid, SaveAndLoadAcrossShardGroupSizes) {
  const TemporaryFolder folder("hybrid");
  const auto recipe = [](int d) {
    return Recipe{.model = "bf16",
                  .stage = 1,
                  .level = "O3",
                  .zerofp8 = fmt::format(R"("fp32_moments_below": 0, "shard_group_size": {})", d)};
  };
  Snapshot saved;
  run_ranks(4, [&](Communicator& comm) {
    Model model(shapes(), recipe(2));
    Engine engine(recipe(2).settings(4), model.parameters(), {.data = &comm}, quiet());
    for (int t = 0; t < 3; ++t) made_up_step(engine, t, comm.rank());
    engine.save(folder.path());
    const Snapshot s = snapshot(engine, model);
    if (comm.rank() == 0) saved = s;
  });
  for (const int d : {1, 2, 4}) {
    run_ranks(4, [&](Communicator& comm) {
      Model model(shapes(), recipe(d), [](std::size_t, std::size_t) { return 0.0; });
      Engine engine(recipe(d).settings(4), model.parameters(), {.data = &comm}, quiet());
      engine.load(folder.path());
      EXPECT_EQ(snapshot(engine, model), saved) << d;
    });
  }
}

// Four data ranks, experts on pairs: ranks {0, 2} hold one, {1, 3} another, of other names.
struct Experts {
  explicit Experts(Communicator& world, const Recipe& recipe, double divisor = 0)
      : kind(world.rank() % 2),
        pair(world.split(kind, world.rank())),
        model({{.name = "dense", .shape = {2, 80}},
               {.name = fmt::format("expert{}", kind), .shape = {3, 50}, .reduce_group = "experts"},
               {.name = "bias", .shape = {5}}},
              recipe),
        engine(recipe.settings(world.size()), model.parameters(), groups(world, divisor), quiet()) {
  }
  Groups groups(Communicator& world, double divisor) const {
    Groups g{.data = &world};
    g.reduce["experts"] = {pair.get(), divisor};
    return g;
  }
  int kind;
  std::unique_ptr<Communicator> pair;
  Model model;
  Engine engine;
};

TEST(EngineReduceGroups, ExpertsAreAveragedOverTheirOwnRanks) {
  for (const char* level : {"O0", "O1", "O2"}) {
    for (const int stage : {0, 1, 2}) {
      for (const double divisor : {0.0, 4.0}) {
        const Recipe recipe{.stage = stage, .level = level, .micro_batches = 2};
        run_ranks(4, [&](Communicator& world) {
          Experts e(world, recipe, divisor);
          for (int k = 0; k < 2; ++k) {
            add_constant(e.engine, 0, world.rank() + 1.0);
            add_constant(e.engine, 1, (world.rank() + 1.0) * 10);
            e.engine.end_micro_batch();
          }
          e.engine.reduce_gradients();
          const double sum = e.kind == 0 ? 10 + 30 : 20 + 40;
          const double expert = sum / (divisor > 0 ? divisor : 2);
          EXPECT_NEAR(e.engine.full_state(0, StateKind::kGradient)[159], 2.5, 1e-5);
          EXPECT_NEAR(e.engine.full_state(1, StateKind::kGradient)[149], expert, 1e-4);
          const double d = divisor > 0 ? divisor : 2;
          const double squares = 160 * 2.5 * 2.5 + 150 * (40 / d * 40 / d + 60 / d * 60 / d);
          const StepReport report = e.engine.step();
          EXPECT_NEAR(report.grad_norm / std::sqrt(squares), 1, 1e-5) << level << stage;
          EXPECT_EQ(report.unused_parameters, 1);
        });
      }
    }
  }
}

// Experts keep one level, and with it their bits; what all data ranks share has two.
TEST(EngineReduceGroups, TwoLevelsLeaveExpertsAlone) {
  for (const int stage : {0, 1, 2}) {
    const auto gradients = [&](const std::string& keys) {
      const Recipe recipe{.stage = stage, .level = "O1", .zerofp8 = keys};
      std::vector<std::vector<float>> all(8);
      run_ranks(4, [&](Communicator& world) {
        Experts e(world, recipe);
        for (int i = 0; i < 3; ++i) {
          const std::size_t n = e.model.numel(std::size_t(i));
          add(e.engine, i, made_up_gradients(0, world.rank(), 0, std::size_t(i), n));
        }
        e.engine.reduce_gradients();
        for (int i = 0; i < 2; ++i) {
          auto g = e.engine.full_state(i, StateKind::kGradient);
          all[std::size_t(world.rank() * 2 + i)] = std::move(g);
        }
      });
      return all;
    };
    const auto flat = gradients(""),
               two = gradients(R"("two_level_reduce_scatter": {"ranks_per_node": 2})");
    for (std::size_t rank = 0; rank < 4; ++rank) {
      EXPECT_NE(two[2 * rank], flat[2 * rank]) << stage;
      EXPECT_EQ(two[2 * rank + 1], flat[2 * rank + 1]) << stage;
    }
  }
}

// An expert that no token of this step was sent to, and an overflow in another.
TEST(EngineReduceGroups, UnusedAndBadExperts) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.stage = stage};
    run_ranks(4, [&](Communicator& world) {
      Experts e(world, recipe);
      add_constant(e.engine, 0, 1.0);
      if (world.rank() == 3) add_constant(e.engine, 1, 2.0);
      EXPECT_TRUE(e.engine.step().applied);
      EXPECT_EQ(e.engine.step_of(1), e.kind == 1 ? 1 : 0);
      if (world.rank() == 2) add_constant(e.engine, 1, INFINITY);
      const StepReport report = e.engine.step();
      EXPECT_FALSE(report.applied);
      EXPECT_EQ(report.bad_parameter, "expert0");
      EXPECT_EQ(report.bad_rank, 2);
    });
  }
}

TEST(EngineReduceGroups, ExpertsAreSavedAndLoaded) {
  for (const int stage : {0, 1, 2}) {
    const TemporaryFolder folder("experts");
    const Recipe recipe{.model = "bf16", .stage = stage, .level = "O2"};
    run_ranks(4, [&](Communicator& world) {
      Experts e(world, recipe);
      for (int t = 0; t < 3; ++t) made_up_step(e.engine, t, world.rank());
      e.engine.save(folder.path());
      const Snapshot saved = snapshot(e.engine, e.model);
      made_up_step(e.engine, 3, world.rank());
      e.engine.load(folder.path());
      EXPECT_EQ(snapshot(e.engine, e.model), saved);
      made_up_step(e.engine, 3, world.rank());
      Experts fresh(world, recipe);
      fresh.engine.load(folder.path());
      made_up_step(fresh.engine, 3, world.rank());
      EXPECT_EQ(snapshot(fresh.engine, fresh.model), snapshot(e.engine, e.model));
    });
  }
}

}  // namespace
}  // namespace zerofp8::test
