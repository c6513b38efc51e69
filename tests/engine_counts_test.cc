// Ranks with different numbers of micro-batches, and weights that share memory: an error on all
// ranks, with nothing changed.
#include <array>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

const std::vector<ParameterSpec> kShapes = {{.name = "a", .shape = {3, 100}},
                                            {.name = "b", .shape = {7}}};

// What is missing can be added after it, and then the step is the one of four micro-batches.
TEST(EngineCounts, MicroBatchesThatDifferAreAnErrorOnAllRanks) {
  for (const int stage : {0, 1}) {
    for (const char* level : {"O0", "O2"}) {
      for (const int ranks : {2, 4}) {
        SCOPED_TRACE(fmt::format("stage {} {} on {}", stage, level, ranks));
        const Recipe recipe{.model = "bf16", .stage = stage, .level = level, .micro_batches = 4};
        std::vector<std::string> texts(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](Communicator& comm) {
          Model model(kShapes, recipe), whole(kShapes, recipe);
          Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
          const auto micro_batch = [](Engine& e) {
            add_constant(e, 0, 1.0);
            e.end_micro_batch();
          };
          const auto weights = model.bytes();
          for (int k = 0; k < (comm.rank() == 1 ? 3 : 4); ++k) micro_batch(engine);
          try {
            engine.step();
            ADD_FAILURE() << "rank " << comm.rank() << " went on";
          } catch (const ArgumentError& e) {
            texts[static_cast<std::size_t>(comm.rank())] = e.what();
          }
          EXPECT_EQ(model.bytes(), weights);
          if (comm.rank() == 1) micro_batch(engine);
          engine.reduce_gradients();
          EXPECT_EQ(engine.full_state(0, StateKind::kGradient)[42], 1.0f);
          EXPECT_TRUE(engine.step().applied);
          EXPECT_NE(model.bytes(), weights);
        });
        for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
        EXPECT_NE(texts[0].find("rank 1 ended its step after micro-batch 3 of 4"),
                  std::string::npos)
            << texts[0];
      }
    }
  }
}

TEST(EngineCounts, OtherStagesAreTold) {
  const Recipe recipe{.stage = 1, .micro_batches = 2};
  std::vector<std::string> texts(4);
  run_ranks(4, [&](Communicator& comm) {
    const int rank = comm.rank();
    const auto data = comm.split(rank / 2, rank);
    const auto stages = comm.split(rank % 2, rank);
    Model model(kShapes, recipe);
    Engine engine(recipe.settings(2, 2), model.parameters(),
                  {.data = data.get(), .model = stages.get()}, quiet());
    for (int k = 0; k < (rank == 3 ? 1 : 2); ++k) {
      add_constant(engine, 0, 1.0);
      engine.end_micro_batch();
    }
    try {
      engine.step();
    } catch (const ArgumentError& e) {
      texts[static_cast<std::size_t>(rank)] = e.what();
    }
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(text, texts[0]);
    EXPECT_NE(text.find("micro-batch 1 of 2"), std::string::npos) << text;
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
