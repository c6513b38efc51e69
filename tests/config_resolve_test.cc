// Levels, origins, contradictions, batch sizes, optimizer and loss scale.
#include <gtest/gtest.h>

#include <ostream>

#include "config_util.h"

namespace zerofp8 {
namespace {

using M = MasterWeights;
using D = DType;

std::string flags(const std::string& model) {
  return model == "fp32" ? "" : "\"" + model + "\":{\"enabled\":true},";
}

// The levels of the design, typed again.
struct LevelRow {
  const char* level;
  const char* model;
  D accumulation, wire;
  M master;
  D exp_avg, exp_avg_sq;
};

void PrintTo(const LevelRow& row, std::ostream* out) { *out << row.level << " " << row.model; }

class Levels : public testing::TestWithParam<LevelRow> {};

TEST_P(Levels, StandForTheseDtypes) {
  const LevelRow& row = GetParam();
  const Settings s =
      settings_of("{" + flags(row.model) + "\"zerofp8\":{\"opt_level\":\"" + row.level + "\"}}");
  EXPECT_EQ(s.accumulation.value, row.accumulation);
  EXPECT_EQ(s.gradient_wire.value, row.wire);
  EXPECT_EQ(s.master.value, row.master);
  EXPECT_EQ(s.exp_avg.value, row.exp_avg);
  EXPECT_EQ(s.exp_avg_sq.value, row.exp_avg_sq);
  for (const Origin origin : {s.accumulation.origin, s.gradient_wire.origin, s.exp_avg.origin}) {
    EXPECT_EQ(origin, Origin::kLevel);
  }
  EXPECT_EQ(s.accumulation.where, row.level);
}

INSTANTIATE_TEST_SUITE_P(
    Design, Levels,
    testing::Values(LevelRow{"O0", "bf16", D::kFp32, D::kFp32, M::kBits16, D::kFp32, D::kFp32},
                    LevelRow{"O1", "bf16", D::kE4m3, D::kE4m3, M::kBits16, D::kFp32, D::kFp32},
                    LevelRow{"O2", "bf16", D::kE4m3, D::kE4m3, M::kBits8, D::kE4m3, D::kFp16},
                    LevelRow{"O3", "bf16", D::kE4m3, D::kE4m3, M::kBits8, D::kE4m3, D::kUe4m4},
                    LevelRow{"O0", "fp16", D::kFp32, D::kFp32, M::kFp32, D::kFp32, D::kFp32},
                    LevelRow{"O1", "fp16", D::kE4m3, D::kE4m3, M::kBits16, D::kFp32, D::kFp32},
                    LevelRow{"O2", "fp16", D::kE4m3, D::kE4m3, M::kBits8, D::kE4m3, D::kFp16},
                    LevelRow{"O3", "fp16", D::kE4m3, D::kE4m3, M::kBits8, D::kE4m3, D::kUe4m4},
                    LevelRow{"O0", "fp32", D::kFp32, D::kFp32, M::kNone, D::kFp32, D::kFp32},
                    LevelRow{"O1", "fp32", D::kE4m3, D::kE4m3, M::kNone, D::kFp32, D::kFp32},
                    LevelRow{"O2", "fp32", D::kE4m3, D::kE4m3, M::kNone, D::kE4m3, D::kFp16},
                    LevelRow{"O3", "fp32", D::kE4m3, D::kE4m3, M::kNone, D::kE4m3, D::kUe4m4}),
    [](const auto& row) { return std::string(row.param.level) + "_" + row.param.model; });

TEST(Defaults, NoLevelAndNoKeyIsO0) {
  const Settings s = settings_of("{}");
  EXPECT_EQ(s.opt_level.value, OptLevel::kO0);
  EXPECT_EQ(s.weight.value, D::kFp32);
  EXPECT_EQ(s.stage.value, 0);
  EXPECT_EQ(s.accumulation.value, D::kFp32);
  EXPECT_EQ(s.gradient_wire.value, D::kFp32);
  EXPECT_EQ(s.weight_wire.value, D::kFp32);
  EXPECT_EQ(s.master.value, M::kNone);
  EXPECT_EQ(s.master.where, "the weight is its own master");
  EXPECT_EQ(s.block_size.value, 128);
  EXPECT_EQ(s.seed.value, 0U);
  EXPECT_EQ(s.fp32_moments_below.value, 4096);
  EXPECT_EQ(s.reduce_bucket_size.value, 500'000'000);
  EXPECT_EQ(s.allgather_bucket_size.value, 500'000'000);
  EXPECT_EQ(s.gradient_clipping.value, 0.0);
  EXPECT_FALSE(s.overlap_comm.value);
  EXPECT_FALSE(s.loss_scale.value.enabled);
  EXPECT_EQ(s.batch.accumulation_steps, 1);
  EXPECT_EQ(s.adam.value.algorithm, Algorithm::kAdamW);
  EXPECT_EQ(s.adam.value.lr, 1e-3);
  EXPECT_EQ(s.adam.value.beta1, 0.9);
  EXPECT_EQ(s.adam.value.beta2, 0.999);
  EXPECT_EQ(s.adam.value.eps, 1e-8);
  EXPECT_EQ(s.adam.value.weight_decay, 0.0);
  EXPECT_EQ(s.accumulation.origin, Origin::kDefault);
  EXPECT_TRUE(s.warnings.empty());
}

TEST(Origins, AnExplicitKeyWinsOverTheLevel) {
  const Settings s = settings_of(R"({"bf16":{"enabled":true},"gradient_accumulation_dtype":"bf16",
      "zerofp8":{"opt_level":"O3","exp_avg_sq_dtype":"bf16","master_weights":"none"}})");
  EXPECT_EQ(s.accumulation.value, D::kBf16);
  EXPECT_EQ(s.accumulation.origin, Origin::kKey);
  EXPECT_EQ(s.accumulation.where, "/gradient_accumulation_dtype");
  EXPECT_EQ(s.exp_avg_sq.value, D::kBf16);
  EXPECT_EQ(s.exp_avg_sq.where, "/zerofp8/exp_avg_sq_dtype");
  EXPECT_EQ(s.master.value, M::kNone);
  EXPECT_EQ(s.master.origin, Origin::kKey);
  EXPECT_EQ(s.exp_avg.value, D::kE4m3);
  EXPECT_EQ(s.exp_avg.origin, Origin::kLevel);
  EXPECT_EQ(s.weight.where, "/bf16/enabled");
}

TEST(Origins, TheLevelMayBeAnArgument) {
  Arguments arguments;
  arguments.opt_level = OptLevel::kO2;
  const Settings s = settings_of("{}", {}, arguments);
  EXPECT_EQ(s.opt_level.origin, Origin::kArgument);
  EXPECT_EQ(s.exp_avg.value, D::kE4m3);
  EXPECT_EQ(s.exp_avg.origin, Origin::kLevel);
  EXPECT_EQ(settings_of(R"({"zerofp8":{"opt_level":"O2"}})", {}, arguments).exp_avg.value,
            D::kE4m3);
  const ConfigError error = error_of(R"({"zerofp8":{"opt_level":"O1"}})", {}, arguments);
  EXPECT_EQ(error.pointer(), "/zerofp8/opt_level");
  EXPECT_MENTIONS(error.what(), "argument opt_level says O2");
}

// Two spellings of one setting: both pointers in the error.
struct Contradiction {
  const char* name;
  const char* text;
  const char* first;
  const char* second;
};

void PrintTo(const Contradiction& row, std::ostream* out) { *out << row.name; }

class Contradictions : public testing::TestWithParam<Contradiction> {};

TEST_P(Contradictions, NameBothKeys) {
  const ConfigError error = error_of(GetParam().text, {.data_ranks = 8});
  EXPECT_MENTIONS(error.what(), GetParam().first);
  EXPECT_MENTIONS(error.what(), GetParam().second);
  EXPECT_FALSE(is_unsupported(GetParam().text, {.data_ranks = 8}));
}

INSTANTIATE_TEST_SUITE_P(
    All, Contradictions,
    testing::Values(
        Contradiction{"accumulation", R"({"gradient_accumulation_dtype":"fp8",
                      "data_types":{"grad_accum_dtype":"fp32"}})",
                      "/gradient_accumulation_dtype", "/data_types/grad_accum_dtype"},
        Contradiction{"accumulation_long", R"({"gradient_accumulation_dtype":{"dtype":"bf16"},
                      "data_types":{"grad_accum_dtype":"fp32"}})",
                      "/gradient_accumulation_dtype/dtype", "/data_types/grad_accum_dtype"},
        Contradiction{"format", R"({"gradient_accumulation_dtype":{"dtype":"fp8_e4m3",
                      "format":"e5m2"}})",
                      "/gradient_accumulation_dtype/dtype", "/gradient_accumulation_dtype/format"},
        Contradiction{"wire", R"({"communication_data_type":"fp32",
                      "zerofp8":{"gradient_communication_dtype":"fp8"}})",
                      "/communication_data_type", "/zerofp8/gradient_communication_dtype"},
        Contradiction{"adamw", R"({"optimizer":{"type":"AdamW","params":{"adam_w_mode":false}}})",
                      "/optimizer/type", "/optimizer/params/adam_w_mode"},
        Contradiction{"shard_group", R"({"zerofp8":{"shard_group_size":2},
                      "zero_optimization":{"stage":1,"zero_hpz_partition_size":4}})",
                      "/zerofp8/shard_group_size", "/zero_optimization/zero_hpz_partition_size"},
        Contradiction{"both_flags", R"({"bf16":{"enabled":true},"fp16":{"enabled":true}})",
                      "/bf16/enabled", "/fp16/enabled"},
        Contradiction{"param_dtype", R"({"bf16":{"enabled":true},
                      "data_types":{"param_dtype":"fp16"}})",
                      "/data_types/param_dtype", "/bf16/enabled"},
        Contradiction{"sharded", R"({"gradient_accumulation_dtype":{"sharded":false},
                      "zero_optimization":{"stage":2}})",
                      "/gradient_accumulation_dtype/sharded", "/zero_optimization/stage"},
        Contradiction{"shard_group_stage0", R"({"zerofp8":{"shard_group_size":2}})",
                      "/zerofp8/shard_group_size", "/zero_optimization/stage"},
        Contradiction{"hpz_stage0", R"({"zero_optimization":{"zero_hpz_partition_size":2}})",
                      "/zero_optimization/zero_hpz_partition_size", "/zero_optimization/stage"},
        Contradiction{"error_feedback", R"({"gradient_accumulation_dtype":{"dtype":"bf16",
                      "error_feedback":true}})",
                      "/gradient_accumulation_dtype/error_feedback", "bf16"},
        Contradiction{"format_without_fp8", R"({"gradient_accumulation_dtype":{"dtype":"fp32",
                      "format":"e4m3"}})",
                      "/gradient_accumulation_dtype/format", "fp32"},
        Contradiction{"loss_scale_floor", R"({"fp16":{"enabled":true,"initial_scale_power":4,
                      "min_loss_scale":32}})",
                      "/fp16/min_loss_scale", "/fp16/initial_scale_power"}),
    [](const auto& row) { return std::string(row.param.name); });

