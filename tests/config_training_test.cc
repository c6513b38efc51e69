// Batch sizes, optimizer and loss scale, and the cases about defaults and warnings.
#include <gtest/gtest.h>

#include "config_util.h"

namespace zerofp8 {
namespace {

using D = DType;

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

// What FP32 does not hold is refused where it is written.
TEST(Adam, ValuesThatFp32DoesNotHoldAreRefused) {
  for (const auto& [key, value] :
       {std::pair{"eps", "1e-50"}, {"eps", "1e39"}, {"lr", "1e300"}, {"weight_decay", "1e39"}}) {
    const ConfigError error = error_of(std::string(R"({"optimizer":{"type":"Adam","params":{")") +
                                       key + "\":" + value + "}}}");
    EXPECT_EQ(error.pointer(), std::string("/optimizer/params/") + key);
  }
  EXPECT_EQ(error_of(R"({"fp16":{"enabled":true,"loss_scale":1e300}})").pointer(),
            "/fp16/loss_scale");
  EXPECT_EQ(error_of(R"({"gradient_accumulation_steps":9223372036854775807})").pointer(),
            "/gradient_accumulation_steps");
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

// Case 10, warning: from 2^(mantissa bits + 1) equal addends on, each is less than half a unit of
// the sum.
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
