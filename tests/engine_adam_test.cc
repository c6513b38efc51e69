// Cases 4, 30, 31: which Adam runs, its step counter and scalars, and its epsilon.
#include <map>

#include "src/optim/adam_scalars.h"
#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

// Weight 0 of a 2-D parameter of `elements` equal weights after steps with the same gradient.
double after(const Recipe& recipe, double p, double g, int steps, std::int64_t elements = 2,
             bool has_gradient = true) {
  const auto comm = make_self_communicator();
  Model model({{.name = "w", .shape = {1, elements}}}, recipe,
              [&](std::size_t, std::size_t) { return p; });
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  for (int t = 0; t < steps; ++t) {
    if (has_gradient) add_constant(engine, 0, g * engine.loss_scale());
    EXPECT_TRUE(engine.step().applied);
  }
  return model.at(0, std::size_t(elements) - 1);
}

TEST(EngineAdam, Case04_DecoupledDecayAndL2) {
  for (const char* level : {"O0", "O2", "O3"}) {
    for (const int stage : {0, 1, 2}) {
      Recipe recipe{.stage = stage, .level = level, .lr = 0.1, .weight_decay = 0.1};
      EXPECT_NEAR(after(recipe, 1, 0, 1), 0.99, 1e-7) << level;
      recipe.algorithm = "Adam";
      const auto effective = recipe.settings(1).adam.value.algorithm;
      // "Adam" alone follows DeepSpeed's decoupled default, or L2; in either case it can be asked.
      EXPECT_NEAR(after(recipe, 1, 0, 1), effective == Algorithm::kAdam ? 0.9 : 0.99, 1e-6);
    }
  }
  const auto settings = [](const std::string& type, const std::string& mode) {
    return resolve(Config::parse(fmt::format(
                       R"({{"train_batch_size": 1, "optimizer": {{"type": "{}", "params":
                       {{"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": {}}}}}}})",
                       type, mode)),
                   {});
  };
  EXPECT_THROW(settings("AdamW", "false"), ConfigError);
  EXPECT_EQ(settings("Adam", "false").adam.value.algorithm, Algorithm::kAdam);
  EXPECT_EQ(settings("Adam", "true").adam.value.algorithm, Algorithm::kAdamW);
}

TEST(EngineAdam, Case04_L2IsAddedToTheGradient) {
  for (const char* model_dtype : {"fp32", "bf16"}) {
    const Recipe recipe{.model = model_dtype, .stage = 1, .lr = 0.1, .weight_decay = 0.1};
    run_ranks(2, [&](Communicator& comm) {
      Model model({{.name = "w", .shape = {130}}}, recipe,
                  [](std::size_t, std::size_t) { return 1.0; });
      EngineOptions options = quiet();
      options.groups = {{.algorithm = Algorithm::kAdam, .lr = 0.1, .weight_decay = 0.1}};
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, options);
      ref::Adam64 reference{.p = 1};
      for (int t = 0; t < 20; ++t) {
        add_constant(engine, 0, 0.01 * t);
        engine.step();
        reference.step(0.01 * t, {.lr = 0.1, .weight_decay = 0.1, .decoupled = false});
      }
      for (const float x : engine.full_state(0, StateKind::kMaster)) {
        EXPECT_NEAR(x, reference.p, 2e-6);
      }
    });
  }
}

// Case 30: 1,000 steps down from 1; the counter and its scalars are not kept in narrow formats.
TEST(EngineAdam, Case30_ThousandStepsWithEveryStateDtype) {
  const std::map<std::string, double> first = {
      {"fp32", 0}, {"bf16", 0.0245}, {"fp16", 0.0031}, {"fp8_e4m3", 1e-4}};
  const std::map<std::string, double> second = {
      {"fp32", 0}, {"bf16", 0.1}, {"fp16", 0.0125}, {"fp8_ue4m4", 1e-4}};
  for (const char* m : {"fp32", "bf16", "fp16", "fp8_e4m3"}) {
    for (const char* v : {"fp32", "bf16", "fp16", "fp8_ue4m4"}) {
      const Recipe recipe{
          .zerofp8 = fmt::format(
              R"("fp32_moments_below": 0, "exp_avg_dtype": "{}", "exp_avg_sq_dtype": "{}")", m, v)};
      // One value per block has the largest code of the 8-bit formats, which are exact here. A
      // first moment rounded to nearest stalls half an ulp / (1 - beta1) short of 0.1: 2.44 % in
      // bf16. A root's stochastic errors walk: ulp / 2 * sqrt(sum of 0.999^2k) = 5 % at the end of
      // the path in bf16 and half of it on average, times 4.
      EXPECT_LE(std::fabs(after(recipe, 1, 0.1, 1000)), 3e-5 + first.at(m) + second.at(v))
          << m << " " << v;
    }
  }
  for (const char* model : {"bf16", "fp16"}) {
    for (const char* master : {"bits8", "bits16", "fp32", "none"}) {
      const Recipe recipe{.model = model,
                          .fp16 = R"("loss_scale": 256)",
                          .zerofp8 = fmt::format(R"("master_weights": "{}")", master)};
      // bf16 + 8 bits: at most 1,000 roundings of 2^-16 at 1, less as p falls.
      const bool bits8 = std::string(master) == "bits8" && std::string(model) == "bf16";
      const double tolerance = std::string(master) == "none" ? 0.1 : bits8 ? 0.015 : 1e-3;
      EXPECT_LE(std::fabs(after(recipe, 1, 0.1, 1000)), tolerance) << model << master;
    }
  }
}