TEST(Contradictions, TheSameMeaningTwiceIsFine) {
  const Settings s = settings_of(R"({"gradient_accumulation_dtype":"bf16",
      "data_types":{"grad_accum_dtype":"bfloat16"},"communication_data_type":"half",
      "zerofp8":{"gradient_communication_dtype":"fp16","shard_group_size":2},
      "zero_optimization":{"stage":1,"zero_hpz_partition_size":2}})",
                                 {.data_ranks = 4});
  EXPECT_EQ(s.accumulation.value, D::kBf16);
  EXPECT_EQ(s.gradient_wire.value, D::kFp16);
  EXPECT_EQ(s.shard_ranks.value, 2);
}

TEST(Accumulation, LongFormAndFormats) {
  Settings s = settings_of(R"({"gradient_accumulation_dtype":{"dtype":"fp8","sharded":true,
      "error_feedback":true,"format":"e5m2"},"zero_optimization":{"stage":1}})");
  EXPECT_EQ(s.accumulation.value, D::kE5m2);
  EXPECT_TRUE(s.accumulation_sharded.value);
  EXPECT_EQ(s.accumulation_sharded.where, "/gradient_accumulation_dtype/sharded");
  EXPECT_TRUE(s.error_feedback.value);
  s = settings_of(
      R"({"gradient_accumulation_dtype":{"format":"e5m2"},"zerofp8":{"opt_level":"O1"}})");
  EXPECT_EQ(s.accumulation.value, D::kE5m2);
  EXPECT_EQ(s.gradient_wire.value, D::kE5m2);  // the level's fp8 takes the accumulator's format
  EXPECT_EQ(settings_of(R"({"gradient_accumulation_dtype":"fp8"})").accumulation.value, D::kE4m3);
}

