// Cases 14, 16, 17: non-finite gradients, skips and loss scales. Also fp16 weights at the end of
// their range.
#include <limits>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

std::vector<ParameterSpec> shapes() {
  return {
      {.name = "a", .shape = {2, 300}}, {.name = "b", .shape = {7}}, {.name = "c", .shape = {1}}};
}

// Case 14: found on any rank in any slice, in every accumulator and wire dtype; skipped by all; and
// the next step is that of a run without the bad one.
TEST(EngineOverflow, Case14_NonFiniteGradientOfAnyRankIsSkippedByAll) {
  constexpr int kRanks = 4;
  const double bad_values[] = {NAN, INFINITY, -INFINITY};
  int index = 0;
  for (const char* acc : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
    for (const char* wire : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
      for (const int stage : {0, 1, 2}) {
        const int culprit = index % kRanks;
        const double bad = bad_values[index % 3];
        const DType given = index % 2 == 0 ? DType::kBf16 : DType::kFp32;
        const auto at = static_cast<std::size_t>(index * 37 % 600);  // in any rank's slice
        const bool feedback = acc[2] == '8' && index % 2 == 0;
        ++index;
        const Recipe recipe{.model = "bf16",
                            .stage = stage,
                            .level = "O3",
                            .accumulation = acc,
                            .error_feedback = feedback,
                            .wire = wire,
                            .micro_batches = 2,
                            .zerofp8 = R"("fp32_moments_below": 0)"};
        run_ranks(kRanks, [&](Communicator& comm) {
          comm.set_timeout(std::chrono::seconds(30));
          const auto data = comm.split(0, comm.rank());
          const auto other_data = comm.split(0, comm.rank());
          Model model(shapes(), recipe), clean_model(shapes(), recipe);
          const Settings s = recipe.settings(kRanks);
          Engine engine(s, model.parameters(), {.data = data.get()}, quiet());
          Engine clean(s, clean_model.parameters(), {.data = other_data.get()}, quiet());
          made_up_step(engine, 0, comm.rank());
          made_up_step(clean, 0, comm.rank());
          const Snapshot before = snapshot(engine, model);
          for (int k = 0; k < 2; ++k) {
            std::vector<double> g = made_up_gradients(1, comm.rank(), k, 0, 600);
            if (k == 1 && comm.rank() == culprit) g[at] = bad;
            add(engine, 0, g, given);
            add_constant(engine, 1, 1.0);
            engine.end_micro_batch();
          }
          const StepReport report = engine.step();
          const std::string what =
              fmt::format("{} -> {} stage {} rank {} of {}", acc, wire, stage, culprit, bad);
          EXPECT_FALSE(report.applied) << what;
          EXPECT_TRUE(std::isnan(report.grad_norm));
          EXPECT_EQ(report.skipped_steps, 1);
          EXPECT_EQ(report.step, 1);
          EXPECT_EQ(report.bad_parameter, "a") << what;
          EXPECT_EQ(report.bad_rank, culprit) << what;
          EXPECT_EQ(snapshot(engine, model), before) << what;
          made_up_step(engine, 2, comm.rank());
          made_up_step(clean, 2, comm.rank());
          EXPECT_EQ(snapshot(engine, model), snapshot(clean, clean_model)) << what;
        });
        if (HasFailure()) return;
      }
    }
  }
}

// The reported parameter and rank belong together, also where several are bad.
TEST(EngineOverflow, Case14_TheReportedParameterIsTheReportedRanks) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.stage = stage, .micro_batches = 1};
    run_ranks(4, [&](Communicator& comm) {
      Model model(shapes(), recipe);
      Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
      add_constant(engine, 0, comm.rank() == 3 ? INFINITY : 1.0);
      add_constant(engine, 1, comm.rank() >= 2 ? INFINITY : 1.0);
      const StepReport report = engine.step();
      EXPECT_EQ(report.bad_rank, 2);
      EXPECT_EQ(report.bad_parameter, "b");
    });
  }
}

