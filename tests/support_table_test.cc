// The full product of model flags, accumulation, sharding, stage, pipelines, wire and level: each
// cell resolves to what was asked or gives its exact error. The table below is typed from the
// design and reads nothing of src/config.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "config_util.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

struct Row {
  const char* bf16;
  const char* fp16;
  const char* accumulation;
  const char* pipeline;
  const char* stage;
  const char* theirs;
  const char* ours;
};

constexpr Row kRows[] = {
    {"T", "T", "any", "any", "any", "Error", "Error"},
    {"T", "F", "fp16", "any", "any", "NotSupported", "runs"},
    {"T", "F", "bf16", "any", "any", "OKAY", "runs"},
    {"T", "F", "fp32", "T", "1", "OKAY", "runs"},
    {"T", "F", "fp32", "F", "1", "NotSupported", "runs"},
    {"T", "F", "fp32", "any", "2, 3", "NotSupported", "runs"},
    {"F", "T", "fp16", "any", "any", "OKAY", "runs"},
    {"F", "T", "bf16, fp32", "any", "any", "NotSupported", "runs"},
    {"F", "F", "fp32", "any", "any", "OKAY", "runs"},
    {"F", "F", "bf16, fp16", "any", "any", "NotSupported", "runs"},
};

struct Cell {
  bool bf16, fp16;
  std::string accumulation;
  std::string sharded;  // "", "true", "false"
  int stage;
  bool pipeline;
  std::string wire;
  std::string level;  // "" = none
};

bool matches(const char* column, const std::string& value) {
  return std::string(column) == "any" || mentions(column, value);
}

std::string flag(bool value) { return value ? "T" : "F"; }

// "runs" or "Error" of the published table; FP8 accumulation and fp32 at stage 0 with bf16, which
// it does not list, run.
std::string published(const Cell& cell) {
  for (const Row& row : kRows) {
    if (matches(row.bf16, flag(cell.bf16)) && matches(row.fp16, flag(cell.fp16)) &&
        matches(row.accumulation, cell.accumulation) &&
        matches(row.pipeline, flag(cell.pipeline)) &&
        matches(row.stage, std::to_string(cell.stage))) {
      return row.ours;
    }
  }
  return "runs";
}

// What the nearest running cells differ in, by stage and sharded key.
std::string nearest(const Cell& cell) {
  const std::map<std::pair<int, std::string>, std::string> rest = {
      {{0, ""}, ""},
      {{0, "true"}, "stage 1, stage 2, no sharded key"},
      {{0, "false"}, ""},
      {{1, ""}, ""},
      {{1, "true"}, ""},
      {{1, "false"}, ""},
      {{2, ""}, ""},
      {{2, "true"}, ""},
      {{2, "false"}, "stage 0, stage 1, no sharded key"},
      {{3, ""}, "stage 0, stage 1, stage 2"},
      {{3, "true"}, "stage 1, stage 2"},
      {{3, "false"}, "stage 0, stage 1"},
  };
  std::string text = "nearest that run: ";
  const std::string& part = rest.at({cell.stage, cell.sharded});
  if (cell.bf16 && cell.fp16) {
    text += "neither bf16 nor fp16, bf16 alone, fp16 alone";
    if (!part.empty()) text += ", each with ";
  }
  return text + part;
}

// The whole error text, or "" for a cell that runs.
std::string expected_error(const Cell& cell) {
  if (published(cell) == "Error") {
    return "/bf16/enabled: given true while /fp16/enabled is true too; allowed: at most one of the "
           "two; set one of them to false; " +
           nearest(cell);
  }
  if (cell.stage == 3) {
    return "/zero_optimization/stage: given 3; allowed: 0, 1 or 2 (stage 3 is not yet supported); "
           "lower the stage; " +
           nearest(cell);
  }
  if ((cell.sharded == "true" && cell.stage == 0) || (cell.sharded == "false" && cell.stage == 2)) {
    return "/gradient_accumulation_dtype/sharded: given " + cell.sharded +
           " while /zero_optimization/stage is " + std::to_string(cell.stage) +
           "; allowed: sharded: false at stages 0, 1; sharded: true at stages 1, 2, 3; change one "
           "of "
           "the two keys; " +
           nearest(cell);
  }
  return "";
}

std::string text_of(const Cell& cell) {
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  std::string text = std::string("{\"bf16\":{\"enabled\":") + boolean(cell.bf16) +
                     "},\"fp16\":{\"enabled\":" + boolean(cell.fp16) +
                     "},\"zero_optimization\":{\"stage\":" + std::to_string(cell.stage) +
                     "},\"gradient_accumulation_dtype\":{\"dtype\":\"" + cell.accumulation + "\"";
  if (!cell.sharded.empty()) text += ",\"sharded\":" + cell.sharded;
  text += "},\"zerofp8\":{\"gradient_communication_dtype\":\"" + cell.wire + "\"";
  if (!cell.level.empty()) text += ",\"opt_level\":\"" + cell.level + "\"";
  return text + "}}";
}