TEST(Accumulation, ShardingFollowsTheStage) {
  for (const int stage : {0, 1, 2}) {
    const Settings s =
        settings_of("{\"zero_optimization\":{\"stage\":" + std::to_string(stage) + "}}");
    EXPECT_EQ(s.accumulation_sharded.value, stage == 2);
    EXPECT_EQ(s.accumulation_sharded.origin, Origin::kDefault);
  }
}

TEST(Wire, Fp8TakesTheAccumulatorsFormat) {
  const auto wire = [](const std::string& accumulation, const std::string& key) {
    return settings_of("{\"gradient_accumulation_dtype\":\"" + accumulation +
                       "\",\"zerofp8\":{\"gradient_communication_dtype\":\"" + key + "\"}}")
        .gradient_wire.value;
  };
  EXPECT_EQ(wire("fp32", "fp8"), D::kE4m3);
  EXPECT_EQ(wire("fp8_e5m2", "fp8"), D::kE5m2);
  EXPECT_EQ(wire("fp8_e4m3", "fp8"), D::kE4m3);
  EXPECT_EQ(wire("fp8_e5m2", "fp8_e4m3"), D::kE4m3);
  EXPECT_EQ(wire("fp32", "fp8_e5m2"), D::kE5m2);
  EXPECT_EQ(wire("fp8", "bf16"), D::kBf16);
}