// Across model slices: found on one stage, skipped on all.
TEST(EngineOverflow, Case14_OneStageSkipsAllStagesSkip) {
  const Recipe recipe{.stage = 1};
  run_ranks(4, [&](Communicator& world) {
    const int stage = world.rank() / 2;
    const auto data = world.split(stage, world.rank());
    const auto model_ranks = world.split(2 + world.rank() % 2, world.rank());
    Model model({{.name = fmt::format("stage{}", stage), .shape = {5}}}, recipe);
    Engine engine(recipe.settings(2, 2), model.parameters(),
                  {.data = data.get(), .model = model_ranks.get()}, quiet());
    add_constant(engine, 0, world.rank() == 3 ? NAN : 1.0);
    const StepReport report = engine.step();
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.bad_parameter, "stage1");
    EXPECT_EQ(report.bad_rank, 1);
    EXPECT_EQ(engine.step_of(0), 0);
  });
}

// Finite on every rank, beyond FP32 in the sum: a skip as well.
TEST(EngineOverflow, Case14_OverflowOfASumIsFound) {
  for (const char* acc : {"fp32", "bf16", "fp16", "fp8"}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{.stage = stage, .accumulation = acc, .micro_batches = 2};
      run_ranks(2, [&](Communicator& comm) {
        Model model(shapes(), recipe);
        Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
        for (int k = 0; k < 2; ++k) {
          add_constant(engine, 0, 3e38);
          engine.end_micro_batch();
        }
        EXPECT_FALSE(engine.step().applied) << acc << stage;
      });
    }
  }
}

// Case 16.
TEST(EngineOverflow, Case16_SkipsAreReportedAndTheScheduleWaits) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    const Recipe recipe{.model = dtype, .stage = 1, .fp16 = R"("loss_scale": 1)"};
    std::vector<std::string> lines;
    run_ranks(2, [&](Communicator& comm) {
      Model model(shapes(), recipe);
      EngineOptions options = quiet();
      options.log = [&](const std::string& line) { lines.push_back(line); };  // rank 0 only
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, options);
      std::vector<double> used;
      for (int attempt = 1; attempt <= 4; ++attempt) {
        const double lr = 1e-3 * double(engine.applied_steps()) / 4;
        engine.group(0).lr = lr;
        for (int i = 0; i < 3; ++i) {
          add_constant(engine, i, attempt == 2 && i == 1 && comm.rank() == 1 ? INFINITY : 0.5);
        }
        const double before = model.at(0, 0);
        const StepReport report = engine.step();
        EXPECT_EQ(report.applied, attempt != 2);
        if (report.applied) used.push_back(lr);
        EXPECT_TRUE(lr != 0 || model.at(0, 0) == before);
      }
      EXPECT_EQ(used, (std::vector<double>{0, 2.5e-4, 5e-4}));
      EXPECT_EQ(engine.skipped_steps(), 1);
      EXPECT_EQ(engine.step_of(0), 3);
    });
    ASSERT_EQ(lines.size(), 1u) << dtype;
    EXPECT_NE(lines[0].find("step 2"), std::string::npos) << lines[0];
    EXPECT_NE(lines[0].find("\"b\""), std::string::npos) << lines[0];
    EXPECT_NE(lines[0].find("rank 1"), std::string::npos) << lines[0];
  }
}

// Case 17: one sequence for every stage and accumulator, ended by an error at the floor.
TEST(EngineOverflow, Case17_LossScaleFallsToItsFloorAndStops) {
  for (const char* keys :
       {R"("loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "loss_scale_window": 1000,
           "min_loss_scale": 1)",
        R"("loss_scale": 0)", ""}) {
    for (const char* acc : {"fp32", "fp16", "fp8"}) {
      for (const int stage : {0, 1, 2}) {
        const Recipe recipe{.model = "fp16", .stage = stage, .accumulation = acc, .fp16 = keys};
        run_ranks(2, [&](Communicator& comm) {
          Model model(shapes(), recipe);
          Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
          std::vector<double> scales, expected{65536};
          for (double x = 32768; x >= 1; x /= 2) expected.push_back(x);
          for (std::size_t i = 0; i < expected.size(); ++i) {
            add_constant(engine, 0, comm.rank() == 1 ? INFINITY : 1.0);
            add_constant(engine, 2, NAN);
            scales.push_back(engine.step().next_loss_scale);
          }
          EXPECT_EQ(scales, expected) << acc << stage;
          add_constant(engine, 0, comm.rank() == 1 ? INFINITY : 1.0);
          add_constant(engine, 2, comm.rank() == 0 ? NAN : 1.0);
          const Snapshot before = snapshot(engine, model);
          try {
            engine.step();
            ADD_FAILURE() << "no error at the floor";
          } catch (const NumericError& e) {
            const std::string text = e.what();
            EXPECT_NE(text.find("a"), std::string::npos);
            for (const char* part : {"floor", "(1)", "min_loss_scale", "parameters: c"}) {
              EXPECT_NE(text.find(part), std::string::npos) << text;
            }
          }
          EXPECT_EQ(snapshot(engine, model), before);
        });
      }
    }
  }
}

