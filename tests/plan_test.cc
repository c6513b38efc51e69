// The plan's arithmetic against numbers worked out by hand.
#include "zerofp8/plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "config_util.h"
#include "src/config/peers.h"
#include "src/config/text_table.h"

namespace zerofp8 {
namespace {

std::int64_t bytes_of_row(const Plan& plan, const std::string& name) {
  for (const PlanRow& row : plan.rows) {
    if (row.name == name) return row.bytes;
  }
  ADD_FAILURE() << "no row " << name;
  return -1;
}

// Bytes per parameter and number of block-scaled components, from the design.
struct LevelTotal {
  const char* level;
  const char* more;
  double bytes;
  int scaled;
};

TEST(Bytes, LevelsOnOneRank) {
  const double scale = 4.0 / 128.0;
  for (const int stage : {0, 1, 2}) {
    for (const LevelTotal& row : {LevelTotal{"O0", "", 16, 0}, LevelTotal{"O1", "", 13, 1},
                                  LevelTotal{"O2", "", 7, 3}, LevelTotal{"O3", "", 6, 3}}) {
      const Plan plan = plan_of(bf16_at(row.level, stage, 1));
      EXPECT_DOUBLE_EQ(plan.bytes_per_parameter(), row.bytes + row.scaled * scale)
          << row.level << " stage " << stage;
      EXPECT_EQ(plan.state_bytes(),
                static_cast<std::int64_t>(kElements * (row.bytes - 2 + row.scaled * scale)));
    }
  }
}

// The same bytes, said to be in another place.
TEST(Places, OfStateThatIsOffloaded) {
  const auto plan = [](const char* device) {
    return plan_of(settings_of(std::string(R"({"bf16":{"enabled":true},"zerofp8":{"opt_level":"O2"},
        "zero_optimization":{"stage":1,"offload_optimizer":{"device":")") +
                                   device + "\"}}}",
                               {.data_ranks = 8}));
  };
  const Plan here = plan("none"), offloaded = plan("cpu");
  ASSERT_EQ(here.rows.size(), offloaded.rows.size());
  EXPECT_EQ(here.state_bytes(), offloaded.state_bytes());
  for (std::size_t i = 0; i < here.rows.size(); ++i) {
    const bool of_engine = here.rows[i].component != Component::kTransient;
    EXPECT_EQ(offloaded.rows[i].place, here.rows[i].place + (of_engine ? ", on the CPU" : ""));
  }
  EXPECT_NE(plan_table(offloaded, false, 0).find("sharded / 8, on the CPU"), std::string::npos);
  EXPECT_NE(plan_table(offloaded, false, 0).find("page-locked copies"), std::string::npos);
  EXPECT_EQ(plan_table(here, false, 0).find("page-locked copies"), std::string::npos);
}

TEST(Bytes, O2WithoutMaster) {
  const Settings s = settings_of(
      R"({"bf16":{"enabled":true},"zerofp8":{"opt_level":"O2","master_weights":"none"}})");
  EXPECT_DOUBLE_EQ(plan_of(s).bytes_per_parameter(), 6 + 3 * 4.0 / 128.0);
}

TEST(Bytes, ComponentsOfO2OnFourRanks) {
  const Plan local = plan_of(bf16_at("O2", 1, 4));
  const std::int64_t shard = kElements / 4;
  EXPECT_EQ(bytes_of_row(local, "weight"), 2 * kElements);
  EXPECT_EQ(bytes_of_row(local, "gradient accumulator"), kElements + kElements / 128 * 4);
  EXPECT_EQ(bytes_of_row(local, "reduced gradient"), 4 * shard);
  EXPECT_EQ(bytes_of_row(local, "master weight"), shard);
  EXPECT_EQ(bytes_of_row(local, "exp_avg"), shard + shard / 128 * 4);
  EXPECT_EQ(bytes_of_row(local, "exp_avg_sq"), 2 * shard + shard / 128 * 4);
  const Plan sharded = plan_of(bf16_at("O2", 2, 4));
  EXPECT_EQ(bytes_of_row(sharded, "gradient accumulator"), shard + shard / 128 * 4);
  EXPECT_EQ(bytes_of_row(sharded, "reduced gradient"), 0);
  EXPECT_EQ(sharded.state_bytes(), shard + shard + shard + 2 * shard + 3 * (shard / 128 * 4));
}

// Known arithmetic: 16 -> 6 is 62.5 %; 12 GB less per 1e9 parameters than FP16 AMP with FP16
// copies.
TEST(Bytes, KnownSavings) {
  const double o0 = plan_of(bf16_at("O0", 0, 1)).bytes_per_parameter();
  const double o3 = plan_of(bf16_at("O3", 0, 1)).bytes_per_parameter() - 3 * 4.0 / 128.0;
  EXPECT_DOUBLE_EQ(o0, 16.0);
  EXPECT_DOUBLE_EQ(o3, 6.0);
  EXPECT_DOUBLE_EQ(1 - o3 / o0, 0.625);
  const auto peer = [](std::string_view name) {
    for (const Peer& row : kPeers) {
      if (row.name == name) return row.total();
    }
    return -1;
  };
  EXPECT_EQ(peer("DeepSpeed bf16_optimizer"), 20);
  EXPECT_EQ(peer("FP16 AMP"), 16);
  EXPECT_EQ(peer("FP16 AMP with its FP16 weight copies"), 18);
  EXPECT_EQ(peer("MS-AMP O2"), 6);
  EXPECT_EQ(peer("FlashOptim AdamW"), 7);
  EXPECT_DOUBLE_EQ((peer("FP16 AMP with its FP16 weight copies") - o3) * 1e9, 12e9);
}

// 6 bytes (2 weight + 4 master) against 5 (1 FP8 weight + 4), whole and sharded.
TEST(Bytes, WeightAndMaster) {
  for (const int ranks : {1, 4}) {
    const Settings s = settings_of(
        R"({"bf16":{"enabled":true},"zero_optimization":{"stage":1},
            "zerofp8":{"master_weights":"fp32"}})",
        {.data_ranks = ranks});
    const Plan plan = plan_of(s);
    const std::int64_t both = bytes_of_row(plan, "weight") + bytes_of_row(plan, "master weight");
    EXPECT_EQ(both, 2 * kElements + 4 * kElements / ranks);
    const std::int64_t fp8_weight = bytes_of(DType::kE4m3) * kElements;
    EXPECT_EQ(both - bytes_of_row(plan, "weight") + fp8_weight, kElements + 4 * kElements / ranks);
  }
}

TEST(Bytes, MastersOfEveryWeight) {
  using M = MasterWeights;
  for (const DType weight : {DType::kBf16, DType::kFp16}) {
    EXPECT_EQ(master_bytes(M::kNone, weight), 0);
    EXPECT_EQ(master_bytes(M::kBits8, weight), 1);
    EXPECT_EQ(master_bytes(M::kBits16, weight), 2);
    EXPECT_EQ(master_bytes(M::kFp32, weight), 4);
  }
  for (const M master : {M::kNone, M::kBits8, M::kBits16, M::kFp32}) {
    EXPECT_EQ(master_bytes(master, DType::kFp32), 0);
  }
}

TEST(Bytes, WhichStorageHasBlockScales) {
  using C = Component;
  for (const C component : {C::kAccumulator, C::kExpAvg, C::kExpAvgSq}) {
    EXPECT_FALSE(is_block_scaled(component, DType::kFp32));
    EXPECT_FALSE(is_block_scaled(component, DType::kBf16));
    EXPECT_TRUE(is_block_scaled(component, DType::kFp16));
    for (const DType fp8 : {DType::kE4m3, DType::kE5m2, DType::kUe4m4}) {
      EXPECT_TRUE(is_block_scaled(component, fp8));
    }
  }
  EXPECT_FALSE(is_block_scaled(C::kReducedGradient, DType::kFp32));
  EXPECT_EQ(stored_bytes(C::kExpAvg, DType::kE4m3, 256, 128), 264);
  EXPECT_EQ(stored_bytes(C::kExpAvgSq, DType::kFp16, 256, 32), 544);
  EXPECT_EQ(stored_bytes(C::kAccumulator, DType::kBf16, 256, 128), 512);
  EXPECT_EQ(stored_bytes(C::kAccumulator, DType::kFp32, 0, 128), 0);
  EXPECT_EQ(stored_bytes(C::kAccumulator, DType::kE4m3, std::int64_t{1} << 33, 128),
            (std::int64_t{1} << 33) + (std::int64_t{1} << 28));
}

TEST(Bytes, ErrorFeedbackKeepsAndSendsTwoBlocks) {
  const Settings s = settings_of(
      R"({"gradient_accumulation_dtype":{"dtype":"fp8","error_feedback":true},
          "zero_optimization":{"stage":1},"zerofp8":{"gradient_communication_dtype":"fp8"}})",
      {.data_ranks = 2});
  const Plan plan = plan_of(s);
  EXPECT_EQ(bytes_of_row(plan, "gradient accumulator"), 2 * (kElements + kElements / 32));
  EXPECT_EQ(plan.collectives.at(0).bytes_per_step, 2 * (kElements + kElements / 32) / 2);
  const auto message = [](const std::string& accumulation, const std::string& wire) {
    return gradient_message_bytes(
        settings_of("{\"gradient_accumulation_dtype\":{\"dtype\":\"fp8\",\"error_feedback\":true" +
                    accumulation +
                    "},\"zero_optimization\":{\"stage\":1},\"zerofp8\":{"
                    "\"gradient_communication_dtype\":\"" +
                    wire + "\"}}"),
        256);
  };
  EXPECT_EQ(message("", "fp8"), 2 * (256 + 8));
  // Encoded anew, or fed by the wire: one block.
  EXPECT_EQ(message("", "bf16"), 512);
  EXPECT_EQ(message("", "fp8_e5m2"), 256 + 8);
  EXPECT_EQ(message(",\"sharded\":true", "fp8"), 256 + 8);
}

