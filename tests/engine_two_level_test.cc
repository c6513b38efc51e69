// The engine with nodes that are simulated on thread ranks: against float64 in every place, and
// what must not depend on buckets, overlap and who is bad.
#include <map>

#include "tests/engine_matrix.h"
#include "tests/engine_reduced.h"

namespace zerofp8::test {
namespace {

std::string nodes_of(int k, const std::string& in_node = "", const std::string& more = "") {
  const std::string dtype =
      in_node.empty() ? "" : fmt::format(R"(, "in_node_dtype": "{}")", in_node);
  return fmt::format(R"("two_level_reduce_scatter": {{"ranks_per_node": {}{}}}{})", k, dtype, more);
}

struct Place {
  int stage;
  bool sharded;
};
constexpr Place kPlaces[] = {{0, false}, {1, false}, {1, true}, {2, true}};

class TwoLevelCells : public testing::TestWithParam<Place> {};
INSTANTIATE_TEST_SUITE_P(Places, TwoLevelCells, testing::ValuesIn(kPlaces), [](const auto& place) {
  return fmt::format("stage{}_{}", place.param.stage, place.param.sharded ? "sharded" : "local");
});

// Levels, models, micro-batches, buckets, overlap and shard groups change along.
TEST_P(TwoLevelCells, ThreeStepsEqualFloat64) {
  int index = GetParam().stage;
  for (const auto& [ranks, k] : {std::pair{4, 2}, {4, 4}, {8, 2}, {8, 4}}) {
    for (const char* acc : {"fp32", "bf16", "fp8"}) {
      for (const char* wire : {"fp32", "bf16", "fp8"}) {
        for (const char* in_node : {"fp32", "bf16"}) {
          ++index;
          const bool hybrid = ranks == 8 && index % 3 == 0 && GetParam().stage > 0;
          Recipe recipe{
              .model = index % 2 == 0 ? "bf16" : "fp32",
              .stage = GetParam().stage,
              .level = fmt::format("O{}", index % 4),
              .accumulation = acc,
              .sharded = GetParam().sharded,
              .error_feedback = acc[2] == '8' && index % 4 < 2,
              .wire = wire,
              .micro_batches = 2 + index % 2,
              .clipping = index % 5 == 0 ? 0.5 : 0,
              .zerofp8 = nodes_of(k, in_node, hybrid ? R"(, "shard_group_size": 4)" : "")};
          if (index % 3 == 1) recipe.zero = R"("overlap_comm": true, "reduce_bucket_size": 300)";
          SCOPED_TRACE(recipe.name() + fmt::format(" {} on {} ranks", recipe.zerofp8, ranks));
          run_ranks(ranks, [&](Communicator& comm) { check_cell(recipe, comm); });
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Weights, states and wire bytes after three steps, the same on all ranks. Rank 1 has a second
// gradient of a parameter in each micro-batch.
struct Trained {
  Snapshot end;
  WireBytes wire;
};
Trained train(const Recipe& recipe, int ranks) {
  std::vector<Trained> all(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](Communicator& comm) {
    comm.set_timeout(std::chrono::seconds(60));
    Model model(odd_shapes(), recipe);
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
    Trained& mine = all[std::size_t(comm.rank())];
    for (int t = 0; t < 3; ++t) {
      for (int k = 0; k < recipe.micro_batches; ++k) {
        for (std::size_t i = model.count(); i-- > 0;) {
          const auto g = made_up_gradients(t, comm.rank(), k, i, model.numel(i));
          add(engine, int(i), g);
          if (i == 4 && comm.rank() == 1) add(engine, int(i), g);
        }
        engine.end_micro_batch();
      }
      const StepReport report = engine.step();
      EXPECT_TRUE(report.applied);
      mine.wire += report.wire;
    }
    mine.end = snapshot(engine, model);
  });
  for (const Trained& rank : all) EXPECT_EQ(rank.end, all[0].end);
  return all[0];
}

TEST_P(TwoLevelCells, BucketsAndOverlapDoNotChangeBits) {
  for (const char* in_node : {"fp32", "bf16"}) {
    std::optional<Snapshot> first;
    for (const char* bucket : {"1", "300", "500000000"}) {
      for (const bool overlap : {false, true}) {
        const Recipe recipe{
            .model = "bf16",
            .stage = GetParam().stage,
            .level = "O3",
            .sharded = GetParam().sharded,
            .micro_batches = 2,
            .zero = fmt::format(R"("reduce_bucket_size": {}, "overlap_comm": {})", bucket, overlap),
            .zerofp8 = nodes_of(2, in_node, R"(, "fp32_moments_below": 0)")};
        const Snapshot s = train(recipe, 4).end;
        if (!first) first = s;
        EXPECT_EQ(s, *first) << in_node << " bucket " << bucket << " overlap " << overlap;
      }
    }
  }
}

// k = 1 is the flat one: its bits and its bytes. k = 2 has others.
TEST_P(TwoLevelCells, OneRankPerNodeIsFlat) {
  const auto with = [&](const std::string& keys) {
    return train({.model = "bf16",
                  .stage = GetParam().stage,
                  .level = "O1",
                  .sharded = GetParam().sharded,
                  .micro_batches = 2,
                  .zerofp8 = keys},
                 4);
  };
  const Trained flat = with(""), one = with(nodes_of(1, "bf16")), two = with(nodes_of(2));
  EXPECT_EQ(one.end, flat.end);
  EXPECT_EQ(one.wire.payload, flat.wire.payload);
  EXPECT_FALSE(two.end == flat.end);
  EXPECT_LT(two.wire.of(DType::kE4m3), flat.wire.of(DType::kE4m3));
}

// One node: the sum of all ranks is rounded to the wire's format once, as if one rank had had it.
TEST_P(TwoLevelCells, OneNodeRoundsItsSumOnce) {
  for (const char* wire : {"fp32", "bf16", "fp8"}) {
    Recipe recipe{.stage = GetParam().stage, .sharded = GetParam().sharded, .wire = wire};
    const std::vector<ParameterSpec> specs = {{.name = "w", .shape = {5, 200}}};
    std::vector<double> sum(1000);
    for (int rank = 0; rank < 4; ++rank) {
      const auto g = made_up_gradients(0, rank, 0, 0, sum.size());  // their sums are exact
      for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += g[j];
    }
    std::vector<float> alone = reduced(
        recipe, 1, [&](Engine& engine, int) { add(engine, 0, sum); }, specs);
    for (float& x : alone) x /= 4;
    recipe.zerofp8 = nodes_of(4);
    const auto found = reduced(
        recipe, 4,
        [&](Engine& engine, int rank) {
          add(engine, 0, made_up_gradients(0, rank, 0, 0, sum.size()));
        },
        specs);
    // At stage 2 one rank alone rounds in its wire, too.
    EXPECT_EQ(found, alone) << wire;
  }
}

TEST_P(TwoLevelCells, NonFiniteGradientsAndSumsAreSkippedByAll) {
  for (const char* in_node : {"fp32", "bf16"}) {
    for (const char* wire : {"fp32", "fp16", "fp8"}) {
      const Recipe recipe{.model = "bf16",
                          .stage = GetParam().stage,
                          .accumulation = "fp32",
                          .sharded = GetParam().sharded,
                          .wire = wire,
                          .zerofp8 = nodes_of(2, in_node)};
      run_ranks(4, [&](Communicator& comm) {
        Model model(odd_shapes(), recipe);
        Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
        const Snapshot before = snapshot(engine, model);
        const auto expect_skip = [&](const std::string& what) {
          const StepReport report = engine.step();
          EXPECT_FALSE(report.applied) << what;
          EXPECT_EQ(report.bad_parameter, "large") << what;
          EXPECT_EQ(snapshot(engine, model), before) << what;
          return report.bad_rank;
        };
        for (int bad = 0; bad < 4; ++bad) {
          std::vector<double> g(model.numel(5), 0.5);
          if (comm.rank() == bad) g[4000] = NAN;
          add(engine, 5, g);
          EXPECT_EQ(expect_skip("nan"), bad);
        }
        // No rank's own gradient overflows, the sum of the second node does.
        const double big = std::string(wire) == "fp16" ? 40000 : 2e38;
        add_constant(engine, 5, comm.rank() < 2 ? 0.0 : big);
        expect_skip("overflow");
        add_constant(engine, 5, 1.0);
        EXPECT_TRUE(engine.step().applied);
      });
    }
  }
}

// Nothing of the state depends on how gradients were sent.
TEST(EngineTwoLevel, LoadsOnOtherRanksAndOneLevel) {
  const TemporaryFolder folder("two-level");
  const auto recipe = [](const std::string& keys) {
    return Recipe{.model = "bf16",
                  .stage = 2,
                  .level = "O3",
                  .zerofp8 = R"("fp32_moments_below": 0)" + (keys.empty() ? "" : ", " + keys)};
  };
  Snapshot saved, next;
  run_ranks(4, [&](Communicator& comm) {
    const Recipe two = recipe(nodes_of(2));
    Model model(odd_shapes(), two);
    Engine engine(two.settings(4), model.parameters(), {.data = &comm}, quiet());
    for (int t = 0; t < 3; ++t) made_up_step(engine, t, comm.rank());
    engine.save(folder.path());
    const Snapshot s = snapshot(engine, model);
    made_up_step(engine, 3, comm.rank());
    const Snapshot after = snapshot(engine, model);
    if (comm.rank() == 0) saved = s, next = after;
  });
  for (const auto& [ranks, k] : {std::pair{4, 2}, {4, 1}, {2, 1}, {2, 2}, {8, 4}, {1, 1}}) {
    run_ranks(ranks, [&](Communicator& comm) {
      const Recipe other = recipe(k == 1 ? "" : nodes_of(k));
      Model model(odd_shapes(), other, [](std::size_t, std::size_t) { return 0.0; });
      Engine engine(other.settings(ranks), model.parameters(), {.data = &comm}, quiet());
      engine.load(folder.path());
      EXPECT_EQ(snapshot(engine, model), saved) << ranks << " by " << k;
      made_up_step(engine, 3, comm.rank());
      EXPECT_EQ(snapshot(engine, model) == next, ranks == 4 && k == 2) << ranks << " by " << k;
    });
  }
}

// Two stages of four data ranks: both copies stay equal, and are summed over the stages.
TEST(EngineTwoLevel, TiedParametersStayEqual) {
  for (const Place& place : kPlaces) {
    const Recipe recipe{.model = "bf16",
                        .stage = place.stage,
                        .level = "O2",
                        .sharded = place.sharded,
                        .zerofp8 = nodes_of(2, "bf16")};
    std::vector<std::vector<std::byte>> copies(8);
    run_ranks(8, [&](Communicator& world) {
      const int stage = world.rank() / 4;
      const auto data = world.split(stage, world.rank());
      const auto stages = world.split(2 + world.rank() % 4, world.rank());
      std::vector<ParameterSpec> specs = {
          {.name = "embedding", .shape = {40, 30}, .tied = "embedding"},
          {.name = fmt::format("own{}", stage), .shape = {300 + 100 * stage}}};
      Model model(specs, recipe, [](std::size_t, std::size_t j) { return std::sin(double(j)); });
      Groups groups{.data = data.get(), .model = stages.get()};
      groups.tied["embedding"] = stages.get();
      Engine engine(recipe.settings(4, 2), model.parameters(), groups, quiet());
      for (int t = 0; t < 3; ++t) {
        EXPECT_TRUE(made_up_step(engine, t, world.rank()).applied);
      }
      add_constant(engine, 0, stage == 0 ? 0.25 : 0.75);
      engine.reduce_gradients();
      EXPECT_NEAR(engine.full_state(0, StateKind::kGradient)[7], 1.0, 1e-5);
      copies[std::size_t(world.rank())] = model.bytes()[0];
    });
    for (const auto& copy : copies) EXPECT_EQ(copy, copies[0]);
  }
}

// Buffers of both exchanges come from the pool.
TEST(EngineTwoLevel, NothingIsAllocatedAfterTheFirstSteps) {
  for (const Place& place : kPlaces) {
    for (const bool overlap : {false, true}) {
      const Recipe recipe{
          .model = "bf16",
          .stage = place.stage,
          .level = "O2",
          .sharded = place.sharded,
          .micro_batches = 2,
          .zero = fmt::format(R"("reduce_bucket_size": 300, "overlap_comm": {})", overlap),
          .zerofp8 = nodes_of(2)};
      run_ranks(4, [&](Communicator& comm) {
        Model model(odd_shapes(), recipe);
        Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
        for (int t = 0; t < 3; ++t) made_up_step(engine, t, comm.rank());
        const std::uint64_t allocations = engine.allocator().allocation_count();
        for (int t = 3; t < 30; ++t) made_up_step(engine, t, comm.rank());
        EXPECT_EQ(engine.allocator().allocation_count(), allocations);
      });
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