TEST(EngineOverflow, Case17_CleanStepsRaiseTheScale) {
  const Recipe recipe{
      .model = "fp16",
      .fp16 = R"("initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1)"};
  const auto comm = make_self_communicator();
  Model model(shapes(), recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  std::vector<double> scales;
  for (const bool bad : {false, false, false, false, true, false, false, false, false}) {
    add_constant(engine, 0, bad ? INFINITY : engine.loss_scale());
    const StepReport report = engine.step();
    EXPECT_TRUE(bad || std::fabs(report.grad_norm - std::sqrt(600.0)) < 1e-9);  // unscaled
    scales.push_back(report.next_loss_scale);
  }
  EXPECT_EQ(scales, (std::vector<double>{16, 16, 32, 32, 16, 16, 16, 32, 32}));
}

// Hysteresis comes back with growth, or with every clean step if the key says so.
TEST(EngineOverflow, Case17_Hysteresis) {
  for (const bool consecutive : {false, true}) {
    const Recipe recipe{.model = "fp16",
                        .fp16 = fmt::format(R"("initial_scale_power": 8, "hysteresis": 2,
                            "loss_scale_window": 100, "consecutive_hysteresis": {})",
                                            consecutive)};
    const auto comm = make_self_communicator();
    Model model(shapes(), recipe);
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
    std::vector<double> scales;
    for (const bool bad : {true, false, true, false, true, true}) {
      add_constant(engine, 0, bad ? INFINITY : 1.0);
      scales.push_back(engine.step().next_loss_scale);
    }
    EXPECT_EQ(scales, consecutive ? (std::vector<double>{256, 256, 256, 256, 256, 128})
                                  : (std::vector<double>{256, 256, 128, 128, 64, 32}));
  }
}

TEST(EngineOverflow, Case17_StaticScaleStaysAndSkips) {
  const Recipe recipe{.model = "fp16", .fp16 = R"("loss_scale": 32)"};
  const auto comm = make_self_communicator();
  Model model(shapes(), recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  for (int i = 1; i <= 5; ++i) {
    add_constant(engine, 0, INFINITY);
    EXPECT_EQ(engine.step().next_loss_scale, 32);
    EXPECT_EQ(engine.skipped_steps(), i);
  }
}

// An fp16 weight that would leave fp16 is a skip on all ranks, whatever its master; just below the
// end it is not. No weight ever becomes infinite.
TEST(EngineOverflow, Fp16WeightsNeverBecomeInfinite) {
  for (const char* master : {"none", "bits8", "bits16", "fp32"}) {
    for (const int stage : {0, 1, 2}) {
      for (const double step : {8.0, 14.0, 15.5, 15.96, 15.97, 16.0, 24.0, 100.0, 1e6}) {
        for (const double start : {65504.0, -65504.0, 65472.0, 65376.0}) {
          const Recipe recipe{.model = "fp16",
                              .stage = stage,
                              .lr = step,
                              .fp16 = R"("loss_scale": 1)",
                              .zerofp8 = fmt::format(R"("master_weights": "{}")", master)};
          run_ranks(2, [&](Communicator& comm) {
            Model model(shapes(), recipe, [&](std::size_t i, std::size_t j) {
              return i == 0 && j == 599 ? start : 1.0;
            });
            Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
            const double towards = start > 0 ? -1.0 : 1.0;
            add_constant(engine, 0, towards);
            const StepReport report = engine.step();
            const bool leaves = std::fabs(start) + step > 65504 * (1 + 1e-6);
            EXPECT_EQ(report.applied, !leaves) << master << " " << start << " + " << step;
            EXPECT_TRUE(report.bad_parameter.empty());
            EXPECT_EQ(report.next_loss_scale, 1);
            EXPECT_EQ(engine.step_of(0), leaves ? 0 : 1);
            for (std::size_t j = 0; j < 600; ++j) ASSERT_TRUE(std::isfinite(model.at(0, j)));
            EXPECT_TRUE(!leaves || model.at(0, 599) == start);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