TEST(Wire, OnlyTheWeightsOwnDtypeIsGathered) {
  EXPECT_EQ(settings_of(R"({"bf16":{"enabled":true},
      "zerofp8":{"weight_communication_dtype":"bf16"}})")
                .weight_wire.value,
            D::kBf16);
  EXPECT_THROW(settings_of(R"({"zerofp8":{"weight_communication_dtype":"fp8"}})"),
               UnsupportedError);
}

TEST(Moments, Fp8OfTheSecondIsUnsigned) {
  for (const char* text : {"fp8", "fp8_ue4m4"}) {
    const Settings s = settings_of(std::string("{\"zerofp8\":{\"exp_avg_sq_dtype\":\"") + text +
                                   "\",\"exp_avg_dtype\":\"fp8\"}}");
    EXPECT_EQ(s.exp_avg_sq.value, D::kUe4m4);
    EXPECT_EQ(s.exp_avg.value, D::kE4m3);
  }
  EXPECT_EQ(error_of(R"({"zerofp8":{"exp_avg_sq_dtype":"fp8_e4m3"}})").pointer(),
            "/zerofp8/exp_avg_sq_dtype");
  EXPECT_EQ(error_of(R"({"zerofp8":{"exp_avg_dtype":"fp8_e5m2"}})").pointer(),
            "/zerofp8/exp_avg_dtype");
}