TEST(Bytes, SmallParametersKeepFp32MomentsInARowOfTheirOwn) {
  const Settings s = bf16_at("O2", 0, 1);
  ModelSize size = uniform_size(kElements, s);
  size.shard_elements_fp32_moments = 12'800;
  const Plan plan = make_plan(s, size);
  const std::int64_t rest = kElements - 12'800;
  EXPECT_EQ(bytes_of_row(plan, "exp_avg"), rest + rest / 32);
  EXPECT_EQ(bytes_of_row(plan, "exp_avg of parameters that are 1-D or below 4096"), 4 * 12'800);
  EXPECT_EQ(bytes_of_row(plan, "exp_avg_sq of parameters that are 1-D or below 4096"), 4 * 12'800);
  // Exact states have no such rows, and neither has a threshold of 0.
  EXPECT_EQ(make_plan(bf16_at("O1", 0, 1), size).rows.size(), 6U);
  const Settings off = settings_of(R"({"zerofp8":{"opt_level":"O2","fp32_moments_below":0}})");
  EXPECT_EQ(plan_of(off).rows.size(), 6U);
}

TEST(ReducedGradient, NeedsABufferOnlyWhereNothingElseHoldsIt) {
  const auto with = [](const char* accumulation, const char* wire, int stage,
                       const char* more = "") {
    return std::string("{\"gradient_accumulation_dtype\":") + accumulation +
           ",\"zerofp8\":{\"gradient_communication_dtype\":\"" + wire + "\"" + more +
           "},\"zero_optimization\":{\"stage\":" + std::to_string(stage) + "}}";
  };
  const char* sharded = "{\"dtype\":\"fp8\",\"sharded\":true}";
  const char* groups = ",\"shard_group_size\":2";
  const auto needed = [](const std::string& text, int ranks) {
    return reduced_gradient_needs_buffer(settings_of(text, {.data_ranks = ranks}));
  };
  EXPECT_FALSE(needed(with("\"fp32\"", "fp32", 0), 4));
  EXPECT_FALSE(needed(with("\"fp32\"", "fp8", 1), 4));
  EXPECT_FALSE(needed(with("\"fp32\"", "fp8", 1, groups), 4));
  EXPECT_TRUE(needed(with("\"fp8\"", "fp8", 1), 4));
  EXPECT_TRUE(needed(with("\"bf16\"", "bf16", 0), 2));
  EXPECT_FALSE(needed(with("\"fp8\"", "fp8", 1), 1));
  EXPECT_FALSE(needed(with("\"bf16\"", "bf16", 0), 1));
  EXPECT_TRUE(needed(with("\"fp16\"", "fp16", 0), 1));  // block scales in store, none on the wire
  EXPECT_TRUE(needed(with("\"bf16\"", "fp32", 0), 1));
  EXPECT_TRUE(needed(with("\"fp8_e4m3\"", "fp8_e5m2", 0), 1));
  EXPECT_FALSE(needed(with("\"fp8\"", "fp8", 2), 4));
  EXPECT_FALSE(needed(with(sharded, "fp32", 1), 4));
  EXPECT_TRUE(needed(with("\"fp8\"", "fp8", 2, groups), 4));
  EXPECT_TRUE(needed(with("\"fp32\"", "fp32", 2, groups), 4));
}

TEST(UniformSize, PadsToWholeBlocksPerRank) {
  const Settings s = settings_of(R"({"zero_optimization":{"stage":1}})", {.data_ranks = 3});
  const ModelSize size = uniform_size(1000, s);
  EXPECT_EQ(size.parameters, 1000);
  EXPECT_EQ(size.local_elements, 3 * 4 * 128);
  EXPECT_EQ(size.shard_elements, 4 * 128);
  EXPECT_EQ(size.buckets, 1);
  const ModelSize whole = uniform_size(1000, settings_of("{}", {.data_ranks = 3}));
  EXPECT_EQ(whole.local_elements, 3 * 4 * 128);  // the reduction still cuts it in three
  EXPECT_EQ(whole.shard_elements, 3 * 4 * 128);
  EXPECT_THROW(uniform_size(0, s), ArgumentError);
  EXPECT_THROW(uniform_size(std::int64_t{1} << 60, s), ArgumentError);
}

TEST(Text, TableShowsDtypesPlacesAndOrigins) {
  const std::string text = plan_table(plan_of(bf16_at("O2", 2, 4)), false, 0);
  for (const char* part :
       {"fp8_e4m3 + fp32 scale / 128", "fp16 root + fp32 scale / 128", "sharded / 4", "level O2",
        "key /bf16/enabled", "default (all data ranks)", "8 more bits",
        "same buffer as the accumulator", "AdamW (decoupled weight decay 0)", "gradient_clipping",
        "weight all-gather", "1 / (4 data ranks x 1 micro-batches)"}) {
    EXPECT_MENTIONS(text, part);
  }
  EXPECT_FALSE(mentions(text, "\x1b["));
  EXPECT_MENTIONS(plan_table(plan_of(bf16_at("O2", 2, 4)), /*color=*/true), "\x1b[1m");
}

TEST(Text, Fp32WeightIsItsOwnMaster) {
  EXPECT_MENTIONS(plan_table(plan_of(settings_of("{}")), false, 0), "the weight is its own master");
  const Settings s =
      settings_of(R"({"bf16":{"enabled":true},"zerofp8":{"master_weights":"none"}})");
  EXPECT_MENTIONS(plan_table(plan_of(s), false, 0), "stochastic rounding into the weight");
}

TEST(Text, ARankWithoutParametersHasAPlan) {
  const Plan plan = make_plan(bf16_at("O2", 2, 4), ModelSize{});
  EXPECT_EQ(plan.bytes_per_parameter(), 0.0);
  EXPECT_EQ(plan.state_bytes(), 0);
  EXPECT_FALSE(mentions(plan_table(plan), "nan"));
  EXPECT_EQ(nlohmann::json::parse(plan_json(plan))["totals"]["bytes"], 0);
}

TEST(Text, NumbersForPeople) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1000), "1.00 kB");
  EXPECT_EQ(bytes_text(14'000'000'000), "14.00 GB");
  EXPECT_EQ(bytes_text(999'999'999), "1.00 GB");
  EXPECT_EQ(count_text(7), "7");
  EXPECT_EQ(count_text(123456), "123,456");
  EXPECT_EQ(count_text(7'000'000'000), "7,000,000,000");
}

TEST(Json, HoldsTheSameNumbers) {
  const Plan plan = plan_of(bf16_at("O2", 2, 4));
  const nlohmann::json json = nlohmann::json::parse(plan_json(plan));
  EXPECT_EQ(json["settings"]["opt_level"]["value"], "O2");
  EXPECT_EQ(json["settings"]["exp_avg_sq_dtype"]["origin"], "level");
  EXPECT_EQ(json["settings"]["stage"]["value"], 2);
  EXPECT_EQ(json["launch"]["data_ranks"], 4);
  EXPECT_EQ(json["size"]["shard_elements"], kElements / 4);
  ASSERT_EQ(json["rows"].size(), plan.rows.size());
  std::int64_t total = 0;
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    EXPECT_EQ(json["rows"][i]["name"], plan.rows[i].name);
    EXPECT_EQ(json["rows"][i]["bytes"], plan.rows[i].bytes);
    total += plan.rows[i].bytes;
  }
  EXPECT_EQ(json["rows"][0]["component"], "caller");
  EXPECT_EQ(json["totals"]["bytes"], total);
  EXPECT_EQ(json["totals"]["state_bytes"], plan.state_bytes());
  ASSERT_EQ(json["collectives"].size(), plan.collectives.size());
  EXPECT_EQ(json["collectives"][0]["bytes_per_step"], plan.collectives[0].bytes_per_step);
  EXPECT_EQ(json["warnings"].size(), 0U);
}

}  // namespace
}  // namespace zerofp8
