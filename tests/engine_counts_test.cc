// Ranks with different numbers of micro-batches are told of; weights that share memory are an error
// on all ranks.
#include <array>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

const std::vector<ParameterSpec> kShapes = {{.name = "a", .shape = {3, 100}},
                                            {.name = "b", .shape = {7}}};

// Said on data rank 0, once; the average is over what there should have been.
TEST(EngineCounts, MicroBatchesThatDifferAreSaid) {
  for (const int stage : {0, 1}) {
    for (const char* level : {"O0", "O2"}) {
      for (const int ranks : {2, 4}) {
        SCOPED_TRACE(fmt::format("stage {} {} on {}", stage, level, ranks));
        const Recipe recipe{.model = "bf16", .stage = stage, .level = level, .micro_batches = 4};
        std::vector<std::vector<std::string>> said(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](Communicator& comm) {
          Model model(kShapes, recipe);
          EngineOptions options = quiet();
          options.log = [&](const std::string& line) {
            said[static_cast<std::size_t>(comm.rank())].push_back(line);
          };
          Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, options);
          for (int t = 0; t < 2; ++t) {
            for (int k = 0; k < (comm.rank() == 1 ? 3 : 4); ++k) {
              add_constant(engine, 0, 1.0);
              engine.end_micro_batch();
            }
            engine.reduce_gradients();
            const float average = 1.0f - 0.25f / static_cast<float>(ranks);
            EXPECT_NEAR(engine.full_state(0, StateKind::kGradient)[42], average, 0.07);
            EXPECT_TRUE(engine.step().applied);
          }
        });
        ASSERT_EQ(said[0].size(), 1u);
        EXPECT_NE(said[0][0].find("rank 1 ended its step after micro-batch 3 of 4"),
                  std::string::npos)
            << said[0][0];
        for (std::size_t r = 1; r < said.size(); ++r) EXPECT_TRUE(said[r].empty());
      }
    }
  }
}

TEST(EngineCounts, RanksWithoutAnyMicroBatchAreAllowed) {
  const Recipe recipe{.stage = 1, .micro_batches = 2};
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, recipe);
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    for (int k = 0; k < 2 && comm.rank() == 0; ++k) {
      add_constant(engine, 0, 1.0);
      engine.end_micro_batch();
    }
    engine.reduce_gradients();
    EXPECT_EQ(engine.full_state(0, StateKind::kGradient)[42], 0.5f);
    EXPECT_TRUE(engine.step().applied);
  });
}

TEST(EngineOverlap, IsRefusedWithBothNames) {
  const Recipe recipe{.stage = 1};
  struct Place {
    std::size_t first, second;  // of "a", 300 elements, and "b", 7 elements
    bool overlaps;
  };
  for (const Place& place : {Place{0, 0, true}, Place{0, 299, true}, Place{10, 4, true},
                             Place{0, 100, true}, Place{0, 300, false}, Place{7, 0, false}}) {
    for (const bool on_one : {false, true}) {
      std::array<std::string, 2> texts;
      run_ranks(2, [&](Communicator& comm) {
        std::vector<float> own(1000);
        const bool here = !on_one || comm.rank() == 1;
        std::vector<Parameter> list = {{kShapes[0], own.data() + place.first},
                                       {kShapes[1], own.data() + (here ? place.second : 900)}};
        EngineOptions options = quiet();
        options.device = nullptr;
        try {
          Engine engine(recipe.settings(2), list, {.data = &comm}, options);
        } catch (const ArgumentError& e) {
          texts[static_cast<std::size_t>(comm.rank())] = e.what();
        }
      });
      EXPECT_EQ(texts[0], texts[1]);
      EXPECT_EQ(!texts[0].empty(), place.overlaps) << texts[0];
      if (!place.overlaps) continue;
      EXPECT_NE(texts[0].find("\"a\""), std::string::npos);
      EXPECT_NE(texts[0].find("\"b\""), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