TEST(Master, BitsBesideAnFp32WeightAreAWarning) {
  const Settings s = settings_of(R"({"zerofp8":{"master_weights":"bits8"}})");
  EXPECT_EQ(s.master.value, M::kNone);
  ASSERT_EQ(s.warnings.size(), 1U);
  EXPECT_MENTIONS(s.warnings[0], "/zerofp8/master_weights");
}

TEST(NotYet, IsToldApartFromMistakes) {
  EXPECT_THROW(settings_of(R"({"zerofp8":{"overrides":[{"pattern":"*"}]}})"), UnsupportedError);
  EXPECT_NO_THROW(settings_of(R"({"zerofp8":{"overrides":[]}})"));
  EXPECT_THROW(settings_of(R"({"zero_optimization":{"stage":3}})"), UnsupportedError);
}

TEST(ShardGroup, DividesTheDataRanks) {
  const auto ranks = [](const char* text, int world) {
    return settings_of(text, {.data_ranks = world}).shard_ranks.value;
  };
  EXPECT_EQ(ranks("{}", 8), 1);
  EXPECT_EQ(ranks(R"({"zero_optimization":{"stage":1}})", 8), 8);
  EXPECT_EQ(ranks(R"({"zero_optimization":{"stage":2,"zero_hpz_partition_size":1}})", 8), 8);
  EXPECT_EQ(ranks(R"({"zero_optimization":{"stage":2,"zero_hpz_partition_size":4}})", 8), 4);
  EXPECT_EQ(ranks(R"({"zero_optimization":{"stage":1},"zerofp8":{"shard_group_size":1}})", 8), 1);
  const ConfigError error = error_of(
      R"({"zero_optimization":{"stage":1},"zerofp8":{"shard_group_size":3}})", {.data_ranks = 8});
  EXPECT_EQ(error.given(), "3 with 8 data ranks");
  EXPECT_EQ(error_of(R"({"zero_optimization":{"stage":1},"zerofp8":{"shard_group_size":16}})",
                     {.data_ranks = 8})
                .pointer(),
            "/zerofp8/shard_group_size");
}

// train, micro, A as written (0 = absent) and as solved, for W ranks.
struct BatchRow {
  int ranks, train, micro, steps;
  int solved_train, solved_micro, solved_steps;
};

std::string batch_text(const BatchRow& row) {
  std::string text = "{\"bf16\":{}";
  if (row.train) text += ",\"train_batch_size\":" + std::to_string(row.train);
  if (row.micro) text += ",\"train_micro_batch_size_per_gpu\":" + std::to_string(row.micro);
  if (row.steps) text += ",\"gradient_accumulation_steps\":" + std::to_string(row.steps);
  return text + "}";
}

TEST(Batch, SolvedAsDeepSpeedDoes) {
  for (const BatchRow& row : {BatchRow{4, 64, 2, 8, 64, 2, 8}, BatchRow{4, 64, 2, 0, 64, 2, 8},
                              BatchRow{4, 64, 0, 8, 64, 2, 8}, BatchRow{4, 0, 2, 8, 64, 2, 8},
                              BatchRow{4, 64, 0, 0, 64, 16, 1}, BatchRow{4, 0, 2, 0, 8, 2, 1},
                              BatchRow{1, 3, 0, 0, 3, 3, 1}, BatchRow{4, 0, 0, 5, 0, 0, 5}}) {
    const BatchSizes batch = settings_of(batch_text(row), {.data_ranks = row.ranks}).batch;
    EXPECT_EQ(batch.train_batch, row.solved_train) << batch_text(row);
    EXPECT_EQ(batch.micro_batch, row.solved_micro) << batch_text(row);
    EXPECT_EQ(batch.accumulation_steps, row.solved_steps) << batch_text(row);
  }
}

