// Cases 19, 21, 22: the norm counts each logical element once, in any layout, and clips once.
#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

// Case 19 (a): tied copies on two stages, gradients of both are summed, counted once.
TEST(EngineNorm, Case19a_TiedWeightsCountOnce) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const int stage : {0, 1, 2}) {
      for (const int data_ranks : {1, 2, 3}) {
        const Recipe recipe{.model = "bf16", .stage = stage, .level = level};
        std::vector<std::vector<std::vector<std::byte>>> copies(2);
        run_ranks(2 * data_ranks, [&](Communicator& world) {
          const int pp = world.rank() % 2;
          const auto data = world.split(pp, world.rank());
          const auto model_ranks = world.split(world.rank() / 2, world.rank());
          std::vector<ParameterSpec> specs;
          // Other parameters differ between stages, so that the buckets around the tied one do.
          if (pp == 1) specs.push_back({.name = "head", .shape = {3, 11}});
          specs.push_back({.name = "embedding",
                           .shape = {20, 40},
                           .tied = "embedding",
                           .counts_in_norm = pp == 0});
          if (pp == 0) specs.push_back({.name = "first", .shape = {2}});
          Model model(specs, recipe, [](std::size_t, std::size_t j) { return 0.01 * double(j); });
          const int tied = pp == 0 ? 0 : 1;
          Groups groups{.data = data.get(), .model = model_ranks.get()};
          groups.tied["embedding"] = model_ranks.get();
          Engine engine(recipe.settings(data_ranks, 2), model.parameters(), groups, quiet());
          for (int t = 0; t < 3; ++t) {
            add_constant(engine, tied, pp == 0 ? 0.25 : 0.75);
            const StepReport report = engine.step();
            const double tolerance = level[1] == '0' ? 1e-12 : 1e-4;
            EXPECT_NEAR(report.grad_norm, 28.284271247461902, tolerance) << level << stage;
          }
          if (world.rank() < 2) copies[std::size_t(pp)] = {model.bytes()[std::size_t(tied)]};
        });
        EXPECT_EQ(copies[0], copies[1]) << level << stage;
      }
    }
  }
}

// Used on one stage only in this step: still updated alike on both.
TEST(EngineNorm, Case19_TiedWeightUsedOnOneStageOnly) {
  const Recipe recipe{.stage = 1, .level = "O3", .zerofp8 = R"("fp32_moments_below": 0)"};
  std::vector<std::vector<std::byte>> copies(2);
  run_ranks(2, [&](Communicator& world) {
    const auto data = world.split(world.rank(), 0);
    Model model({{.name = world.rank() == 0 ? "in" : "out",
                  .shape = {2, 70},
                  .tied = "shared",
                  .counts_in_norm = world.rank() == 1}},
                recipe);
    Groups groups{.data = data.get(), .model = &world};
    groups.tied["shared"] = &world;
    Engine engine(recipe.settings(1, 2), model.parameters(), groups, quiet());
    for (int t = 0; t < 4; ++t) {
      if (world.rank() == t % 2) add(engine, 0, made_up_gradients(t, 0, 0, 0, 140));
      EXPECT_TRUE(engine.step().applied);
      EXPECT_EQ(engine.step_of(0), t + 1);
    }
    copies[std::size_t(world.rank())] = model.bytes()[0];
  });
  EXPECT_EQ(copies[0], copies[1]);
}

// Case 19 (b): TP = 8, a replicated bias of 4 x 3.0 and one 1.0 per rank.
TEST(EngineNorm, Case19b_ReplicatedTensorParallelElementsCountOnce) {
  for (const int stage : {0, 1}) {
    const Recipe recipe{.stage = stage};
    run_ranks(8, [&](Communicator& world) {
      const auto data = world.split(world.rank(), 0);
      Model model({{.name = "bias", .shape = {4}, .counts_in_norm = world.rank() == 0},
                   {.name = "column", .shape = {1}}},
                  recipe);
      Engine engine(recipe.settings(1, 1, 8), model.parameters(),
                    {.data = data.get(), .model = &world}, quiet());
      add_constant(engine, 0, 3.0);
      add_constant(engine, 1, 1.0);
      EXPECT_NEAR(engine.step().grad_norm, 6.6332495807108, 1e-12);
    });
  }
}

// Case 19 (c): gradients that every rank has count once.
TEST(EngineNorm, Case19c_DataParallelCopiesCountOnce) {
  for (const int stage : {0, 1, 2}) {
    for (const char* level : {"O0", "O1"}) {
      const Recipe recipe{.stage = stage, .level = level};
      run_ranks(4, [&](Communicator& comm) {
        Model model({{.name = "w", .shape = {2}}}, recipe);
        Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
        add(engine, 0, {3, 4});
        EXPECT_NEAR(engine.step().grad_norm, 5.0, level[1] == '0' ? 1e-12 : 5 * 0x1p-4);
      });
    }
  }
}

