// The engine under mpirun: a sample of the matrix, and what must not depend on the backend.
#include <span>

#include "tests/engine_matrix.h"
#include "tests/mpi_world.h"

namespace zerofp8::test {
namespace {

TEST(EngineMpi, SampleOfTheMatrixEqualsFloat64) {
  const Recipe recipes[] = {
      {.model = "fp32", .stage = 0, .level = "O0", .micro_batches = 2},
      {.model = "bf16", .stage = 1, .level = "O0", .micro_batches = 3, .clipping = 0.5},
      {.model = "fp16",
       .stage = 2,
       .level = "O1",
       .micro_batches = 2,
       .fp16 = R"("loss_scale": 64)"},
      {.model = "bf16", .stage = 2, .level = "O2", .error_feedback = true, .micro_batches = 2},
      {.model = "bf16", .stage = 1, .level = "O3", .micro_batches = 2},
      {.model = "fp32",
       .stage = 1,
       .level = "O2",
       .accumulation = "fp8_e5m2",
       .wire = "bf16",
       .micro_batches = 2,
       .zero = R"("overlap_comm": true, "reduce_bucket_size": 200)"},
      {.model = "bf16",
       .stage = 0,
       .level = "O3",
       .accumulation = "bf16",
       .wire = "fp16",
       .micro_batches = 2,
       .zerofp8 = R"("fp32_moments_below": 0)"},
  };
  for (const Recipe& recipe : recipes) {
    SCOPED_TRACE(recipe.name());
    check_cell(recipe, world());
  }
}

// Nodes of two; of three where that is all ranks.
std::string two_levels(const char* in_node) {
  const int ranks = world().size();
  return fmt::format(
      R"("two_level_reduce_scatter": {{"ranks_per_node": {}, "in_node_dtype": "{}"}})",
      ranks % 2 == 0 ? 2 : ranks, in_node);
}

TEST(EngineMpi, TwoLevelSampleOfTheMatrixEqualsFloat64) {
  const Recipe recipes[] = {
      {.model = "bf16",
       .stage = 0,
       .level = "O1",
       .micro_batches = 2,
       .zerofp8 = two_levels("fp32")},
      {.model = "fp32",
       .stage = 1,
       .level = "O0",
       .micro_batches = 2,
       .zerofp8 = two_levels("fp32")},
      {.model = "bf16",
       .stage = 1,
       .level = "O3",
       .micro_batches = 2,
       .zerofp8 = two_levels("bf16")},
      {.model = "bf16",
       .stage = 2,
       .level = "O2",
       .error_feedback = true,
       .micro_batches = 2,
       .zero = R"("overlap_comm": true, "reduce_bucket_size": 200)",
       .zerofp8 = two_levels("fp32")},
  };
  for (const Recipe& recipe : recipes) {
    SCOPED_TRACE(recipe.name() + recipe.zerofp8);
    check_cell(recipe, world());
  }
}

// Ranks as processes and ranks as threads give the same weights.
TEST(EngineMpi, SameBitsAsThreadRanks) {
  const int ranks = world().size();
  for (const auto& [level, two_level] : {std::pair{"O0", false},
                                         {"O1", false},
                                         {"O2", false},
                                         {"O3", false},
                                         {"O0", true},
                                         {"O3", true}}) {
    const std::string moments = R"("fp32_moments_below": 0)";
    const Recipe recipe{.model = "bf16",
                        .stage = 2,
                        .level = level,
                        .micro_batches = 2,
                        .zerofp8 = two_level ? moments + ", " + two_levels("bf16") : moments};
    const auto train = [&](Communicator& comm) {
      Model model(odd_shapes(), recipe);
      Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
      for (int t = 0; t < 5; ++t) made_up_step(engine, t, comm.rank());
      return snapshot(engine, model);
    };
    const Snapshot mine = train(world());
    Snapshot threads;
    run_ranks(ranks, [&](Communicator& comm) {
      const Snapshot s = train(comm);
      if (comm.rank() == 0) threads = s;
    });
    EXPECT_EQ(mine, threads) << recipe.name() << recipe.zerofp8;
  }
}

TEST(EngineMpi, NonFiniteGradientOfAnyRankIsSkippedByAll) {
  for (int bad = 0; bad < world().size(); ++bad) {
    const Recipe recipe{.model = "bf16", .stage = 2, .level = "O2"};
    Model model(odd_shapes(), recipe);
    Engine engine(recipe.settings(world().size()), model.parameters(), {.data = &world()}, quiet());
    std::vector<double> g(model.numel(5), 0.5);
    if (world().rank() == bad) g[4000] = INFINITY;
    add(engine, 5, g);
    const StepReport report = engine.step();
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.bad_parameter, "large");
    EXPECT_EQ(report.bad_rank, bad);
    EXPECT_EQ(report.skipped_steps, 1);
  }
}

TEST(EngineMpi, SaveAndLoad) {
  const Recipe recipe{.model = "bf16", .stage = 2, .level = "O3"};
  TemporaryFolder mine("mpi");
  std::vector<char> path(256);
  std::copy_n(mine.path().begin(), mine.path().size(), path.begin());
  world().broadcast(std::as_writable_bytes(std::span(path)), 0, {})->wait();
  Model model(odd_shapes(), recipe);
  Engine engine(recipe.settings(world().size()), model.parameters(), {.data = &world()}, quiet());
  for (int t = 0; t < 3; ++t) made_up_step(engine, t, world().rank());
  engine.save(path.data());
  const Snapshot saved = snapshot(engine, model);
  for (int t = 3; t < 5; ++t) made_up_step(engine, t, world().rank());
  EXPECT_NE(saved, snapshot(engine, model));
  engine.load(path.data());
  EXPECT_EQ(saved, snapshot(engine, model));
}

}  // namespace
}  // namespace zerofp8::test
