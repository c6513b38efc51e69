// Every cell of the support table that resolves with stages 0 to 2, in every wire dtype and level.
// What is compared and how the bounds are derived: engine_matrix.h.
#include "tests/engine_matrix.h"

namespace zerofp8::test {
namespace {

struct Place {
  int stage;
  bool sharded;
};
constexpr Place kPlaces[] = {{0, false}, {1, false}, {1, true}, {2, true}};
constexpr const char* kModels[] = {"fp32", "bf16", "fp16"};
constexpr const char* kWires[] = {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"};
constexpr const char* kLevels[] = {"O0", "O1", "O2", "O3"};

struct CellParam {
  const char* model;
  const char* accumulation;
  bool error_feedback;
  Place place;
};

class EngineMatrix : public testing::TestWithParam<CellParam> {};

// Every wire and level of one cell; ranks, micro-batches, clipping, bucket sizes, overlap and which
// moments stay FP32 change along so that each is met in every row.
TEST_P(EngineMatrix, ThreeStepsEqualFloat64) {
  const CellParam& cell = GetParam();
  int index = cell.place.stage + (cell.place.sharded ? 1 : 0) + cell.model[0];
  for (const char* wire : kWires) {
    for (const char* level : kLevels) {
      ++index;
      Recipe recipe{.model = cell.model,
                    .stage = cell.place.stage,
                    .level = level,
                    .accumulation = cell.accumulation,
                    .sharded = cell.place.sharded,
                    .error_feedback = cell.error_feedback,
                    .wire = wire,
                    .micro_batches = 2 + index % 2,
                    .weight_decay = 0.01,
                    .clipping = index % 5 == 0 ? 0.5 : 0,
                    .fp16 = R"("loss_scale": 128)"};
      if (index % 2 == 0) recipe.zerofp8 = R"("fp32_moments_below": 0)";
      if (index % 3 == 0) recipe.zero = R"("overlap_comm": true, "reduce_bucket_size": 300)";
      const int ranks = 2 + index % 3;
      SCOPED_TRACE(recipe.name() + fmt::format(" on {} ranks", ranks));
      run_ranks(ranks, [&](Communicator& comm) { check_cell(recipe, comm); });
      if (testing::Test::HasFailure()) return;
    }
  }
}

std::vector<CellParam> cells() {
  std::vector<CellParam> list;
  for (const char* model : kModels) {
    for (const Place& place : kPlaces) {
      for (const char* acc : kWires) list.push_back({model, acc, false, place});
      for (const char* acc : {"fp8_e4m3", "fp8_e5m2"}) list.push_back({model, acc, true, place});
    }
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cells, EngineMatrix, testing::ValuesIn(cells()), [](const auto& param_info) {
  const CellParam& c = param_info.param;
  return fmt::format("{}_acc_{}{}_{}_stage{}", c.model, c.accumulation,
                     c.error_feedback ? "_feedback" : "", c.place.sharded ? "sharded" : "local",
                     c.place.stage);
});

// Master "none" rounds stochastically into the weight: within one ulp of what float64 gives, per
// step.
TEST(EngineMatrixMasters, EveryMasterOfEveryModel) {
  int index = 0;
  for (const char* model : {"bf16", "fp16"}) {
    for (const char* master : {"none", "bits8", "bits16", "fp32"}) {
      for (const char* level : kLevels) {
        Recipe recipe{.model = model,
                      .stage = index % 3,
                      .level = level,
                      .micro_batches = 2,
                      .fp16 = R"("loss_scale": 128)",
                      .zerofp8 = fmt::format(R"("fp32_moments_below": {}, "master_weights": "{}")",
                                             index % 2 == 0 ? 0 : 4096, master)};
        SCOPED_TRACE(recipe.name() + " master " + master);
        run_ranks(2 + index++ % 3, [&](Communicator& comm) { check_cell(recipe, comm); });
        if (HasFailure()) return;
      }
    }
  }
}

// All pairs of moment dtypes, not only those of the levels.
TEST(EngineMatrixMoments, EveryPairOfDtypes) {
  int index = 0;
  for (const char* m : {"fp32", "bf16", "fp16", "fp8_e4m3"}) {
    for (const char* v : {"fp32", "bf16", "fp16", "fp8_ue4m4"}) {
      for (const double beta1 : {0.9, 0.95}) {
        Recipe recipe{
            .stage = index % 3,
            .micro_batches = 2,
            .beta1 = beta1,
            .zerofp8 = fmt::format(
                R"("fp32_moments_below": 0, "exp_avg_dtype": "{}", "exp_avg_sq_dtype": "{}")", m,
                v)};
        SCOPED_TRACE(fmt::format("exp_avg {} exp_avg_sq {} beta1 {}", m, v, beta1));
        run_ranks(2 + index++ % 3, [&](Communicator& comm) { check_cell(recipe, comm); });
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
