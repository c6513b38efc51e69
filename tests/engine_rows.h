// Set-ups in which two ways of running an engine are compared bit by bit.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine_device.h"

namespace zerofp8::test {

struct Row {
  const char* name;
  Recipe recipe;
  int ranks = 2;
  std::vector<AdamOptions> groups;  // parameters take turns among them; empty: one group

  std::vector<ParameterSpec> specs() const {
    std::vector<ParameterSpec> list = odd_shapes();
    for (std::size_t i = 0; i < list.size() && !groups.empty(); ++i) {
      list[i].group = static_cast<int>(i % groups.size());
    }
    return list;
  }
  EngineOptions options(const Model& model) const {
    EngineOptions options = options_on(model);
    options.groups = groups;
    return options;
  }
};
inline std::vector<Row> rows() {
  std::vector<Row> all;
  const auto add = [&](const char* name, Recipe recipe, int ranks = 2) {
    recipe.micro_batches = std::max(recipe.micro_batches, 2);
    recipe.clipping = 0.5;
    all.push_back({name, std::move(recipe), ranks});
  };
  const std::string small = R"("fp32_moments_below": 0)";
  add("fp32_O0", {.level = "O0"});
  add("bf16_O0_stage1", {.model = "bf16", .stage = 1, .level = "O0"}, 3);
  add("bf16_O1_stage1", {.model = "bf16", .stage = 1, .level = "O1"}, 3);
  add("bf16_O2_alone", {.model = "bf16", .stage = 1, .level = "O2", .zerofp8 = small}, 1);
  add("bf16_O2_stage2", {.model = "bf16", .stage = 2, .level = "O2", .zerofp8 = small}, 3);
  add("bf16_O3_stage0", {.model = "bf16", .stage = 0, .level = "O3", .zerofp8 = small}, 2);
  add("bf16_O2_no_overlap",
      {.model = "bf16", .stage = 2, .level = "O2", .zero = R"("overlap_comm": false)"}, 2);
  add("bf16_small_buckets", {.model = "bf16",
                             .stage = 1,
                             .level = "O3",
                             .zero = R"("reduce_bucket_size": 600, "allgather_bucket_size": 600)",
                             .zerofp8 = small});
  add("bf16_no_master", {.model = "bf16",
                         .stage = 1,
                         .level = "O2",
                         .zerofp8 = small + R"(, "master_weights": "none")"});
  add("bf16_fp32_master",
      {.model = "bf16", .stage = 1, .level = "O2", .zerofp8 = R"("master_weights": "fp32")"});
  add("feedback", {.model = "bf16",
                   .stage = 1,
                   .level = "O2",
                   .accumulation = "fp8",
                   .error_feedback = true,
                   .zerofp8 = small});
  add("feedback_sharded", {.model = "bf16",
                           .stage = 2,
                           .level = "O2",
                           .accumulation = "fp8",
                           .error_feedback = true,
                           .zerofp8 = small});
  add("fp16_dynamic",
      {.model = "fp16", .stage = 1, .level = "O2", .fp16 = R"("initial_scale_power": 8)"});
  add("fp16_accumulator", {.model = "fp16",
                           .stage = 1,
                           .accumulation = "fp16",
                           .wire = "fp16",
                           .fp16 = R"("loss_scale": 16)"});
  add("many_micro_batches",
      {.model = "bf16", .stage = 2, .level = "O2", .micro_batches = 20, .zerofp8 = small});
  add("hybrid",
      {.model = "bf16",
       .stage = 1,
       .level = "O2",
       .zero = R"("zero_hpz_partition_size": 2)",
       .zerofp8 = small},
      4);
  add("two_level",
      {.model = "bf16",
       .stage = 1,
       .level = "O2",
       .zerofp8 = small + R"(, "two_level_reduce_scatter": {"ranks_per_node": 2})"},
      4);
  add("three_groups", {.model = "bf16", .stage = 2, .level = "O2", .zerofp8 = small}, 3);
  all.back().groups = {{},
                       {.algorithm = Algorithm::kAdam,
                        .lr = 3e-4,
                        .beta1 = 0.8,
                        .beta2 = 0.95,
                        .eps = 1e-6,
                        .weight_decay = 0.1},
                       {.lr = 2e-3, .beta1 = 0.95, .beta2 = 0.99, .weight_decay = 0.01}};
  return all;
}

// Three steps, one of them skipped; then what every rank holds, and its norms.
struct RunResult {
  Snapshot state;
  std::vector<double> norms, of_parameters;
  std::vector<float> gradient;
  std::vector<std::string> told;
  std::vector<std::uint64_t> wire;  // payload bytes of applied steps
  bool operator==(const RunResult&) const = default;
};
inline std::vector<RunResult> train(const Row& row, Where where, bool capturable = false) {
  std::vector<RunResult> runs(static_cast<std::size_t>(row.ranks));
  run_ranks(row.ranks, [&](Communicator& comm) {
    Model model(row.specs(), row.recipe, Model::sines, device_at(where));
    EngineOptions options = row.options(model);
    options.capturable = capturable;
    Engine engine(row.recipe.settings(row.ranks), model.parameters(), {.data = &comm}, options);
    RunResult& run = runs[static_cast<std::size_t>(comm.rank())];
    for (int t = 0; t < 4; ++t) {
      if (t == 2 && comm.rank() == 0) add_constant(engine, 1, INFINITY);
      if (t == 3) {  // looked at before the step, and a parameter that had two gradients
        add_constant(engine, 5, 0.25, DType::kBf16);
        add_constant(engine, 5, 0.5, DType::kBf16);
        engine.reduce_gradients();
        run.of_parameters = engine.gradient_norms();
        run.gradient = engine.full_state(5, StateKind::kGradient);
        run.norms.push_back(engine.step().grad_norm);
        continue;
      }
      const StepReport report = made_up_step(engine, t, comm.rank(), row.recipe.dtype());
      EXPECT_EQ(report.applied, t != 2);
      if (t != 2) run.norms.push_back(report.grad_norm);
      run.told.push_back(report.skip_reason + " " + report.bad_parameter);
      if (report.applied) run.wire.push_back(report.wire.total_payload());
    }
    run.state = snapshot(engine, model);
  });
  return runs;
}

}  // namespace zerofp8::test
