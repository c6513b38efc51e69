// One parameter's weights written from outside between steps: its masters follow, others stay.
#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

std::vector<Recipe> recipes_with_masters() {
  std::vector<Recipe> list;
  for (const char* dtype : {"bf16", "fp16"}) {
    for (const char* level : {"O1", "O2", "O3"}) {
      for (const int stage : {0, 1, 2}) {
        list.push_back({.model = dtype, .stage = stage, .level = level, .lr = 0.01});
      }
    }
  }
  return list;
}

std::vector<float> masters(Engine& engine, int parameter) {
  return engine.full_state(parameter, StateKind::kMaster);
}

// The first write to a parameter: all of its masters become its weights, no other parameter's do.
TEST(OutsideWrites, FirstWriteResetsThisParameterOnly) {
  for (const Recipe& recipe : recipes_with_masters()) {
    SCOPED_TRACE(recipe.name());
    run_ranks(2, [&](Communicator& comm) {
      Model model({{.name = "a", .shape = {200}}, {.name = "b", .shape = {3, 50}}}, recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      for (int t = 0; t < 3; ++t) made_up_step(engine, t, comm.rank());
      const std::vector<float> other = masters(engine, 1);
      model.set(0, 7, 2.0);
      engine.weight_changed(0);
      EXPECT_EQ(masters(engine, 1), other);
      const std::vector<float> now = masters(engine, 0);
      for (std::size_t j = 0; j < now.size(); ++j) EXPECT_EQ(now[j], model.at(0, j)) << j;
    });
  }
}

// From the second write on only what differs from the last update is reset, to the bit.
TEST(OutsideWrites, LaterWritesResetWhatChanged) {
  for (const Recipe& recipe : recipes_with_masters()) {
    SCOPED_TRACE(recipe.name());
    run_ranks(2, [&](Communicator& comm) {
      Model model({{.name = "a", .shape = {200}}, {.name = "b", .shape = {3, 50}}}, recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      made_up_step(engine, 0, comm.rank());
      engine.weight_changed(0);
      for (int t = 1; t < 4; ++t) made_up_step(engine, t, comm.rank());
      std::vector<float> expected = masters(engine, 0);
      engine.weight_changed(0);
      EXPECT_EQ(masters(engine, 0), expected) << "nothing was written";
      for (const std::size_t j : {0, 63, 64, 150, 199}) {
        model.set(0, j, -0.75);
        expected[j] = -0.75f;
      }
      engine.weight_changed(0);
      EXPECT_EQ(masters(engine, 0), expected);
    });
  }
}

// fp16: a weight that was written near the format's limit is known to the next step's bound, so
// that the step is skipped instead of storing an infinity.
TEST(OutsideWrites, LargeFp16WeightIsSeenByTheNextStep) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    for (const int stage : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} stage {}", level, stage));
      const Recipe recipe{
          .model = "fp16", .stage = stage, .level = level, .lr = 100, .fp16 = R"("loss_scale": 1)"};
      run_ranks(2, [&](Communicator& comm) {
        Model model({{.name = "a", .shape = {200}}, {.name = "b", .shape = {3, 50}}}, recipe);
        Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
        model.set(1, 140, 65504);
        engine.weight_changed(1);
        add_constant(engine, 0, -1);
        add_constant(engine, 1, -1);  // upwards
        const StepReport report = engine.step();
        EXPECT_FALSE(report.applied);
        EXPECT_NE(report.skip_reason.find("65504"), std::string::npos) << report.skip_reason;
        EXPECT_EQ(model.at(1, 140), 65504);
      });
    }
  }
}

TEST(OutsideWrites, UnknownParameterIsNamed) {
  const auto comm = make_self_communicator();
  const Recipe recipe;
  Model model({{.name = "a", .shape = {4}}}, recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  for (const int parameter : {-1, 1}) {
    try {
      engine.weight_changed(parameter);
      ADD_FAILURE();
    } catch (const ArgumentError& e) {
      EXPECT_NE(std::string(e.what()).find(std::to_string(parameter)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
