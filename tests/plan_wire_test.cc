// The collectives of a plan against numbers worked out by hand.
#include <gtest/gtest.h>

#include "config_util.h"

namespace zerofp8 {
namespace {

// One collective as the plan must list it.
struct Expected {
  std::string operation;
  DType dtype;
  int ranks;
  std::int64_t calls, bytes;
};

void expect_collectives(const Plan& plan, const std::vector<Expected>& expected) {
  ASSERT_EQ(plan.collectives.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const PlanCollective& c = plan.collectives[i];
    EXPECT_EQ(c.operation, expected[i].operation) << c.what;
    EXPECT_EQ(c.dtype, expected[i].dtype) << c.what;
    EXPECT_EQ(c.ranks, expected[i].ranks) << c.what;
    EXPECT_EQ(c.calls_per_step, expected[i].calls) << c.what;
    EXPECT_EQ(c.bytes_per_step, expected[i].bytes) << c.what;
  }
}

TEST(Wire, OneRankSendsNothing) {
  for (const int stage : {0, 1, 2}) {
    EXPECT_TRUE(plan_of(bf16_at("O2", stage, 1)).collectives.empty());
  }
}

TEST(Wire, StageZeroReducesThenGathersFp32) {
  const std::int64_t part = kElements / 4;
  expect_collectives(plan_of(bf16_at("O1", 0, 4)),
                     {{"all_to_all", DType::kE4m3, 4, 1, 3 * (part + part / 32)},
                      {"all_gather", DType::kFp32, 4, 1, 3 * part * 4},
                      {"control", DType::kFp32, 4, 1, 0}});
}

TEST(Wire, StageOneReducesThenGathersWeights) {
  const std::int64_t part = kElements / 4;
  expect_collectives(plan_of(bf16_at("O0", 1, 4)),
                     {{"all_to_all", DType::kFp32, 4, 1, 3 * part * 4},
                      {"control", DType::kFp32, 4, 1, 0},
                      {"all_gather", DType::kBf16, 4, 1, 3 * part * 2}});
}

TEST(Wire, StageTwoReducesEveryMicroBatchAndBucket) {
  const std::int64_t part = kElements / 2;
  const Plan plan = plan_of(
      bf16_at("O2", 2, 2, ",\"gradient_accumulation_steps\":5", ",\"reduce_bucket_size\":300000"));
  expect_collectives(plan, {{"all_to_all", DType::kE4m3, 2, 4 * 5, 5 * (part + part / 32)},
                            {"control", DType::kFp32, 2, 1, 0},
                            {"all_gather", DType::kBf16, 2, 4, part * 2}});
  EXPECT_MENTIONS(plan.averaging, "2 data ranks x 5 micro-batches");
}

TEST(Wire, WeightsAreGatheredInSlices) {
  const auto calls = [](const std::string& size) {
    const Plan plan = plan_of(bf16_at("O1", 1, 4, "", ",\"allgather_bucket_size\":" + size));
    return plan.collectives.back().calls_per_step;
  };
  EXPECT_EQ(calls("500000000"), 1);
  EXPECT_EQ(calls("1024000"), 1);
  EXPECT_EQ(calls("1023999"), 2);  // 1999 blocks per rank and call, of 2000
  EXPECT_EQ(calls("512000"), 2);
  EXPECT_EQ(calls("1"), 2000);  // at least a block
}

TEST(Wire, ShardGroupsSumOverTheirReplicas) {
  const std::int64_t shard = kElements / 2;
  expect_collectives(plan_of(bf16_at("O1", 1, 8, "", ",\"zero_hpz_partition_size\":2")),
                     {{"all_to_all", DType::kE4m3, 2, 1, shard + shard / 32},
                      {"all_gather", DType::kFp32, 4, 1, 3 * shard * 4},
                      {"control", DType::kFp32, 8, 1, 0},
                      {"all_gather", DType::kBf16, 2, 1, shard * 2}});
}

Settings two_level(int ranks, int stage, const std::string& keys, const std::string& more = "") {
  return settings_of("{\"bf16\":{\"enabled\":true},\"zero_optimization\":{\"stage\":" +
                         std::to_string(stage) + "},\"gradient_accumulation_steps\":2," +
                         "\"zerofp8\":{\"opt_level\":\"O1\",\"two_level_reduce_scatter\":{" + keys +
                         "}" + more + "}}",
                     {.data_ranks = ranks});
}

// Inside a node k - 1 messages of the parts of W / k ranks, across nodes W / k - 1 of one part.
TEST(Wire, TwoLevels) {
  const std::int64_t part = kElements / 8, scaled = part + part / 32;
  const std::string bf16 = R"("ranks_per_node":4,"in_node_dtype":"bf16")";
  expect_collectives(plan_of(two_level(8, 0, "\"ranks_per_node\":4")),
                     {{"all_to_all", DType::kFp32, 4, 1, 3 * 2 * part * 4},
                      {"all_to_all", DType::kE4m3, 2, 1, scaled},
                      {"all_gather", DType::kFp32, 8, 1, 7 * part * 4},
                      {"control", DType::kFp32, 8, 1, 0}});
  expect_collectives(plan_of(two_level(8, 2, bf16)),
                     {{"all_to_all", DType::kBf16, 4, 2, 2 * 3 * 2 * part * 2},
                      {"all_to_all", DType::kE4m3, 2, 2, 2 * scaled},
                      {"control", DType::kFp32, 8, 1, 0},
                      {"all_gather", DType::kBf16, 8, 1, 7 * part * 2}});
  // Two nodes per shard group, two groups.
  expect_collectives(plan_of(two_level(8, 1, "\"ranks_per_node\":2", ",\"shard_group_size\":4")),
                     {{"all_to_all", DType::kFp32, 2, 1, 2 * (2 * part) * 4},
                      {"all_to_all", DType::kE4m3, 2, 1, 2 * scaled},
                      {"all_gather", DType::kFp32, 2, 1, 2 * part * 4},
                      {"control", DType::kFp32, 8, 1, 0},
                      {"all_gather", DType::kBf16, 4, 1, 3 * (2 * part) * 2}});
  const std::string text = plan_table(plan_of(two_level(8, 2, bf16)), false, 0);
  for (const char* line : {"inside nodes", "across nodes", "named reduce groups",
                           "key /zerofp8/two_level_reduce_scatter/in_node_dtype"}) {
    EXPECT_MENTIONS(text, line);
  }
}

TEST(Wire, TwoLevelsOfOneRankOrOneNode) {
  EXPECT_EQ(plan_json(plan_of(two_level(8, 1, "\"ranks_per_node\":1"))).find("inside nodes"),
            std::string::npos);
  const std::int64_t part = kElements / 4;
  expect_collectives(plan_of(two_level(4, 1, "\"ranks_per_node\":4")),
                     {{"all_to_all", DType::kFp32, 4, 1, 3 * part * 4},
                      {"control", DType::kFp32, 4, 1, 0},
                      {"all_gather", DType::kBf16, 4, 1, 3 * part * 2}});
}

// Per rank and leaving the node: (W - k) / W of a message flat, (W / k - 1) / W with two levels.
TEST(Wire, TwoLevelsSendAKthAcrossNodes) {
  for (const int k : {2, 4, 8}) {
    const Plan flat = plan_of(bf16_at("O1", 1, 64));
    const Plan two = plan_of(two_level(64, 1, "\"ranks_per_node\":" + std::to_string(k)));
    const std::int64_t leaves = flat.collectives[0].bytes_per_step / 63 * (64 - k);
    EXPECT_EQ(two.collectives[1].bytes_per_step * k, leaves) << k;
  }
}

TEST(Wire, ControlSpansPipelineAndTensorRanks) {
  const Settings s = settings_of("{}", {.data_ranks = 2, .pipeline_stages = 3, .tensor_ranks = 5});
  EXPECT_EQ(plan_of(s).collectives.back().ranks, 30);
}

TEST(Wire, Fp8IsAtMost26PercentOfFp32) {
  const auto sent = [](const char* level) {
    return static_cast<double>(plan_of(bf16_at(level, 1, 8)).collectives.at(0).bytes_per_step);
  };
  EXPECT_LE(sent("O1") / sent("O0"), 0.26);
  EXPECT_DOUBLE_EQ(sent("O1") / sent("O0"), (1 + 4.0 / 128) / 4);
}

}  // namespace
}  // namespace zerofp8
