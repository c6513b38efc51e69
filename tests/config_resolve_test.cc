// Levels, origins, contradictions, dtypes: which settings a file resolves to.
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
  for (const char* backend : {"auto", "torch", "mpi", "nccl"}) {
    EXPECT_NO_THROW(settings_of(std::string(R"({"zerofp8":{"comm_backend":")") + backend + "\"}}"));
  }
  EXPECT_THROW(settings_of(R"({"zero_optimization":{"stage":3}})"), UnsupportedError);
}

TEST(Offload, IsASettingWithItsOrigin) {
  const Settings s = settings_of(
      R"({"zero_optimization":{"stage":1,"offload_optimizer":{"device":"cpu","pin_memory":true}}})");
  EXPECT_EQ(s.offload_optimizer.value, Offload::kCpu);
  EXPECT_EQ(s.offload_optimizer.where, "/zero_optimization/offload_optimizer/device");
  EXPECT_MENTIONS(settings_table(s), "offload_optimizer");
  ASSERT_EQ(s.warnings.size(), 1U);
  EXPECT_MENTIONS(s.warnings[0], "/zero_optimization/offload_optimizer/pin_memory");
  EXPECT_EQ(settings_of("{}").offload_optimizer.value, Offload::kNone);
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

std::string two_level(const std::string& keys, const std::string& more = "") {
  return R"({"zero_optimization":{"stage":1},"zerofp8":{"two_level_reduce_scatter":{)" + keys +
         "}" + more + "}}";
}

TEST(TwoLevel, AbsentIsOneLevel) {
  for (const std::string& text : {std::string("{}"), two_level("")}) {
    const Settings s = settings_of(text, {.data_ranks = 6});
    EXPECT_EQ(s.ranks_per_node.value, 1);
    EXPECT_EQ(s.ranks_per_node.origin, Origin::kDefault);
    EXPECT_EQ(s.in_node_wire.value, D::kFp32);
  }
}

TEST(TwoLevel, KeysAndOrigins) {
  Settings s = settings_of(two_level("\"ranks_per_node\":4"), {.data_ranks = 8});
  EXPECT_EQ(s.ranks_per_node.value, 4);
  EXPECT_EQ(s.ranks_per_node.where, "/zerofp8/two_level_reduce_scatter/ranks_per_node");
  EXPECT_EQ(s.in_node_wire.value, D::kFp32);
  EXPECT_TRUE(s.warnings.empty());
  s = settings_of(two_level(R"("ranks_per_node":2,"in_node_dtype":"bfloat16")"), {.data_ranks = 8});
  EXPECT_EQ(s.in_node_wire.value, D::kBf16);
  EXPECT_EQ(s.in_node_wire.where, "/zerofp8/two_level_reduce_scatter/in_node_dtype");
}

TEST(TwoLevel, NodesDivideTheRanksThatReduceTogether) {
  const auto error = [](const std::string& text, int ranks) {
    return error_of(text, {.data_ranks = ranks});
  };
  const std::string four = "\"ranks_per_node\":4", groups = ",\"shard_group_size\":2";
  EXPECT_EQ(error(two_level(four), 6).given(), "4 with 6 data ranks");
  EXPECT_EQ(error(two_level(four), 2).given(), "4 with 2 data ranks");
  EXPECT_EQ(error(two_level(four, groups), 8).given(), "4 with 2 ranks per shard group");
  EXPECT_EQ(error(two_level(four), 6).pointer(),
            "/zerofp8/two_level_reduce_scatter/ranks_per_node");
  // Stage 0 reduces over all data ranks though it shards nothing.
  const std::string stage0 = R"({"zerofp8":{"two_level_reduce_scatter":{"ranks_per_node":4}}})";
  EXPECT_EQ(error(stage0, 6).given(), "4 with 6 data ranks");
  EXPECT_EQ(settings_of(stage0, {.data_ranks = 8}).ranks_per_node.value, 4);
}

TEST(TwoLevel, OtherMistakes) {
  EXPECT_EQ(error_of(two_level(R"("in_node_dtype":"bf16")")).given(),
            "\"bf16\" without ranks_per_node beside it");
  for (const char* dtype : {"fp16", "fp8"}) {
    const std::string text =
        two_level("\"ranks_per_node\":1,\"in_node_dtype\":\"" + std::string(dtype) + "\"");
    EXPECT_MENTIONS(error_of(text).allowed(), "\"fp32\", \"bf16\"");
  }
  EXPECT_EQ(error_of(R"({"zerofp8":{"two_level_reduce_scatter":4}})").pointer(),
            "/zerofp8/two_level_reduce_scatter");
}

TEST(TwoLevel, OneNodeIsAWarning) {
  const std::string text = two_level("\"ranks_per_node\":4");
  const Settings s = settings_of(text, {.data_ranks = 4});
  ASSERT_EQ(s.warnings.size(), 1U);
  EXPECT_MENTIONS(s.warnings[0], "/zerofp8/two_level_reduce_scatter/ranks_per_node");
  EXPECT_EQ(
      settings_of(two_level("\"ranks_per_node\":2", ",\"shard_group_size\":2"), {.data_ranks = 8})
          .warnings.size(),
      1U);
}

}  // namespace
}  // namespace zerofp8