// The same 24 x 40 matrix and a bias on every layout of data, tensor and pipeline ranks.
TEST(EngineNorm, Case19_SameNormOnEveryLayout) {
  struct Layout {
    int data, tensor, pipeline;
  };
  std::vector<double> norms;
  for (const Layout l : {Layout{1, 1, 1},
                         {2, 1, 1},
                         {3, 1, 1},
                         {4, 1, 1},
                         {1, 2, 1},
                         {1, 4, 1},
                         {1, 1, 3},
                         {2, 2, 1},
                         {2, 1, 2},
                         {1, 2, 2},
                         {2, 2, 2}}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{.stage = stage};
      double norm = 0;
      run_ranks(l.data * l.tensor * l.pipeline, [&](Communicator& world) {
        const int tp = world.rank() % l.tensor;
        const int pp = world.rank() / l.tensor % l.pipeline;
        const int dp = world.rank() / l.tensor / l.pipeline;
        const auto data = world.split(tp + pp * l.tensor, world.rank());
        const auto slices = world.split(dp, world.rank());
        const int rows = 24 / l.pipeline, columns = 40 / l.tensor;  // rows to stages
        Model model({{.name = "w", .shape = {rows, columns}},
                     {.name = "bias", .shape = {5}, .counts_in_norm = tp == 0 && pp == 0}},
                    recipe);
        Engine engine(recipe.settings(l.data, l.pipeline, l.tensor), model.parameters(),
                      {.data = data.get(), .model = slices.get()}, quiet());
        std::vector<double> g;
        for (int r = pp * rows; r < (pp + 1) * rows; ++r) {
          for (int c = tp * columns; c < (tp + 1) * columns; ++c) {
            g.push_back(made_up_gradient(0, 0, 0, 0, std::size_t(r * 40 + c)));
          }
        }
        add(engine, 0, g);
        add(engine, 1, {1, 2, 3, 4, 5});
        const double mine = engine.step().grad_norm;
        if (world.rank() == 0) norm = mine;
      });
      norms.push_back(norm);
    }
  }
  for (const double norm : norms) EXPECT_NEAR(norm / norms[0], 1, 1e-12);
}

// Case 21: neither overflow nor underflow of the sum of squares.
TEST(EngineNorm, Case21_HugeAndTinyGradients) {
  struct Row {
    double value, count, norm, clipped;
  };
  for (const Row row :
       {Row{1e20, 100, 1e21, 0.1}, Row{1e-30, 100, 1e-29, 1e-30}, Row{5000, 64, 40000, 0.125},
        Row{3e38, 4, 6e38, 0.5}, Row{1e-38, 400, 2e-37, 1e-38}}) {
    for (const int stage : {0, 1, 2}) {
      for (const int ranks : {1, 2}) {
        const Recipe recipe{.stage = stage, .beta1 = 0, .clipping = 1};
        run_ranks(ranks, [&](Communicator& comm) {
          Model model({{.name = "w", .shape = {1, std::int64_t(row.count)}}}, recipe);
          Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
          add_constant(engine, 0, ranks == 2 && row.value > 1e38 ? row.value / 2 : row.value);
          const StepReport report = engine.step();
          ASSERT_TRUE(report.applied);
          const double half = ranks == 2 && row.value > 1e38 ? 0.5 : 1;
          EXPECT_NEAR(report.grad_norm / (row.norm * half), 1, 1e-6) << row.value;
          // With beta1 = 0 the first moment is the clipped gradient.
          const auto m = engine.full_state(0, StateKind::kExpAvg);
          for (const float x : m) EXPECT_NEAR(x / row.clipped, 1, 1e-5) << row.value;
        });
      }
    }
  }
}

TEST(EngineNorm, Case21_Fp16GradientsOf5000) {
  const Recipe recipe{.model = "fp16", .stage = 1, .fp16 = R"("loss_scale": 8)"};
  run_ranks(2, [&](Communicator& comm) {
    Model model({{.name = "w", .shape = {300}}}, recipe);
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    add_constant(engine, 0, 40000.0, DType::kFp16);
    EXPECT_NEAR(engine.step().grad_norm, 5000 * std::sqrt(300.0), 1e-8);
  });
}

