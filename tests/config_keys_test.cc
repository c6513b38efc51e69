// The key table and the parser: every kind of mistake gives pointer, value, what is allowed and a
// fix.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <set>

#include "config_util.h"
#include "src/config/keys.h"
#include "src/config/nearest.h"

namespace zerofp8 {
namespace {

// {"a": {"b": VALUE}} for "/a/b".
std::string document(std::string_view path, const std::string& value) {
  std::string text = value;
  const auto names = split(path.substr(1), '/');
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    text = "{\"" + std::string(*name) + "\": " + text + "}";
  }
  return text;
}

ConfigError parse_error(const std::string& text) {
  try {
    Config::parse(text, "test.json");
  } catch (const ConfigError& error) {
    return error;
  }
  ADD_FAILURE() << "accepted: " << text;
  return ConfigError("", "", "", "");
}

TEST(KeyTable, EachPathOnceWithASentence) {
  std::set<std::string_view> seen;
  for (const Key& key : keys()) {
    EXPECT_TRUE(seen.insert(key.path).second) << key.path;
    EXPECT_GT(key.help.size(), 5U) << key.path;
    EXPECT_EQ(key.path.front(), '/') << key.path;
    EXPECT_FALSE(allowed_text(key).empty()) << key.path;
    EXPECT_EQ(find_key(key.path), &key);
  }
}

TEST(KeyTable, EveryLiteralDefaultIsAcceptedByItsOwnRow) {
  for (const Key& key : keys()) {
    if (key.role != KeyRole::kOurs || key.standard.empty()) continue;
    if (key.standard.find(' ') != std::string_view::npos && key.standard.front() != '[') continue;
    const bool quoted = key.type == KeyType::kChoice || key.type == KeyType::kDType;
    const std::string standard(key.standard);
    const std::string value = quoted ? '"' + standard + '"' : standard;
    EXPECT_NO_THROW(Config::parse(document(key.path, value))) << key.path << " " << value;
  }
}

// A value of the wrong kind for each type of key: refused for each key, with its pointer, the
// value, what is allowed and a fix.
TEST(KeyTable, EveryKeyRefusesTheWrongTypes) {
  const std::string object = "{\"x\": 1}", list = "[1, 2, 3]";
  for (const Key& key : keys()) {
    if (key.role != KeyRole::kOurs) continue;
    std::vector<std::string> wrong = {list, "\"surely not\"", "1e400"};
    if (key.type != KeyType::kBool) wrong.insert(wrong.end(), {"true", "\"true\""});
    if (key.type != KeyType::kNumber) wrong.insert(wrong.end(), {"0.123", "\"1\""});
    if (key.type != KeyType::kNumber && key.type != KeyType::kInteger) wrong.push_back("1");
    if (!is_container(key.path)) wrong.push_back(object);
    if (!key.limits.takes_null) wrong.push_back("null");
    const bool optional_block = key.type == KeyType::kObject && key.limits.takes_null;
    const bool takes_auto = key.limits.takes_auto || auto_is_default(key) || optional_block;
    if (!takes_auto && key.standard != "auto") wrong.push_back("\"auto\"");
    if (key.type == KeyType::kInteger || key.type == KeyType::kNumber) {
      wrong.insert(wrong.end(), {"-1", "\"5e8\"", "NaN", "Infinity", "-Infinity", "-0.5"});
    }
    for (const std::string& value : wrong) {
      if (key.type == KeyType::kList && value == list) continue;
      const ConfigError error = parse_error(document(key.path, value));
      EXPECT_FALSE(error.given().empty()) << key.path << " " << value;
      EXPECT_FALSE(error.allowed().empty()) << key.path << " " << value;
      EXPECT_FALSE(error.fix().empty()) << key.path << " " << value;
      const bool lexical = value == "1e400";  // not even JSON
      EXPECT_EQ(error.pointer(), lexical ? "test.json" : std::string(key.path)) << value;
    }
  }
}

TEST(KeyTable, EveryKeyMistypedByOneLetterIsFoundAgain) {
  for (const Key& key : keys()) {
    if (key.role == KeyRole::kRefused) continue;
    const std::size_t leaf = key.path.rfind('/') + 1;
    if (key.path.size() - leaf < 6) continue;  // short names have several neighbours
    std::string dropped(key.path), swapped(key.path), doubled(key.path);
    dropped.erase(leaf + 2, 1);
    std::swap(swapped[leaf + 3], swapped[leaf + 4]);
    doubled.insert(leaf + 1, 1, doubled[leaf + 1]);
    for (const std::string& wrong : {dropped, swapped, doubled}) {
      if (find_key(wrong)) continue;
      EXPECT_EQ(nearest_key(wrong), key.path) << wrong;
    }
  }
}

TEST(NearestKey, LooksAmongSiblingsThenElsewhere) {
  EXPECT_EQ(nearest_key("/zero_optimization/reduce_bukcet_size"),
            "/zero_optimization/reduce_bucket_size");
  EXPECT_EQ(nearest_key("/zero_optimisation"), "/zero_optimization");
  EXPECT_EQ(nearest_key("/stage"), "/zero_optimization/stage");
  EXPECT_EQ(nearest_key("/opt_level"), "/zerofp8/opt_level");
  EXPECT_EQ(nearest_key("/bfloat16/enabld"), "/bf16/enabled");
  EXPECT_EQ(nearest_key("/gradient_clip"), "/gradient_clipping");
  EXPECT_EQ(nearest_key("/Train_Batch_Size"), "/train_batch_size");
}

TEST(NearestKey, IsEmptyWhereNothingIsNear) {
  for (const char* path : {"/q", "/fp8", "/axis", "/optimizer/params/freeze_step",
                           "/zero_optimization/foo", "/my_project"}) {
    EXPECT_EQ(nearest_key(path), "") << path;
  }
  EXPECT_EQ(nearest_key("/" + std::string(100000, 'x')), "");
}

TEST(NearestKey, DistanceCountsASwapOnce) {
  EXPECT_EQ(edit_distance("bukcet", "bucket"), 1);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("stage", "stage"), 0);
  EXPECT_EQ(edit_distance("acumulation", "accumulation"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

// Case 1: misspelt and obsolete keys.
TEST(Case1UnknownKeys, AreRefusedWithPathAndNearestKey) {
  ConfigError error = parse_error(R"({"train_batch_size":4,"gradient_acumulation_dtype":"fp32"})");
  EXPECT_EQ(error.pointer(), "/gradient_acumulation_dtype");
  EXPECT_MENTIONS(error.what(), "nearest known key is /gradient_accumulation_dtype");
  error = parse_error(R"({"zero_optimization":{"reduce_bukcet_size":5}})");
  EXPECT_EQ(error.pointer(), "/zero_optimization/reduce_bukcet_size");
  EXPECT_MENTIONS(error.what(), "nearest known key is /zero_optimization/reduce_bucket_size");
  error = parse_error(R"({"data_types":{"grad_acum_dtype":"fp32"}})");
  EXPECT_EQ(error.pointer(), "/data_types/grad_acum_dtype");
  EXPECT_MENTIONS(error.what(), "nearest known key is /data_types/grad_accum_dtype");
  error = parse_error(R"({"zerofp8":{"optlevel":"O2"}})");
  EXPECT_MENTIONS(error.what(), "nearest known key is /zerofp8/opt_level");
  error = parse_error(R"({"gradient_accumulation_dtype":{"dtpye":"fp8"}})");
  EXPECT_MENTIONS(error.what(), "nearest known key is /gradient_accumulation_dtype/dtype");
}

TEST(Case1UnknownKeys, LossScaleKeysInBf16AreRefused) {
  for (const char* block : {"bf16", "bfloat16"}) {
    for (const char* key : {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                            "consecutive_hysteresis", "min_loss_scale"}) {
      const std::string path = std::string("/") + block + "/" + key;
      const ConfigError error = parse_error(document(path, "0"));
      EXPECT_EQ(error.pointer(), path);
      EXPECT_MENTIONS(error.what(), "/fp16");
    }
  }
}

TEST(Case1UnknownKeys, ObsoleteKeysSayWhatToUse) {
  const auto fix = [](const char* text) { return parse_error(text).fix(); };
  EXPECT_MENTIONS(fix(R"({"fp32_allreduce":true})"), "communication_data_type");
  EXPECT_MENTIONS(fix(R"({"optimizer":{"params":{"max_grad_norm":1}}})"), "/gradient_clipping");
  EXPECT_MENTIONS(fix(R"({"zero_optimization":{"zero_quantized_gradients":true}})"),
                  "gradient_communication_dtype");
  EXPECT_MENTIONS(fix(R"({"amp":{"enabled":true}})"), "bf16");
}

TEST(Case1UnknownKeys, OddNamesAreEscapedAndNeverMatch) {
  EXPECT_EQ(parse_error(R"({"bf16/enabled":true})").pointer(), "/bf16~1enabled");
  EXPECT_EQ(parse_error(R"({"a~b":true})").pointer(), "/a~0b");
  EXPECT_EQ(parse_error(R"({"":true})").pointer(), "/");
  EXPECT_EQ(parse_error(R"({"Train_Batch_Size":4})").pointer(), "/Train_Batch_Size");
}

// Case 2: values that pass other parsers and crash, or change their meaning, later.
TEST(Case2Values, WholeNumbersInAnySpelling) {
  for (const char* value : {"5e8", "500000000", "5.0e8", "5E+8", "500000000.0"}) {
    const std::string text = document("/zero_optimization/reduce_bucket_size", value);
    EXPECT_EQ(settings_of(text).reduce_bucket_size.value, 500000000) << value;
  }
  const Settings large = settings_of(R"({"zerofp8":{"seed":9223372036854775807}})");
  EXPECT_EQ(large.seed.value, 9223372036854775807U);
}

TEST(Case2Values, OtherNumbersAreRefused) {
  for (const char* value : {"15099494.4", "0", "-1", "\"5e8\"", "\"autos\"", "1e300", "-5e8",
                            "18446744073709551615", "0.5", "true", "null", "[5]"}) {
    const ConfigError error = parse_error(document("/zero_optimization/reduce_bucket_size", value));
    EXPECT_EQ(error.pointer(), "/zero_optimization/reduce_bucket_size");
    EXPECT_EQ(error.given(), value);
    EXPECT_MENTIONS(error.allowed(), "a whole number >= 1");
  }
}

TEST(Case2Values, QuotedBooleansAreRefused) {
  for (const char* value : {"\"true\"", "\"false\"", "1", "0", "\"True\""}) {
    const ConfigError error = parse_error(document("/bf16/enabled", value));
    EXPECT_EQ(error.pointer(), "/bf16/enabled");
    EXPECT_EQ(error.given(), value);
    EXPECT_MENTIONS(error.allowed(), "true or false, without quotes");
  }
}

TEST(Case2Values, UnknownDtypeListsTheKnownOnes) {
  const ConfigError error = parse_error(R"({"gradient_accumulation_dtype":"fp7"})");
  EXPECT_EQ(error.pointer(), "/gradient_accumulation_dtype");
  EXPECT_EQ(error.given(), "\"fp7\"");
  for (const char* name : {"\"fp32\"", "\"bf16\"", "\"fp16\"", "\"fp8\"", "sharded"}) {
    EXPECT_MENTIONS(error.allowed(), name);
  }
  EXPECT_EQ(parse_error(R"({"data_types":{"grad_accum_dtype":"int8"}})").given(), "\"int8\"");
  EXPECT_MENTIONS(parse_error(R"({"communication_data_type":"fp8"})").fix(),
                  "/zerofp8/gradient_communication_dtype");
}

TEST(Case2Values, AutoIsAnErrorUnlessTheCallerSuppliesIt) {
  for (const char* path :
       {"/gradient_clipping", "/bf16/enabled", "/fp16/enabled", "/train_batch_size",
        "/train_micro_batch_size_per_gpu", "/gradient_accumulation_steps", "/optimizer/params/lr",
        "/optimizer/params/betas", "/optimizer/params/eps", "/optimizer/params/weight_decay"}) {
    const ConfigError error = error_of(document(path, "\"auto\""));
    EXPECT_EQ(error.pointer(), path);
    EXPECT_MENTIONS(error.what(), "\"auto\", and the caller supplied no value");
  }
  Arguments arguments;
  arguments.auto_gradient_clipping = 0.5;
  const Settings s = settings_of(R"({"gradient_clipping":"auto"})", {}, arguments);
  EXPECT_EQ(s.gradient_clipping.value, 0.5);
  EXPECT_EQ(s.gradient_clipping.origin, Origin::kArgument);
}

TEST(Parser, DuplicateKeysAreRefusedAtEveryDepth) {
  EXPECT_EQ(parse_error(R"({"a":1,"a":2})").pointer(), "/a");
  EXPECT_EQ(parse_error(R"({"bf16":{"enabled":true},"bf16":{"enabled":true}})").pointer(), "/bf16");
  EXPECT_EQ(parse_error(R"({"zero_optimization":{"stage":1,"stage":1}})").pointer(),
            "/zero_optimization/stage");
  EXPECT_EQ(parse_error(R"({"scheduler":{"params":[{"x":1},{"y":1,"y":2}]}})").pointer(),
            "/scheduler/params/1/y");
}

TEST(Parser, BothNamesOfABlockMustAgree) {
  EXPECT_NO_THROW(Config::parse(R"({"bf16":{"enabled":true},"bfloat16":{"enabled":true}})"));
  const ConfigError error =
      parse_error(R"({"bf16":{"enabled":true},"bfloat16":{"enabled":false}})");
  EXPECT_MENTIONS(error.what(), "/bf16/enabled");
  EXPECT_MENTIONS(error.what(), "/bfloat16/enabled");
}

TEST(Parser, AcceptsCommentsByteOrderMarkAndTrainerKeys) {
  EXPECT_NO_THROW(settings_of("\xEF\xBB\xBF{} // nothing\n"));
  const Settings s = settings_of(R"(/* head */ {
    // the model
    "bf16": {"enabled": true},
    "scheduler": {"type": "WarmupLR", "params": {"anything": ["goes", {"here": null}]}},
    "steps_per_print": 10, "wandb": {"enabled": false}, "pipeline": {"stages": "auto"},
    "zero_optimization": {"stage": 1, "stage3_max_live_parameters": "auto"}
  })");
  EXPECT_EQ(s.weight.value, DType::kBf16);
  EXPECT_EQ(s.stage.value, 1);
}

TEST(Parser, KeysWithoutEffectAreListedInAWarning) {
  const Settings s = settings_of(
      R"({"zero_optimization":{"stage":1,"contiguous_gradients":true,"reduce_scatter":true}})");
  ASSERT_EQ(s.warnings.size(), 1U);
  EXPECT_MENTIONS(s.warnings[0], "/zero_optimization/contiguous_gradients");
  EXPECT_MENTIONS(s.warnings[0], "/zero_optimization/reduce_scatter");
}

TEST(Parser, NullMeansAbsentWhereDeepSpeedSaysSo) {
  const Settings s = settings_of(R"({"communication_data_type":null,
      "data_types":{"grad_accum_dtype":null},"zero_optimization":{"overlap_comm":null,
      "offload_optimizer":null,"offload_param":{"device":"none","nvme_path":null}}})");
  EXPECT_EQ(s.gradient_wire.origin, Origin::kDefault);
  EXPECT_EQ(s.accumulation.origin, Origin::kDefault);
  EXPECT_EQ(s.offload_optimizer.value, Offload::kNone);
  EXPECT_EQ(s.offload_optimizer.origin, Origin::kDefault);
  const ConfigError error =
      parse_error(R"({"zero_optimization":{"offload_optimizer":{"device":"nvme"}}})");
  EXPECT_EQ(error.pointer(), "/zero_optimization/offload_optimizer/device");
  EXPECT_MENTIONS(error.what(), "nvme");
  EXPECT_MENTIONS(error.allowed(), "cpu");
}

TEST(Parser, BadTextNamesSourceLineAndColumn) {
  for (const char* text : {"", "{", "{\"bf16\":", "{\"a\":1,}", "{'a':1}", "{\"a\":tru}", "{} {}",
                           "\xff\xfe", "{\"a\":\"\xff\"}", "{\"a\":01}", "nul"}) {
    const ConfigError error = parse_error(text);
    EXPECT_EQ(error.pointer(), "test.json") << text;
    EXPECT_MENTIONS(error.given(), "line 1, column") << text;
    EXPECT_FALSE(mentions(error.what(), "json.exception")) << text;
  }
  EXPECT_MENTIONS(parse_error("{\n\n  \"a\" 1}").given(), "line 3");
}

// As Python's json writes them; accelerate puts Infinity into every config.
TEST(Parser, TakesNonFiniteNumbersInKeysOfTheTrainer) {
  const Config config = Config::parse(R"({
      // NaN, "Infinity
      "steps_per_print": Infinity, "wandb": {"a": [NaN, -Infinity, "NaN", 1], /* " */ "b": "\"NaN"},
      "scheduler": {"params": {"Infinity": Infinity}}})");
  const std::string text = config.canonical();
  EXPECT_MENTIONS(text, "\"steps_per_print\": Infinity");
  EXPECT_MENTIONS(text, "\"Infinity\": Infinity");
  EXPECT_MENTIONS(text, "\"b\": \"\\\"NaN\"");
  EXPECT_MENTIONS(text, "NaN,\n      -Infinity,\n      \"NaN\",\n      1");
  EXPECT_EQ(Config::parse(text).canonical(), text);
}

