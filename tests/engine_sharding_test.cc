// Cases 23, 24, 27: more ranks than elements, empty tensors, parameters without a gradient.
#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

using Sizes = std::vector<std::vector<std::int64_t>>;

std::vector<ParameterSpec> specs_of(const Sizes& shapes) {
  std::vector<ParameterSpec> specs;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    specs.push_back({.name = fmt::format("p{}", i), .shape = shapes[i]});
  }
  return specs;
}

// Weights and norm after `steps` steps with the same gradient on every rank.
struct Outcome {
  std::vector<std::vector<std::byte>> weights;
  std::vector<double> norms;
  bool operator==(const Outcome&) const = default;
};
Outcome train(const Recipe& recipe, const std::vector<ParameterSpec>& specs, int ranks, int steps,
              double gradient, std::vector<AdamOptions> groups = {}) {
  Outcome result;
  run_ranks(ranks, [&](Communicator& comm) {
    Model model(specs, recipe, [](std::size_t, std::size_t) { return 1.0; });
    EngineOptions options = quiet();
    options.groups = groups;
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, options);
    std::vector<double> norms;
    for (int t = 0; t < steps; ++t) {
      for (std::size_t i = 0; i < model.count(); ++i) add_constant(engine, int(i), gradient);
      const StepReport report = engine.step();
      EXPECT_TRUE(report.applied);
      norms.push_back(report.grad_norm);
    }
    if (comm.rank() == ranks - 1) result = {model.bytes(), norms};
  });
  return result;
}

// Case 23. One value everywhere: each block's amax is that value, so every format is exact.
TEST(EngineSharding, Case23_FewElementsOnManyRanks) {
  const std::vector<Sizes> lists = {{{1}, {3}},
                                    {{17}},
                                    {{1, 17}, {2, 2}},
                                    {{1},
                                     {2},
                                     {3},
                                     {4},
                                     {5},
                                     {6},
                                     {7},
                                     {8},
                                     {9},
                                     {10},
                                     {11},
                                     {12},
                                     {13},
                                     {14},
                                     {15},
                                     {16},
                                     {17},
                                     {18},
                                     {19}}};
  for (const Sizes& shapes : lists) {
    for (const char* level : {"O0", "O1", "O2", "O3"}) {
      for (const int stage : {0, 1, 2}) {
        for (const char* bucket : {"1", "5", "1000000"}) {
          const Recipe recipe{.stage = stage,
                              .level = level,
                              .lr = 0.1,
                              .zero = fmt::format(R"("reduce_bucket_size": {})", bucket),
                              .zerofp8 = R"("fp32_moments_below": 0)"};
          const auto specs = specs_of(shapes);
          const Outcome alone = train(recipe, specs, 1, 1, 0.5);
          std::int64_t elements = 0;
          for (std::size_t i = 0; i < specs.size(); ++i) {
            elements += specs[i].numel();
            const auto* p = reinterpret_cast<const float*>(alone.weights[i].data());
            EXPECT_NEAR(p[specs[i].numel() - 1], 0.9, level[1] == '0' ? 2e-7 : 1e-4) << level;
          }
          EXPECT_NEAR(alone.norms[0], 0.5 * std::sqrt(double(elements)), 1e-6);
          for (const int ranks : {3, 4, 8}) {
            EXPECT_EQ(train(recipe, specs, ranks, 1, 0.5), alone)
                << level << " stage " << stage << " bucket " << bucket << " on " << ranks;
          }
        }
      }
    }
  }
}

TEST(EngineSharding, Case23_TwoParameterGroups) {
  std::vector<ParameterSpec> specs = specs_of({{1}, {3}, {2, 3}});
  specs[1].group = specs[2].group = 1;
  const std::vector<AdamOptions> groups = {{.lr = 0.1}, {.lr = 0.2, .weight_decay = 0.5}};
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2}) {
      const Outcome o = train(Recipe{.stage = stage}, specs, ranks, 1, 0.5, groups);
      const auto value = [&](std::size_t i) {
        return *reinterpret_cast<const float*>(o.weights[i].data());
      };
      EXPECT_NEAR(value(0), 0.9, 1e-6);
      EXPECT_NEAR(value(1), 1 - 0.2 * 0.5 - 0.2, 1e-6);
      EXPECT_EQ(value(1), value(2));
    }
  }
}

