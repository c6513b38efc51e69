// Configs as they are in the wild: "auto", comments, other programs' keys, values that ask for
// nothing, changes on the command line, and all mistakes at once.
#include <gtest/gtest.h>

#include "config_util.h"
#include "src/config/keys.h"

namespace zerofp8 {
namespace {

const Arguments kAssume{.assume_auto = true};

TEST(Auto, IsTheDefaultWhereDeepSpeedTakesItForThat) {
  for (const Key& key : keys()) {
    if (!auto_is_default(key)) continue;
    const std::size_t slash = key.path.rfind('/');
    std::string text = "\"" + std::string(key.path.substr(slash + 1)) + "\": \"auto\"";
    for (std::string_view path = key.path.substr(0, slash); !path.empty();
         path = path.substr(0, path.rfind('/'))) {
      text = "\"" + std::string(path.substr(path.rfind('/') + 1)) + "\": {" + text + "}";
    }
    const Settings s = settings_of("{" + text + "}");
    ASSERT_EQ(s.assumed.size(), 1U) << text;
    EXPECT_TRUE(s.assumed[0].starts_with(std::string(key.path) + " ")) << s.assumed[0];
  }
}

TEST(Auto, IsAssumedAndNoted) {
  const Settings s = settings_of(
      R"({"bf16":{"enabled":"auto"},"fp16":{"enabled":"auto"},"gradient_clipping":"auto",
          "train_batch_size":"auto","optimizer":{"params":{"lr":"auto","betas":"auto"}}})",
      {}, kAssume);
  EXPECT_EQ(s.weight.value, DType::kBf16);
  EXPECT_FALSE(s.loss_scale.value.enabled);
  EXPECT_EQ(s.adam.value.lr, 1e-3);
  const std::vector<std::string> assumed = {
      "/bf16/enabled true",         "/fp16/enabled false",
      "/gradient_clipping 0",       "/train_batch_size none",
      "/optimizer/params/lr 0.001", "/optimizer/params/betas [0.9, 0.999]"};
  EXPECT_EQ(s.assumed, assumed);
}

TEST(Auto, FlagsFollowEachOtherAndTheModel) {
  const auto weight = [](const char* text, std::optional<DType> model = std::nullopt) {
    Arguments arguments = kAssume;
    arguments.weight = model;
    return settings_of(text, {}, arguments).weight.value;
  };
  EXPECT_EQ(weight(R"({"bf16":{"enabled":"auto"}})"), DType::kBf16);
  EXPECT_EQ(weight(R"({"fp16":{"enabled":"auto"}})"), DType::kFp16);
  EXPECT_EQ(weight(R"({"bf16":{"enabled":"auto"},"fp16":{"enabled":true}})"), DType::kFp16);
  EXPECT_EQ(weight(R"({"bf16":{"enabled":false},"fp16":{"enabled":"auto"}})"), DType::kFp16);
  for (const DType model : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    EXPECT_EQ(weight(R"({"bf16":{"enabled":"auto"},"fp16":{"enabled":"auto"}})", model), model);
    EXPECT_EQ(weight("{}", model), model);
  }
}

TEST(Model, DecidesAndContradictionsAreSaid) {
  Arguments fp32, bf16;
  fp32.weight = DType::kFp32;
  bf16.weight = DType::kBf16;
  const Settings s = settings_of(R"({"bf16":{"enabled":true}})", {}, fp32);
  EXPECT_EQ(s.weight.value, DType::kFp32);
  EXPECT_EQ(s.master.value, MasterWeights::kNone);
  ASSERT_EQ(s.warnings.size(), 1U);
  EXPECT_MENTIONS(s.warnings[0], "trained as fp32");
  // Gradients of an autocast forward pass are fp16: they keep their loss scale.
  EXPECT_TRUE(settings_of(R"({"fp16":{"enabled":true}})", {}, fp32).loss_scale.value.enabled);
  EXPECT_EQ(settings_of("{}", {}, bf16).master.value, MasterWeights::kBits16);
  const ConfigError error = error_of(R"({"fp16":{"enabled":true}})", {}, bf16);
  EXPECT_EQ(error.pointer(), "/fp16/enabled");
  EXPECT_MENTIONS(error.given(), "the model's parameters are bf16");
}

