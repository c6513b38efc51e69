// Cases 38 and 39: a resumed run has the bits of an unbroken one, on any number of ranks and stage.
#include <sys/resource.h>

#include <filesystem>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

double zero(std::size_t, std::size_t) { return 0; }

class Resume : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

// 10 + 10 steps with save and load are 20 steps, with each stage, and with stochastic accumulators.
TEST_P(Resume, TenAndTenStepsAreTwenty) {
  const auto& [model_dtype, level] = GetParam();
  for (const int stage : {0, 1, 2}) {
    for (const int micro_batches : {1, 17}) {
      const TemporaryFolder folder("resume");
      const Recipe recipe{.model = model_dtype,
                          .stage = stage,
                          .level = level,
                          .micro_batches = micro_batches,
                          .weight_decay = 0.01,
                          .clipping = 0.5,
                          .fp16 = R"("loss_scale_window": 7, "initial_scale_power": 4)",
                          .zerofp8 = R"("fp32_moments_below": 200)"};
      run_ranks(2, [&](Communicator& comm) {
        const Settings s = recipe.settings(2);
        Model model(odd_shapes(), recipe);
        Engine engine(s, model.parameters(), {.data = &comm}, quiet());
        for (int t = 0; t < 10; ++t) {
          engine.group(0).lr = 1e-3 * (t + 1);
          made_up_step(engine, t, comm.rank());
        }
        engine.save(folder.path());
        Model other(odd_shapes(), recipe, zero);
        Engine resumed(s, other.parameters(), {.data = &comm}, quiet());
        resumed.load(folder.path());
        EXPECT_EQ(snapshot(resumed, other), snapshot(engine, model));
        EXPECT_EQ(resumed.group(0).lr, 1e-2);
        EXPECT_EQ(resumed.loss_scale(), engine.loss_scale());
        EXPECT_EQ(resumed.applied_steps(), engine.applied_steps());
        EXPECT_EQ(resumed.skipped_steps(), engine.skipped_steps());
        for (int t = 10; t < 20; ++t) {
          made_up_step(engine, t, comm.rank());
          made_up_step(resumed, t, comm.rank());
        }
        EXPECT_EQ(snapshot(resumed, other), snapshot(engine, model)) << stage << micro_batches;
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ModelsAndLevels, Resume,
                         testing::Combine(testing::Values("fp32", "bf16", "fp16"),
                                          testing::Values("O0", "O1", "O2", "O3")),
                         [](const auto& p) {
                           return std::get<0>(p.param) + "_" + std::get<1>(p.param);
                         });

// The same gradient on every rank with exact sums, so that runs on different numbers of ranks have
// the same average (see engine_exact_test.cc).
void same_step(Engine& engine, int t) {
  for (std::size_t i = 0; i < engine.parameters().size(); ++i) {
    std::vector<double> g(static_cast<std::size_t>(engine.parameters()[i].spec.numel()));
    for (std::size_t j = 0; j < g.size(); ++j) {
      g[j] = j % 128 == 0 ? 448 * 0x1p-12
                          : std::clamp(made_up_gradient(t, 0, 0, i, j), -0x1.bp-4, 0x1.bp-4);
      g[j] *= engine.loss_scale();
    }
    add(engine, int(i), g);
  }
  engine.step();
}

std::vector<ParameterSpec> two_groups() {
  return {{.name = "w", .shape = {17}},
          {.name = "m", .shape = {1, 17}, .group = 1},
          {.name = "large", .shape = {7, 100}, .group = 1},
          {.name = "scalar", .shape = {}}};
}

EngineOptions two_group_options() {
  EngineOptions options = quiet();
  options.groups = {{.lr = 0.01}, {.lr = 0.02, .beta1 = 0.8, .weight_decay = 0.1}};
  return options;
}

// Case 38: saved on one number of ranks and stage, loaded on every other.
TEST(Checkpoint, Case38_AnyNumberOfRanksAndAnyStage) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const char* model_dtype : {"fp32", "bf16", "fp16"}) {
      const auto recipe = [&](int stage) {
        return Recipe{.model = model_dtype,
                      .stage = stage,
                      .level = level,
                      .fp16 = R"("loss_scale": 64)",
                      .zerofp8 = R"("fp32_moments_below": 0)"};
      };
      struct Place {
        int ranks, stage;
      };
      for (const Place from : {Place{4, 1}, {1, 0}, {3, 2}, {2, 0}}) {
        const TemporaryFolder folder("reshard");
        Snapshot saved, next;
        run_ranks(from.ranks, [&](Communicator& comm) {
          Model model(two_groups(), recipe(from.stage));
          Engine engine(recipe(from.stage).settings(from.ranks), model.parameters(),
                        {.data = &comm}, two_group_options());
          for (int t = 0; t < 3; ++t) same_step(engine, t);
          engine.save(folder.path());
          const Snapshot before = snapshot(engine, model);
          same_step(engine, 3);
          const Snapshot after = snapshot(engine, model);
          if (comm.rank() == 0) saved = before, next = after;
        });
        for (const Place to : {Place{1, 0}, {2, 1}, {3, 0}, {4, 2}, {6, 1}, {8, 2}}) {
          run_ranks(to.ranks, [&](Communicator& comm) {
            Model model(two_groups(), recipe(to.stage), zero);
            Engine engine(recipe(to.stage).settings(to.ranks), model.parameters(), {.data = &comm},
                          two_group_options());
            engine.load(folder.path());
            ASSERT_EQ(snapshot(engine, model), saved)
                << level << model_dtype << from.ranks << "->" << to.ranks;
            EXPECT_EQ(engine.group(1).beta1, 0.8);
            same_step(engine, 3);
            ASSERT_EQ(snapshot(engine, model), next)
                << level << model_dtype << from.ranks << "->" << to.ranks;
          });
        }
      }
    }
  }
}

// From two pipeline stages to one, by name.
TEST(Checkpoint, Case38_OtherPipelineSplit) {
  const TemporaryFolder folder("pipeline");
  const Recipe recipe{.model = "bf16", .stage = 1, .level = "O3"};
  const std::vector<ParameterSpec> specs = {{.name = "a", .shape = {2, 90}},
                                            {.name = "b", .shape = {70, 70}}};
  std::vector<Snapshot> saved(2);
  run_ranks(4, [&](Communicator& world) {
    const int pp = world.rank() / 2;
    const auto data = world.split(pp, world.rank());
    const auto slices = world.split(2 + world.rank() % 2, world.rank());
    Model model({specs[std::size_t(pp)]}, recipe);
    Engine engine(recipe.settings(2, 2), model.parameters(),
                  {.data = data.get(), .model = slices.get()}, quiet());
    for (int t = 0; t < 3; ++t) made_up_step(engine, t, data->rank());
    engine.save(folder.path());
    const Snapshot s = snapshot(engine, model);
    if (world.rank() % 2 == 0) saved[std::size_t(pp)] = s;
  });
  run_ranks(3, [&](Communicator& comm) {
    Model model(specs, recipe, zero);
    Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
    engine.load(folder.path());
    const Snapshot s = snapshot(engine, model);
    for (std::size_t pp = 0; pp < 2; ++pp) {
      EXPECT_EQ(s.weights[pp], saved[pp].weights[0]);
      for (std::size_t k = 0; k < 3; ++k) {
        EXPECT_EQ(s.states[pp * 3 + k], saved[pp].states[k]);
      }
    }
  });
}

// Case 39 (a): Adam's t is saved.
TEST(Checkpoint, Case39a_StepCounter) {
  const TemporaryFolder folder("counter");
  const Recipe recipe{.lr = 0.01};
  const auto comm = make_self_communicator();
  Model model({{.name = "w", .shape = {4}}}, recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  for (int t = 0; t < 10; ++t) {
    add_constant(engine, 0, 0.1);
    engine.step();
  }
  engine.save(folder.path());
  Engine next(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  next.load(folder.path());
  const double before = model.at(0, 0);
  add_constant(next, 0, 0.1);
  next.step();
  EXPECT_NEAR((before - model.at(0, 0)) / 0.01, 1.0, 1e-4);
  EXPECT_EQ(next.step_of(0), 11);
}

// Case 39 (b): masters are saved, not made again from the weights.
TEST(Checkpoint, Case39b_Masters) {
  for (const char* dtype : {"bf16", "fp16"}) {
    const TemporaryFolder folder("master");
    const Recipe recipe{.model = dtype, .lr = 0x1p-12, .fp16 = R"("loss_scale": 1)"};
    const auto comm = make_self_communicator();
    Model model({{.name = "w", .shape = {4}}}, recipe,
                [](std::size_t, std::size_t) { return 1.0; });
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
    add_constant(engine, 0, -1.0);
    engine.step();
    engine.save(folder.path());
    Model other({{.name = "w", .shape = {4}}}, recipe, zero);
    Engine next(recipe.settings(1), other.parameters(), {.data = comm.get()}, quiet());
    next.load(folder.path());
    EXPECT_EQ(next.full_state(0, StateKind::kMaster)[3], 1.000244140625f);
  }
}

// Case 39 (c): weights that were written from outside are what training goes on from.
TEST(Checkpoint, Case39c_WeightsOnlyLoad) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    for (const char* level : {"O0", "O1", "O2", "O3"}) {
      for (const int stage : {0, 1, 2}) {
        const Recipe recipe{.model = dtype, .stage = stage, .level = level};
        run_ranks(2, [&](Communicator& comm) {
          Model model({{.name = "w", .shape = {3, 60}}}, recipe,
                      [](std::size_t, std::size_t) { return 5.0; });
          Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
          made_up_step(engine, 0, comm.rank());
          for (std::size_t j = 0; j < 180; ++j) model.set(0, j, 2.0);
          engine.weights_changed();
          engine.group(0).lr = 0;
          made_up_step(engine, 1, comm.rank());
          for (const float x : engine.full_state(0, StateKind::kMaster)) EXPECT_EQ(x, 2.0f);
          for (std::size_t j = 0; j < 180; ++j) EXPECT_EQ(model.at(0, j), 2.0);
        });
      }
    }
  }
}

// More shard files than this process may have open.
TEST(Checkpoint, LoadsMoreFilesThanMayBeOpen) {
  const TemporaryFolder folder("files");
  const Recipe recipe{.model = "bf16", .stage = 1, .level = "O2"};
  const std::vector<ParameterSpec> shapes = {{.name = "w", .shape = {40, 128}}};
  std::vector<std::vector<std::byte>> saved;
  run_ranks(24, [&](Communicator& comm) {
    Model model(shapes, recipe);
    Engine engine(recipe.settings(24), model.parameters(), {.data = &comm}, quiet());
    made_up_step(engine, 0, comm.rank());
    engine.save(folder.path());
    if (comm.rank() == 0) saved = model.bytes();
  });
  const auto comm = make_self_communicator();
  Model model(shapes, recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto open_now = std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                      std::filesystem::directory_iterator());
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(open_now) + 6;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_NO_THROW(engine.load(folder.path()));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(model.bytes(), saved);
}

// What loading sends is not counted as the next step's.
TEST(Checkpoint, WireBytesOfTheNextStepAreThePlans) {
  const TemporaryFolder folder("wire");
  const Recipe recipe{.model = "bf16", .stage = 1, .level = "O2"};
  run_ranks(2, [&](Communicator& comm) {
    Model model({{.name = "w", .shape = {600}}}, recipe);
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    const StepReport first = made_up_step(engine, 0, comm.rank());
    engine.save(folder.path());
    engine.load(folder.path());
    EXPECT_EQ(made_up_step(engine, 1, comm.rank()).wire.payload, first.wire.payload);
  });
}

// A static loss scale is the config's, whatever a checkpoint was saved with.
TEST(Checkpoint, StaticLossScaleStays) {
  const TemporaryFolder folder("static");
  const Recipe dynamic{.model = "fp16", .fp16 = R"("initial_scale_power": 20)"};
  const auto comm = make_self_communicator();
  Model model({{.name = "w", .shape = {4}}}, dynamic);
  Engine engine(dynamic.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  made_up_step(engine, 0, 0);
  engine.save(folder.path());
  const Recipe fixed{.model = "fp16", .fp16 = R"("loss_scale": 128)"};
  std::string log;
  EngineOptions options = quiet();
  options.log = [&](const std::string& line) { log += line; };
  Engine next(fixed.settings(1), model.parameters(), {.data = comm.get()}, options);
  next.load(folder.path());
  EXPECT_EQ(next.loss_scale(), 128);
  EXPECT_NE(log.find("saved with loss scale 1048576, going on with 128"), std::string::npos) << log;
}

// Case 39 (d): the loss scaler's counters.
TEST(Checkpoint, Case39d_LossScaler) {
  const TemporaryFolder folder("scaler");
  const Recipe recipe{.model = "fp16",
                      .fp16 = R"("initial_scale_power": 2, "loss_scale_window": 4)"};
  const auto comm = make_self_communicator();
  Model model({{.name = "w", .shape = {4}}}, recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  add_constant(engine, 0, INFINITY);
  engine.step();  // uses up the hysteresis
  for (int t = 0; t < 3; ++t) made_up_step(engine, t, 0);
  engine.save(folder.path());
  Engine next(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  next.load(folder.path());
  EXPECT_EQ(next.loss_scale(), 4);
  EXPECT_EQ(next.skipped_steps(), 1);
  EXPECT_EQ(made_up_step(next, 3, 0).next_loss_scale, 8);
  next.load(folder.path());
  add_constant(next, 0, INFINITY);
  EXPECT_EQ(next.step().next_loss_scale, 2);
}

TEST(Checkpoint, AnotherSeedIsReported) {
  const TemporaryFolder folder("seed");
  const auto comm = make_self_communicator();
  Model model(odd_shapes(), Recipe{});
  Engine engine(Recipe{}.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  engine.save(folder.path());
  EngineOptions options = quiet();
  std::string lines;
  options.log = [&](const std::string& line) { lines += line; };
  Engine other(Recipe{.zerofp8 = R"("seed": 7)"}.settings(1), model.parameters(),
               {.data = comm.get()}, options);
  other.load(folder.path());
  EXPECT_NE(lines.find("seed 0"), std::string::npos) << lines;
}

}  // namespace
}  // namespace zerofp8::test