// Case 24: empty tensors anywhere change nothing for the others.
TEST(EngineSharding, Case24_EmptyTensors) {
  std::vector<std::pair<Sizes, Sizes>> pairs = {{{{8}, {0}, {24}}, {{8}, {24}}},
                                                {{{4}, {4}, {0}}, {{4}, {4}}},
                                                {{{0}}, {}},
                                                {{{0, 8}}, {}},
                                                {{{0}, {3, 0}, {5}}, {{5}}}};
  for (const std::size_t at : {29u, 35u, 39u}) {
    Sizes with(40, {6}), without(39, {6});
    with[at] = {0};
    pairs.push_back({with, without});
  }
  for (const auto& [with, without] : pairs) {
    for (const int ranks : {1, 2, 3}) {
      for (const int stage : {0, 1, 2}) {
        for (const char* level : {"O0", "O2"}) {
          const Recipe recipe{.stage = stage, .level = level};
          const Outcome full = train(recipe, specs_of(without), ranks, 2, 0.5);
          Outcome found = train(recipe, specs_of(with), ranks, 2, 0.5);
          EXPECT_EQ(found.norms, full.norms);
          std::erase_if(found.weights, [](const auto& w) { return w.size() <= 1; });
          EXPECT_EQ(found.weights, full.weights);
        }
      }
    }
  }
}

TEST(EngineSharding, Case24_EmptyTensorsAreSavedAndLoaded) {
  for (const int ranks : {1, 2, 3}) {
    const Recipe recipe{.stage = ranks == 1 ? 0 : 2, .level = "O3"};
    const TemporaryFolder folder("empty");
    run_ranks(ranks, [&](Communicator& comm) {
      for (const Sizes& shapes : {Sizes{{0, 8}, {300}, {0}}, Sizes{{0}}}) {
        Model model(specs_of(shapes), recipe);
        Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
        for (std::size_t i = 0; i < shapes.size(); ++i) add_constant(engine, int(i), 0.5);
        engine.step();
        const std::string root = fmt::format("{}/{}", folder.path(), shapes.size());
        engine.save(root);
        const Snapshot saved = snapshot(engine, model);
        made_up_step(engine, 1, comm.rank());
        engine.load(root);
        EXPECT_EQ(snapshot(engine, model), saved);
        EXPECT_EQ(engine.parameters()[0].spec.shape, shapes[0]);
      }
    });
  }
}

// Case 27 (a): unused everywhere: weight, state and step stay.
TEST(EngineSharding, Case27a_UnusedParametersAreNotTouched) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    for (const int stage : {0, 1, 2}) {
      for (const bool overlap : {false, true}) {
        const Recipe recipe{.model = "bf16",
                            .stage = stage,
                            .level = level,
                            .lr = 0.1,
                            .weight_decay = 0.1,
                            .zero = fmt::format(R"("overlap_comm": {})", overlap)};
        run_ranks(2, [&](Communicator& comm) {
          Model model(specs_of({{2, 64}, {5}, {3}}), recipe,
                      [](std::size_t, std::size_t) { return 1.0; });
          Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
          made_up_step(engine, 0, comm.rank());
          const auto weights = model.bytes();
          const auto m = engine.full_state(1, StateKind::kExpAvg);
          for (int t = 1; t < 4; ++t) {
            add_constant(engine, 0, 0.5);
            add_constant(engine, 2, 0.5);
            EXPECT_EQ(engine.step().unused_parameters, 1);
          }
          EXPECT_EQ(model.bytes()[1], weights[1]);
          EXPECT_NE(model.bytes()[0], weights[0]);
          EXPECT_EQ(engine.full_state(1, StateKind::kExpAvg), m);
          EXPECT_EQ(engine.step_of(1), 1);
          EXPECT_EQ(engine.step_of(0), 4);
        });
      }
    }
  }
}