TEST(Batch, DivisionsThatDoNotComeOutAreExplained) {
  for (const BatchRow& row : {BatchRow{4, 64, 2, 4}, BatchRow{4, 10, 3, 0}, BatchRow{4, 10, 0, 3},
                              BatchRow{4, 10, 0, 0}, BatchRow{4, 2, 2, 0}, BatchRow{8, 64, 2, 8}}) {
    const ConfigError error = error_of(batch_text(row), {.data_ranks = row.ranks});
    EXPECT_EQ(error.pointer(), "/train_batch_size") << batch_text(row);
    EXPECT_MENTIONS(error.what(), "data ranks (" + std::to_string(row.ranks) + ")");
  }
  EXPECT_MENTIONS(error_of(batch_text({4, 64, 2, 4}), {.data_ranks = 4}).allowed(), "= 32");
  EXPECT_THROW(settings_of(R"({"train_micro_batch_size_per_gpu":9000000000000000000,
      "gradient_accumulation_steps":9000000000000000000})"),
               ConfigError);
}

// Case 42, remark: the triple can only be checked once the number of ranks is known.
TEST(Case42Batch, IsCheckedAgainstTheRanksOfTheLaunch) {
  const Config config = Config::parse(R"({"train_batch_size":32,"gradient_accumulation_steps":2,
      "train_micro_batch_size_per_gpu":2})");
  EXPECT_NO_THROW(resolve(config, {.data_ranks = 8}));
  EXPECT_THROW(resolve(config, {.data_ranks = 16}), ConfigError);
  EXPECT_THROW(resolve(config, {.data_ranks = 1}), ConfigError);
  EXPECT_NO_THROW(resolve(config, {.data_ranks = 8, .pipeline_stages = 4, .tensor_ranks = 2}));
  EXPECT_THROW(resolve(config, {.data_ranks = 0}), ArgumentError);
}

TEST(Batch, AutoComesFromTheCaller) {
  Arguments arguments;
  arguments.auto_batch = BatchSizes{.train_batch = 0, .micro_batch = 2, .accumulation_steps = 8};
  const BatchSizes batch = settings_of(R"({"train_batch_size":"auto",
      "train_micro_batch_size_per_gpu":"auto","gradient_accumulation_steps":"auto"})",
                                       {.data_ranks = 4}, arguments)
                               .batch;
  EXPECT_EQ(batch.train_batch, 64);
  arguments.auto_batch->train_batch = 63;
  EXPECT_EQ(error_of(R"({"train_batch_size":"auto","train_micro_batch_size_per_gpu":2})",
                     {.data_ranks = 4}, arguments)
                .pointer(),
            "/train_batch_size");
}

// Case 4: which decay runs is decided by the type, visibly.
TEST(Case4Adam, TypeDecidesTheDecay) {
  const auto algorithm = [](const std::string& optimizer) {
    return settings_of("{\"optimizer\":" + optimizer + "}").adam.value.algorithm;
  };
  EXPECT_EQ(algorithm(R"({"type":"Adam"})"), Algorithm::kAdam);
  EXPECT_EQ(algorithm(R"({"type":"adam"})"), Algorithm::kAdam);
  EXPECT_EQ(algorithm(R"({"type":"AdamW"})"), Algorithm::kAdamW);
  EXPECT_EQ(algorithm(R"({"type":"ADAMW"})"), Algorithm::kAdamW);
  EXPECT_EQ(algorithm(R"({"type":"Adam","params":{"adam_w_mode":true}})"), Algorithm::kAdamW);
  EXPECT_EQ(algorithm(R"({"type":"Adam","params":{"adam_w_mode":false}})"), Algorithm::kAdam);
  EXPECT_EQ(algorithm(R"({"type":"AdamW","params":{"adam_w_mode":true}})"), Algorithm::kAdamW);
  EXPECT_EQ(algorithm(R"({"params":{"adam_w_mode":false}})"), Algorithm::kAdam);
  EXPECT_EQ(algorithm(R"({"params":{"lr":1}})"), Algorithm::kAdamW);
  EXPECT_THROW(algorithm(R"({"type":"AdamW","params":{"adam_w_mode":false}})"), ConfigError);
  const ConfigError error = error_of(R"({"optimizer":{"type":"Lion"}})");
  EXPECT_MENTIONS(error.allowed(), "\"Adam\", \"AdamW\"");
}