std::vector<Cell> full_product() {
  std::vector<Cell> cells;
  const std::vector<std::string> dtypes = {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"};
  for (const int model : {0, 1, 2, 3}) {
    for (const std::string& accumulation : dtypes) {
      for (const char* sharded : {"", "true", "false"}) {
        for (const int stage : {0, 1, 2, 3}) {
          for (const bool pipeline : {false, true}) {
            for (const std::string& wire : dtypes) {
              for (const char* level : {"", "O0", "O1", "O2", "O3"}) {
                cells.push_back({(model & 1) != 0, (model & 2) != 0, accumulation, sharded, stage,
                                 pipeline, wire, level});
              }
            }
          }
        }
      }
    }
  }
  return cells;
}

void expect_resolves(const Cell& cell, const Settings& s) {
  EXPECT_EQ(to_string(s.accumulation.value), cell.accumulation);
  EXPECT_EQ(s.accumulation.origin, Origin::kKey);
  EXPECT_EQ(to_string(s.gradient_wire.value), cell.wire);
  EXPECT_EQ(to_string(s.weight.value), cell.bf16 ? "bf16" : cell.fp16 ? "fp16" : "fp32");
  EXPECT_EQ(s.stage.value, cell.stage);
  EXPECT_EQ(s.accumulation_sharded.value,
            cell.sharded.empty() ? cell.stage == 2 : cell.sharded == "true");
  EXPECT_EQ(to_string(s.opt_level.value), cell.level.empty() ? "O0" : cell.level);
  EXPECT_EQ(s.shard_ranks.value, cell.stage == 0 ? 1 : 4);
  const Plan plan = make_plan(s, uniform_size(100'000, s));
  EXPECT_GT(plan.state_bytes(), 0);
}

TEST(SupportTable, EveryCellResolvesOrGivesItsExactError) {
  int running = 0, refused = 0;
  for (const Cell& cell : full_product()) {
    const Launch launch{.data_ranks = 4, .pipeline_stages = cell.pipeline ? 2 : 1};
    std::string given;
    bool not_yet = false;
    try {
      const Settings settings = settings_of(text_of(cell), launch);
      expect_resolves(cell, settings);
      ++running;
    } catch (const ConfigError& error) {
      given = error.what();
      not_yet = dynamic_cast<const UnsupportedError*>(&error) != nullptr;
      ++refused;
    }
    ASSERT_EQ(given, expected_error(cell)) << text_of(cell);
    ASSERT_EQ(not_yet, cell.stage == 3 && !(cell.bf16 && cell.fp16)) << text_of(cell);
  }
  // 3 models x 5 x 5 x 5 x 2 x (9 of sharded x stage 0..2, less 2), and the rest of 12,000.
  EXPECT_EQ(running, 3 * 5 * 5 * 5 * 2 * 7);
  EXPECT_EQ(running + refused, 12000);
}

TEST(SupportTable, PrintsTheseRows) {
  const std::string text = support_matrix(/*markdown=*/true);
  const auto line = [&](const char* row) { EXPECT_MENTIONS(text, std::string(row) + "\n"); };
  line("| bf16 | fp16 | accumulation | PP | stage | DeepSpeed | zerofp8 |");
  line("| true | true | any | any | any | Error | error: names both keys |");
  line(
      "| true | false | fp16 | any | any | NotSupported | runs (block-scaled fp16); stage 3: not "
      "yet |");
  line("| true | false | bf16 | any | any | OKAY | runs; stage 3: not yet |");
  line("| true | false | fp32 | yes | 1 | OKAY | runs |");
  line("| true | false | fp32 | no | 1 | NotSupported | runs |");
  line("| true | false | fp32 | any | 2, 3 | NotSupported | runs; stage 3: not yet |");
  line("| false | true | fp16 | any | any | OKAY | runs (block-scaled fp16); stage 3: not yet |");
  line("| false | true | fp32, bf16 | any | any | NotSupported | runs; stage 3: not yet |");
  line("| false | false | fp32 | any | any | OKAY | runs; stage 3: not yet |");
  line("| false | false | bf16, fp16 | any | any | NotSupported | runs; stage 3: not yet |");
  line(
      "| at most one | at most one | fp8_e4m3, fp8_e5m2 | any | any | (none) | runs; stage 3: not "
      "yet |");
  EXPECT_MENTIONS(text,
                  "sharded: false holds for stages 0, 1; sharded: true holds for stages 1, 2, 3");
  EXPECT_MENTIONS(text, "| O2 | fp8_e4m3 | fp8_e4m3 | bits8 | bits8 | fp8_e4m3 | fp16 root |");
}

}  // namespace
}  // namespace zerofp8