// Case 22: the norm of the unscaled gradient, before and after clipping, the same at every stage.
TEST(EngineNorm, Case22_ClipIsOfTheUnscaledGradient) {
  for (const int stage : {0, 1, 2}) {
    for (const int ranks : {1, 2}) {
      Recipe recipe{.model = "fp16", .stage = stage, .level = "O0", .beta1 = 0, .clipping = 1};
      run_ranks(ranks, [&](Communicator& comm) {
        Model model({{.name = "w", .shape = {2}}}, recipe);
        Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
        EXPECT_EQ(engine.loss_scale(), 65536);
        add(engine, 0, {3 * 65536.0, 4 * 65536.0});
        const StepReport report = engine.step();
        EXPECT_EQ(report.grad_norm, 5.0);
        EXPECT_NEAR(report.clip_coefficient, 0.19999996, 1e-8);
        EXPECT_NEAR(report.clipped_norm, 0.9999998, 1e-7);
        EXPECT_EQ(report.loss_scale, 65536);
        const auto m = engine.full_state(0, StateKind::kExpAvg);
        EXPECT_NEAR(m[0], 0.6, 1e-6);
        EXPECT_NEAR(m[1], 0.8, 1e-6);
      });
    }
  }
  const Recipe off{.stage = 1};
  const auto comm = make_self_communicator();
  Model model({{.name = "w", .shape = {2}}}, off);
  Engine engine(off.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  add(engine, 0, {3, 4});
  const StepReport report = engine.step();
  EXPECT_EQ(report.grad_norm, 5.0);
  EXPECT_EQ(report.clip_coefficient, 1.0);
  EXPECT_EQ(report.clipped_norm, 5.0);
}

// The norm is there between reduction and step, and padding adds nothing to it.
TEST(EngineNorm, Case22_NormIsKnownBeforeTheStep) {
  for (const char* level : {"O0", "O3"}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{.stage = stage, .level = level};
      run_ranks(3, [&](Communicator& comm) {
        Model model(odd_shapes(), recipe);
        Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
        double squares = 0;
        for (int i = 0; i < 6; ++i) {
          add(engine, i,
              made_up_gradients(0, comm.rank(), 0, std::size_t(i), model.numel(std::size_t(i))));
        }
        engine.reduce_gradients();
        for (int i = 0; i < 6; ++i) {
          for (const float x : engine.full_state(i, StateKind::kGradient)) squares += double(x) * x;
        }
        EXPECT_NEAR(engine.grad_norm() / std::sqrt(squares), 1, 1e-12);
        EXPECT_EQ(engine.step().grad_norm, engine.grad_norm());
      });
    }
  }
}

// A finite gradient whose square FP32 does not hold would make the second moment infinite, and
// every later update zero. It is skipped with the reason; with clipping it is not too large.
TEST(EngineNorm, Case21_GradientsWithoutAFiniteSquareAreSkipped) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const double value : {1e18, 1.7e19, 1.9e19, 1e20, 1.6e38}) {
      for (const double clipping : {0.0, 1.0}) {
        const Recipe recipe{.model = "bf16", .stage = 1, .level = level, .clipping = clipping};
        run_ranks(2, [&](Communicator& comm) {
          Model model({{.name = "w", .shape = {64, 128}}}, recipe);
          Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
          const Snapshot before = snapshot(engine, model);
          std::vector<double> g(64 * 128, 0.0);
          g[5000] = value / 1.01;  // FP8 may round it up
          add(engine, 0, g);
          const StepReport report = engine.step();
          const bool fits = clipping > 0 || value < 1.8e19;
          EXPECT_EQ(report.applied, fits) << level << " " << value;
          EXPECT_EQ(report.skip_reason.find("/gradient_clipping") != std::string::npos, !fits);
          if (!fits) {
            EXPECT_EQ(snapshot(engine, model), before);
          }
          for (const float v : engine.full_state(0, StateKind::kExpAvgSq)) {
            ASSERT_TRUE(std::isfinite(v)) << level << " " << value;
          }
        });
      }
    }
  }
}

// The norms of single parameters add up to the whole one, for every layout; with an accumulator
// that Adam decodes itself, too.
TEST(EngineNorm, NormsOfSingleParameters) {
  for (const char* level : {"O0", "O1", "O3"}) {
    for (const int stage : {0, 1, 2}) {
      for (const int ranks : {1, 3}) {
        const Recipe recipe{.model = "bf16", .stage = stage, .level = level};
        run_ranks(ranks, [&](Communicator& comm) {
          Model model(odd_shapes(), recipe);
          Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
          EXPECT_THROW(engine.gradient_norms(), ArgumentError);
          for (std::size_t i = 0; i + 1 < model.count(); ++i) {  // the last one has none
            add(engine, int(i), made_up_gradients(0, comm.rank(), 0, i, model.numel(i)));
          }
          engine.reduce_gradients();
          const std::vector<double> norms = engine.gradient_norms();
          ASSERT_EQ(norms.size(), model.count());
          EXPECT_EQ(norms.back(), 0);
          double total = 0;
          for (std::size_t i = 0; i < norms.size(); ++i) {
            double squares = 0;
            for (const float g : engine.full_state(int(i), StateKind::kGradient)) {
              squares += double(g) * double(g);
            }
            EXPECT_NEAR(norms[i], std::sqrt(squares), 1e-6 * norms[i]) << level << stage << ranks;
            total += norms[i] * norms[i];
          }
          EXPECT_NEAR(engine.step().grad_norm, std::sqrt(total), 1e-12 * std::sqrt(total));
        });
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