TEST(Case4Adam, ABareAdamWithDecayWarns) {
  const auto warnings = [](const std::string& params) {
    return settings_of("{\"optimizer\":{\"type\":\"Adam\",\"params\":" + params + "}}").warnings;
  };
  ASSERT_EQ(warnings(R"({"weight_decay":0.1})").size(), 1U);
  EXPECT_MENTIONS(warnings(R"({"weight_decay":0.1})")[0], "L2");
  EXPECT_TRUE(warnings(R"({"weight_decay":0})").empty());
  EXPECT_TRUE(warnings(R"({"weight_decay":0.1,"adam_w_mode":true})").empty());
}

TEST(Adam, HyperParametersAndTheirBounds) {
  const AdamOptions adam = settings_of(R"({"optimizer":{"type":"AdamW","params":{"lr":3e-4,
      "betas":[0.8,0.95],"eps":1e-6,"weight_decay":0.01}}})")
                               .adam.value;
  EXPECT_EQ(adam.lr, 3e-4);
  EXPECT_EQ(adam.beta1, 0.8);
  EXPECT_EQ(adam.beta2, 0.95);
  EXPECT_EQ(adam.eps, 1e-6);
  EXPECT_EQ(adam.weight_decay, 0.01);
  for (const char* params :
       {R"({"lr":-1})", R"({"betas":[0.9]})", R"({"betas":[0.9,1]})", R"({"betas":[0.9,"0.9"]})",
        R"({"betas":0.9})", R"({"betas":[-0.1,0.9]})", R"({"eps":0})", R"({"weight_decay":-1})",
        R"({"amsgrad":true})", R"({"bias_correction":false})", R"({"lr":"1e-3"})"}) {
    EXPECT_THROW(settings_of(std::string("{\"optimizer\":{\"params\":") + params + "}}"),
                 ConfigError)
        << params;
  }
}

TEST(Adam, AutoComesFromTheCaller) {
  Arguments arguments;
  arguments.auto_adam = AdamOptions{.lr = 5e-5, .beta1 = 0.7, .beta2 = 0.8, .weight_decay = 0.3};
  const AdamOptions adam = settings_of(R"({"optimizer":{"type":"Adam","params":{"lr":"auto",
      "betas":"auto","eps":1e-5,"weight_decay":"auto"}}})",
                                       {}, arguments)
                               .adam.value;
  EXPECT_EQ(adam.lr, 5e-5);
  EXPECT_EQ(adam.beta1, 0.7);
  EXPECT_EQ(adam.beta2, 0.8);
  EXPECT_EQ(adam.eps, 1e-5);
  EXPECT_EQ(adam.weight_decay, 0.3);
  EXPECT_EQ(adam.algorithm, Algorithm::kAdam);
}

// Case 5, resolution: an explicit key always wins, and without one there is one default everywhere.
TEST(Case5Accumulation, ExplicitKeyWinsInEveryCellAndTheDefaultIsOne) {
  for (const char* key : {"", "fp32", "bf16", "fp16", "fp8"}) {
    for (const int stage : {0, 1, 2}) {
      for (const int stages : {1, 4}) {
        std::string text = "{\"bf16\":{\"enabled\":true},\"zero_optimization\":{\"stage\":" +
                           std::to_string(stage) + "}";
        if (*key) text += std::string(",\"gradient_accumulation_dtype\":\"") + key + "\"";
        const Settings s = settings_of(text + "}", {.data_ranks = 2, .pipeline_stages = stages});
        const D expected = *key ? *dtype_from_string(key) : D::kFp32;
        EXPECT_EQ(s.accumulation.value, expected) << text;
        EXPECT_EQ(s.accumulation.origin, *key ? Origin::kKey : Origin::kDefault);
      }
    }
  }
}