// Case 27 (b): used on some ranks only; also where the others have no gradient of anything, and
// where nobody ends the micro-batch by hand.
TEST(EngineSharding, Case27b_UsedOnSomeRanksOnly) {
  for (const char* level : {"O0", "O2"}) {
    for (const int stage : {0, 1, 2}) {
      for (const int used : {0, 1}) {
        for (const int ended : {0, 1, 2}) {  // by nobody, by all, and with two micro-batches
          const Recipe recipe{.stage = stage,
                              .level = level,
                              .micro_batches = ended == 2 ? 2 : 1,
                              .zero = R"("overlap_comm": true, "reduce_bucket_size": 1)"};
          run_ranks(2, [&](Communicator& comm) {
            comm.set_timeout(std::chrono::seconds(20));
            Model model(specs_of({{3}, {4}}), recipe);
            Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
            for (int t = 0; t < 2; ++t) {
              for (int k = 0; k < recipe.micro_batches; ++k) {
                if (comm.rank() == t % 2) add_constant(engine, used, 1.0);
                if (ended > 0) engine.end_micro_batch();
              }
              engine.reduce_gradients();
              EXPECT_NEAR(engine.full_state(used, StateKind::kGradient)[2], 0.5, 1e-7);
              EXPECT_EQ(engine.full_state(1 - used, StateKind::kGradient)[0], 0);
              EXPECT_EQ(engine.step().unused_parameters, 1);
            }
            EXPECT_EQ(engine.step_of(used), 2);
          });
        }
      }
    }
  }
}

TEST(EngineSharding, Case27b_DiscardingWhatSomeRanksHave) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.stage = stage, .zero = R"("overlap_comm": true, "reduce_bucket_size": 1)"};
    run_ranks(3, [&](Communicator& comm) {
      comm.set_timeout(std::chrono::seconds(20));
      Model model(specs_of({{3}, {4}}), recipe);
      Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
      if (comm.rank() == 1) add_constant(engine, 1, 8.0);
      engine.discard_gradients();
      add_constant(engine, 1, 2.0);
      engine.reduce_gradients();
      EXPECT_NEAR(engine.full_state(1, StateKind::kGradient)[3], 2.0, 1e-6);
      engine.discard_gradients();
      EXPECT_EQ(engine.step().grad_norm, 0);
    });
  }
}

// Case 27 (c): a stage whose parameters are all frozen.
TEST(EngineSharding, Case27c_AFrozenStage) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.stage = stage, .weight_decay = 0.1};
    run_ranks(4, [&](Communicator& world) {
      const int pp = world.rank() / 2;
      const auto data = world.split(pp, world.rank());
      const auto model_ranks = world.split(2 + world.rank() % 2, world.rank());
      Model model(specs_of({{6}}), recipe, [](std::size_t, std::size_t) { return 1.0; });
      Engine engine(recipe.settings(2, 2), model.parameters(),
                    {.data = data.get(), .model = model_ranks.get()}, quiet());
      for (int t = 0; t < 3; ++t) {
        if (pp == 1) add_constant(engine, 0, 1.0);
        if (pp == 1) engine.end_micro_batch();
        EXPECT_TRUE(engine.step().applied);
      }
      EXPECT_EQ(model.at(0, 0) == 1.0, pp == 0);
    });
  }
}

// Case 27 (d): frozen after some steps, saved, loaded, unfrozen: its state has waited.
TEST(EngineSharding, Case27d_FrozenStateSurvivesSaveAndLoad) {
  for (const char* level : {"O0", "O2", "O3"}) {
    const TemporaryFolder folder("frozen");
    const Recipe recipe{
        .model = "bf16", .stage = 1, .level = level, .zerofp8 = R"("fp32_moments_below": 0)"};
    run_ranks(2, [&](Communicator& comm) {
      Model model(specs_of({{2, 90}, {1, 7}}), recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      for (int t = 0; t < 5; ++t) made_up_step(engine, t, comm.rank());
      const auto m = engine.full_state(1, StateKind::kExpAvg);
      const auto v = engine.full_state(1, StateKind::kExpAvgSq);
      for (int t = 0; t < 3; ++t) {
        add_constant(engine, 0, 1.0);
        engine.step();
      }
      engine.save(folder.path());
      Model other(specs_of({{2, 90}, {1, 7}}), recipe,
                  [](std::size_t, std::size_t) { return 0.0; });
      Engine next(recipe.settings(2), other.parameters(), {.data = &comm}, quiet());
      next.load(folder.path());
      EXPECT_EQ(next.full_state(1, StateKind::kExpAvg), m);
      EXPECT_EQ(next.full_state(1, StateKind::kExpAvgSq), v);
      EXPECT_EQ(next.step_of(1), 5);
      EXPECT_EQ(next.step_of(0), 8);
      made_up_step(next, 9, comm.rank());
      made_up_step(engine, 9, comm.rank());
      EXPECT_EQ(snapshot(next, other), snapshot(engine, model));
    });
  }
}

}  // namespace
}  // namespace zerofp8::test