TEST(Parser, RefusesNonFiniteNumbersElsewhere) {
  for (const char* value : {"Infinity", "-Infinity", "NaN"}) {
    for (const char* path : {"/gradient_clipping", "/train_batch_size", "/optimizer/params/lr",
                             "/fp16/loss_scale", "/zero_optimization/reduce_bucket_size"}) {
      const ConfigError error = parse_error(document(path, value));
      EXPECT_EQ(error.pointer(), path);
      EXPECT_EQ(error.given(), value);
    }
    EXPECT_MENTIONS(parse_error(std::string("{") + value + ": 1}").given(), "key's name");
  }
  for (const char* text : {"{\"a\": infinity}", "{\"a\": +Infinity}", "{\"a\": NaN1}",
                           "{\"a\": --NaN}", "{\"a\": Infinity", "{\"a\": -InfinityX}"}) {
    EXPECT_MENTIONS(parse_error(text).given(), "line 1, column") << text;
  }
  // The column is that of the text as written.
  EXPECT_MENTIONS(parse_error("{\"steps_per_print\": Infinity,, }").given(), "column 30");
}

TEST(Parser, OnlyAnObjectIsAConfig) {
  for (const char* text : {"[]", "1", "\"O2\"", "null", "true"}) {
    EXPECT_MENTIONS(parse_error(text).allowed(), "an object") << text;
  }
  EXPECT_EQ(parse_error(R"({"zero_optimization":2})").pointer(), "/zero_optimization");
  EXPECT_EQ(parse_error(R"({"bf16":true})").pointer(), "/bf16");
}