// Case 8, resolution: absent means fp32, and every value is honoured.
TEST(Case8Wire, AbsentIsFp32AndEveryValueIsHonoured) {
  EXPECT_EQ(settings_of(R"({"bf16":{"enabled":true}})").gradient_wire.value, D::kFp32);
  for (const char* name : {"fp32", "bf16", "fp16"}) {
    const Settings s = settings_of(std::string(R"({"bf16":{"enabled":true},
        "communication_data_type":")") +
                                   name + "\"}");
    EXPECT_EQ(s.gradient_wire.value, *dtype_from_string(name));
    EXPECT_EQ(s.gradient_wire.where, "/communication_data_type");
  }
}

// Case 10, warning: sums of equal addends stop growing at 2^(mantissa bits + 1).
TEST(Case10Warning, NarrowSumsOfManyMicroBatches) {
  const auto warned = [](const std::string& dtype, int steps) {
    const Settings s =
        settings_of("{\"gradient_accumulation_dtype\":\"" + dtype +
                    "\",\"gradient_accumulation_steps\":" + std::to_string(steps) + "}");
    return !s.warnings.empty() &&
           mentions(s.warnings[0], dtype + " accumulation of " + std::to_string(steps));
  };
  EXPECT_FALSE(warned("bf16", 256));
  EXPECT_TRUE(warned("bf16", 257));
  EXPECT_TRUE(warned("bf16", 512));
  EXPECT_FALSE(warned("fp16", 2048));
  EXPECT_TRUE(warned("fp16", 2049));
  EXPECT_FALSE(warned("fp32", 100000));
  EXPECT_FALSE(warned("fp8", 512));  // stochastic rounding
  // A may also come out of the batch triple.
  EXPECT_EQ(settings_of(R"({"gradient_accumulation_dtype":"bf16","train_batch_size":1024,
      "train_micro_batch_size_per_gpu":1})",
                        {.data_ranks = 2})
                .warnings.size(),
            1U);
}

// Case 17, defaults.
TEST(Case17LossScale, DefaultsAndExplicitValuesAgree) {
  for (const char* keys : {R"("loss_scale":0)", R"("enabled":true)",
                           R"("loss_scale":0,"initial_scale_power":16,"hysteresis":2,
                              "loss_scale_window":1000,"min_loss_scale":1)"}) {
    std::string text = std::string("{\"fp16\":{") + keys;
    if (!mentions(keys, "enabled")) text += ",\"enabled\":true";
    const LossScaleOptions scale = settings_of(text + "}}").loss_scale.value;
    EXPECT_TRUE(scale.enabled);
    EXPECT_TRUE(scale.dynamic);
    EXPECT_EQ(scale.initial, 65536.0) << text;
    EXPECT_EQ(scale.window, 1000);
    EXPECT_EQ(scale.hysteresis, 2);
    EXPECT_FALSE(scale.consecutive_hysteresis);
    EXPECT_EQ(scale.min_scale, 1.0);
  }
}

TEST(Case17LossScale, StaticScalesAndOtherModels) {
  const LossScaleOptions fixed =
      settings_of(R"({"fp16":{"enabled":true,"loss_scale":128}})").loss_scale.value;
  EXPECT_TRUE(fixed.enabled);
  EXPECT_FALSE(fixed.dynamic);
  EXPECT_EQ(fixed.initial, 128.0);
  EXPECT_EQ(
      settings_of(R"({"fp16":{"enabled":true,"initial_scale_power":32}})").loss_scale.value.initial,
      4294967296.0);
  EXPECT_FALSE(settings_of(R"({"bf16":{"enabled":true}})").loss_scale.value.enabled);
  EXPECT_FALSE(
      settings_of(R"({"fp16":{"enabled":false,"loss_scale":128}})").loss_scale.value.enabled);
  for (const char* key : {"\"hysteresis\":0", "\"min_loss_scale\":0", "\"loss_scale\":-1",
                          "\"loss_scale_window\":0", "\"initial_scale_power\":127"}) {
    EXPECT_THROW(settings_of(std::string("{\"fp16\":{") + key + "}}"), ConfigError) << key;
  }
}

}  // namespace
}  // namespace zerofp8