TEST(EngineAdam, Case30_CounterAndScalars) {
  AdamOptions options;
  std::int64_t step = std::int64_t{1} << 24;
  double guard = 1;
  advance(options, step, guard);
  EXPECT_EQ(step, (std::int64_t{1} << 24) + 1);
  step = (std::int64_t{1} << 40);
  advance(options, step, guard);
  EXPECT_EQ(step, (std::int64_t{1} << 40) + 1);
  const AdamScalars late = adam_scalars(options, step, 0);
  EXPECT_EQ(late.step_size, 1e-3f);
  EXPECT_EQ(late.inv_sqrt_bc2, 1.0f);
  const AdamScalars s = adam_scalars(options, 1000, 0);
  EXPECT_NEAR(1.0 / double(s.inv_sqrt_bc2) / double(s.inv_sqrt_bc2), 0.63230458, 1e-7);
}

// Case 31: zero gradients give exactly zero updates, epsilon is outside of the root.
TEST(EngineAdam, Case31_ZeroGradientsAndEpsilon) {
  for (const char* model : {"fp32", "bf16", "fp16"}) {
    for (const char* acc : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
      for (const char* level : {"O0", "O1", "O2", "O3"}) {
        const Recipe recipe{.model = model,
                            .level = level,
                            .accumulation = acc,
                            .zerofp8 = R"("fp32_moments_below": 0)"};
        EXPECT_EQ(after(recipe, 0.5, 0, 3, 130), 0.5) << model << acc << level;
      }
    }
  }
  for (const char* algorithm : {"Adam", "AdamW"}) {
    const Recipe recipe{.algorithm = algorithm};
    EXPECT_NEAR(after(recipe, 0, 1e-9, 1) / -1e-3, 1e-9 / (1e-9 + 1e-8), 1e-7);
    EXPECT_NEAR(after(recipe, 0, 1e-8, 1) / -1e-3, 0.5, 1e-6);
    EXPECT_NEAR(after(recipe, 0, 1e-2, 1) / -1e-3, 1.0, 2e-6);
  }
}

// Hyper-parameters may change every step, per group.
TEST(EngineAdam, GroupsFollowTheirOwnHyperParameters) {
  const Recipe recipe{.stage = 2};
  run_ranks(2, [&](Communicator& comm) {
    Model model({{.name = "a", .shape = {3}}, {.name = "b", .shape = {200}, .group = 1}}, recipe,
                [](std::size_t, std::size_t) { return 1.0; });
    EngineOptions options = quiet();
    options.groups = {{.lr = 0.01}, {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.99}};
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, options);
    EXPECT_EQ(engine.group_count(), 2);
    EXPECT_THROW(engine.group(2), ArgumentError);
    ref::Adam64 a{.p = 1}, b{.p = 1};
    for (int t = 0; t < 10; ++t) {
      engine.group(0).lr = 0.01 * (t + 1);
      engine.group(1).beta1 = t < 5 ? 0.8 : 0.9;
      const double g = std::sin(t + 1.0);
      add_constant(engine, 0, g);
      add_constant(engine, 1, g);
      engine.step();
      a.step(g, {.lr = 0.01 * (t + 1)});
      // Adam64 has one beta for all steps, and so has the bias correction of the engine's step t.
      b.step(g, {.lr = 0.02, .beta1 = t < 5 ? 0.8 : 0.9, .beta2 = 0.99});
    }
    EXPECT_NEAR(model.at(0, 2), a.p, 1e-6);
    EXPECT_NEAR(model.at(1, 199), b.p, 1e-6);
  });
}

}  // namespace
}  // namespace zerofp8::test