TEST(Parser, DeepNestingIsAnErrorNotACrash) {
  const std::string deep =
      "{\"scheduler\":" + std::string(200000, '[') + "1" + std::string(200000, ']') + "}";
  EXPECT_MENTIONS(parse_error(deep).what(), "nested");
}

TEST(Parser, LongValuesAreCutInMessages) {
  const ConfigError error =
      parse_error(document("/zerofp8/opt_level", '"' + std::string(100000, 'x') + '"'));
  EXPECT_LT(error.given().size(), 100U);
}

TEST(Parser, FilesThatCannotBeReadAreNamed) {
  for (const char* path : {"/nonexistent/ds.json", "/"}) {
    try {
      Config::from_file(path);
      ADD_FAILURE() << path;
    } catch (const ConfigError& error) {
      EXPECT_EQ(error.pointer(), path);
    }
  }
  const std::string path = testing::TempDir() + "zerofp8_config_test.json";
  std::ofstream(path) << R"({"bf16":{"enabled":true}})";
  EXPECT_EQ(Config::from_file(path).source(), path);
  std::ofstream(path, std::ios::trunc).flush();
  EXPECT_THROW(Config::from_file(path), ConfigError);
  std::remove(path.c_str());
}

TEST(Parser, CanonicalTextIgnoresOrderSpacingCommentsAndSpelling) {
  const std::string a =
      Config::parse(
          R"({"zero_optimization":{"stage":1,"reduce_bucket_size":5e8},"bf16":{"enabled":true}})")
          .canonical();
  const std::string b = Config::parse(R"({ // other order
      "bf16": {"enabled": true},
      "zero_optimization": {"reduce_bucket_size": 500000000, "stage": 1}})")
                            .canonical();
  EXPECT_EQ(a, b);
  EXPECT_NE(a, Config::parse(R"({"bf16":{"enabled":true}})").canonical());
  EXPECT_EQ(Config::parse(a).canonical(), a);
}

TEST(DTypeNames, EverySpellingOfTorchAndDeepSpeed) {
  for (const FormatInfo& format : kFormats) {
    EXPECT_EQ(dtype_from_string(format.name), format.dtype) << format.name;
  }
  const auto is = [](DType dtype, std::initializer_list<const char*> spellings) {
    for (const char* text : spellings) EXPECT_EQ(dtype_from_string(text), dtype) << text;
  };
  is(DType::kFp32, {"float32", "float", "torch.float32", "torch.float"});
  is(DType::kBf16, {"bfloat16", "torch.bfloat16"});
  is(DType::kFp16, {"float16", "half", "torch.float16", "torch.half"});
  is(DType::kE4m3, {"fp8"});
  for (const char* text : {"", "fp7", "int8", "FP32", "float64", "fp8_"}) {
    EXPECT_FALSE(dtype_from_string(text)) << text;
  }
  for (const std::string_view spelling : dtype_spellings()) {
    EXPECT_TRUE(dtype_from_string(spelling)) << spelling;
  }
}

}  // namespace
}  // namespace zerofp8