TEST(Mistakes, AreAllInOneError) {
  const ConfigError error = error_of(R"({"gradient_acumulation_dtype":"fp32",
      "bf16":{"enabled":"true"},"fp16":{"enabled":true,"min_loss_scale":-1},
      "zero_optimization":{"stage":3,"reduce_bucket_size":0},"train_batch_size":5.5,
      "gradient_accumulation_dtype":{"error_feedback":true}})");
  EXPECT_EQ(error.pointer(), "/gradient_acumulation_dtype");
  ASSERT_EQ(error.others().size(), 6U) << error.what();
  for (const char* path : {"/bf16/enabled", "/fp16/min_loss_scale", "/train_batch_size",
                           "/zero_optimization/reduce_bucket_size", "/zero_optimization/stage"}) {
    EXPECT_MENTIONS(error.what(), std::string("\n") + path + ": given");
  }
}

TEST(Mistakes, BetweenKeysToo) {
  const std::string text = R"({"train_batch_size":7,"train_micro_batch_size_per_gpu":2,
      "optimizer":{"type":"AdamW","params":{"adam_w_mode":false}},
      "zerofp8":{"overrides":[{}],"shard_group_size":2}})";
  const ConfigError error = error_of(text);
  EXPECT_EQ(error.others().size(), 4U) << error.what();
  EXPECT_FALSE(is_unsupported(text));
  EXPECT_TRUE(is_unsupported(R"({"zero_optimization":{"stage":3},"zerofp8":{"overrides":[{}]}})"));
}

TEST(OtherKeys, CommentsPassAndUnknownOnesAreSaid) {
  const Settings s = settings_of(
      R"({"_comment":"a","//":{"b":1},"optimizer":{"_why":0},"my_project":{"x":1},"run":7})");
  ASSERT_EQ(s.warnings.size(), 1U);
  EXPECT_MENTIONS(s.warnings[0], "/my_project, /run");
  for (const char* text :
       {R"({"zero_optimization":{"_comment":1}})", R"({"my_dtype":1})", R"({"lr":1})",
        R"({"Zero_Optimization":{}})", R"({"fp8_grads":true})", R"({"batch":4})",
        R"({"zerofp8":{"_level":"O2"}})", R"({"opt_level":"O2"})"}) {
    EXPECT_MENTIONS(error_of(text).given(), "there is no such key") << text;
  }
}

TEST(OtherKeys, RefusedOnesThatAskForNothingPass) {
  for (const Key& key : keys()) {
    if (key.role != KeyRole::kRefused || !key.limits.takes_nothing) continue;
    for (const char* value : {"false", "null", "0", "\"\"", "{}", "[]", "{\"enabled\":false}"}) {
      std::string text = value;
      const auto names = split(key.path.substr(1), '/');
      for (auto name = names.rbegin(); name != names.rend(); ++name) {
        text = "{\"" + std::string(*name) + "\":" + text + "}";
      }
      EXPECT_NO_THROW(settings_of(text)) << text;
      const std::string asks = text.replace(text.find(value), std::string(value).size(), "true");
      EXPECT_EQ(error_of(asks).pointer(), key.path);
    }
  }
}

TEST(OtherKeys, ParametersOfAnotherOptimizerTakeOneLine) {
  for (const char* text :
       {R"({"optimizer":{"type":"OneBitAdam","params":{"freeze_step":9,"unheard":1}}})",
        R"({"optimizer":{"params":{"freeze_step":9,"unheard":1},"type":"Lamb"}})"}) {
    const ConfigError error = error_of(text);
    EXPECT_EQ(error.pointer(), "/optimizer/type");
    EXPECT_TRUE(error.others().empty()) << error.what();
  }
  EXPECT_EQ(error_of(R"({"optimizer":{"params":{"freeze_step":9}}})").pointer(),
            "/optimizer/params/freeze_step");
}

TEST(Changes, AreSetBeforeTheCheck) {
  const auto changed = [](const std::vector<std::string>& changes) {
    const Config config = Config::parse(R"({"zero_optimization":{"stage":3}})", "x", changes);
    return resolve(config, {});
  };
  EXPECT_EQ(changed({"/zero_optimization/stage=2"}).stage.value, 2);
  const Settings s = changed({"/zero_optimization/stage=1", "/zerofp8/opt_level=O2", "/note=a b",
                              "/zero_optimization/overlap_comm=true", "/bf16={\"enabled\": true}"});
  EXPECT_EQ(s.opt_level.value, OptLevel::kO2);
  EXPECT_TRUE(s.overlap_comm.value);
  EXPECT_EQ(s.weight.value, DType::kBf16);
  for (const char* change :
       {"stage=1", "/zero_optimization/stage", "/=1", "/zero_optimization/stage/x=1", "/a~1b=3"}) {
    EXPECT_THROW(changed({change}), ConfigError) << change;
  }
}

}  // namespace
}  // namespace zerofp8
