#include "src/config/support_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr unsigned bit(int value) { return 1U << value; }
template <class E>
constexpr unsigned bit(E value) {
  return 1U << static_cast<unsigned>(value);
}

constexpr unsigned kAnyStage = bit(0) | bit(1) | bit(2) | bit(3);
constexpr unsigned kOff = bit(0), kOn = bit(1), kAnyPipeline = kOff | kOn;
constexpr unsigned kFp32 = bit(DType::kFp32), kBf16 = bit(DType::kBf16), kFp16 = bit(DType::kFp16);
constexpr unsigned kFp8 = bit(DType::kE4m3) | bit(DType::kE5m2);
constexpr unsigned kAnyDType = kFp32 | kBf16 | kFp16 | kFp8;
constexpr unsigned kModelFp32 = bit(ModelFlags::kFp32), kModelBf16 = bit(ModelFlags::kBf16);
constexpr unsigned kModelFp16 = bit(ModelFlags::kFp16), kModelBoth = bit(ModelFlags::kBoth);
constexpr unsigned kAnyOne = kModelFp32 | kModelBf16 | kModelFp16;

using enum Verdict;

constexpr SupportRow kSupportTable[] = {
    {kModelBoth, kAnyDType, kAnyPipeline, kAnyStage, "Error", kContradiction, "names both keys"},
    {kModelBf16, kFp16, kAnyPipeline, kAnyStage, "NotSupported", kRuns, "block-scaled fp16"},
    {kModelBf16, kBf16, kAnyPipeline, kAnyStage, "OKAY", kRuns, ""},
    {kModelBf16, kFp32, kAnyPipeline, bit(0), "(not listed)", kRuns, ""},
    {kModelBf16, kFp32, kOn, bit(1), "OKAY", kRuns, ""},
    {kModelBf16, kFp32, kOff, bit(1), "NotSupported", kRuns, ""},
    {kModelBf16, kFp32, kAnyPipeline, bit(2) | bit(3), "NotSupported", kRuns, ""},
    {kModelFp16, kFp16, kAnyPipeline, kAnyStage, "OKAY", kRuns, "block-scaled fp16"},
    {kModelFp16, kBf16 | kFp32, kAnyPipeline, kAnyStage, "NotSupported", kRuns, ""},
    {kModelFp32, kFp32, kAnyPipeline, kAnyStage, "OKAY", kRuns, ""},
    {kModelFp32, kBf16 | kFp16, kAnyPipeline, kAnyStage, "NotSupported", kRuns, ""},
    {kAnyOne, kFp8, kAnyPipeline, kAnyStage, "(none)", kRuns, ""},
};

constexpr StageRow kStageRows[] = {{0, kRuns}, {1, kRuns}, {2, kRuns}, {3, kNotYet}};

// Stages 2 and 3 mean sharded gradients, stage 0 means nothing is sharded.
constexpr ShardedRow kShardedRows[] = {{false, bit(0) | bit(1)}, {true, bit(1) | bit(2) | bit(3)}};

bool contains(const SupportRow& row, const Cell& cell) {
  return (row.models & bit(cell.model)) && (row.accumulations & bit(cell.accumulation)) &&
         (row.pipelines & bit(cell.pipeline ? 1 : 0)) && (row.stages & bit(cell.stage));
}

bool sharding_holds(const Cell& cell) {
  for (const ShardedRow& row : kShardedRows) {
    if (cell.sharded == row.sharded) return (row.stages & bit(cell.stage)) != 0;
  }
  return true;
}

Verdict row_verdict(const Cell& cell) {
  for (const SupportRow& row : kSupportTable) {
    if (contains(row, cell)) return row.verdict;
  }
  return kNotYet;  // a format that no row lists
}

// What changed beside the model's flags.
std::string rest_text(const Cell& from, const Cell& to) {
  std::string text;
  if (to.stage != from.stage) text = fmt::format("stage {}", to.stage);
  if (to.sharded != from.sharded) {
    text += fmt::format("{}no sharded key", text.empty() ? "" : " and ");
  }
  return text;
}

void add_once(std::vector<std::string>& texts, const std::string& text) {
  if (text.empty() || std::find(texts.begin(), texts.end(), text) != texts.end()) return;
  texts.push_back(text);
}

// Cells that differ in the model's flags, the stage or the sharded key.
std::vector<Cell> neighbours(const Cell& cell) {
  std::vector<Cell> found;
  for (const ModelFlags model : {ModelFlags::kFp32, ModelFlags::kBf16, ModelFlags::kFp16}) {
    Cell other = cell;
    other.model = model;
    if (model != cell.model) found.push_back(other);
  }
  for (const StageRow& row : kStageRows) {
    Cell other = cell;
    other.stage = row.stage;
    if (row.stage != cell.stage) found.push_back(other);
  }
  if (cell.sharded) {
    Cell other = cell;
    other.sharded = std::nullopt;
    found.push_back(other);
  }
  return found;
}

std::string nearest_text(const Cell& cell) {
  constexpr std::string_view kModels[] = {"neither bf16 nor fp16", "bf16 alone", "fp16 alone", ""};
  std::vector<std::string> models, rests;
  for (const Cell& other : nearest_running(cell)) {
    if (other.model != cell.model) {
      add_once(models, std::string(kModels[static_cast<int>(other.model)]));
    }
    add_once(rests, rest_text(cell, other));
  }
  const bool both = !models.empty() && !rests.empty();
  return fmt::format("nearest that run: {}{}{}", fmt::join(models, ", "),
                     both ? ", each with " : "", fmt::join(rests, ", "));
}

[[noreturn]] void throw_sharding(const Cell& cell) {
  std::string allowed;
  for (const ShardedRow& row : kShardedRows) {
    std::vector<int> stages;
    for (const StageRow& stage : kStageRows) {
      if (row.stages & bit(stage.stage)) stages.push_back(stage.stage);
    }
    allowed += fmt::format("{}sharded: {} at stages {}", allowed.empty() ? "" : "; ", row.sharded,
                           fmt::join(stages, ", "));
  }
  throw ConfigError(
      "/gradient_accumulation_dtype/sharded",
      fmt::format("{} while /zero_optimization/stage is {}", *cell.sharded, cell.stage), allowed,
      "change one of the two keys; " + nearest_text(cell));
}

}  // namespace

std::span<const SupportRow> support_rows() { return kSupportTable; }
std::span<const StageRow> stage_rows() { return kStageRows; }
std::span<const ShardedRow> sharded_rows() { return kShardedRows; }

Verdict verdict_of(const Cell& cell) {
  if (const Verdict row = row_verdict(cell); row != kRuns) return row;
  for (const StageRow& row : kStageRows) {
    if (row.stage == cell.stage && row.verdict != kRuns) return row.verdict;
  }
  return sharding_holds(cell) ? kRuns : kContradiction;
}

std::vector<Cell> nearest_running(const Cell& cell) {
  std::vector<Cell> running;
  for (const Cell& other : neighbours(cell)) {
    if (verdict_of(other) == kRuns) running.push_back(other);
  }
  if (!running.empty()) return running;
  for (const Cell& between : neighbours(cell)) {
    for (const Cell& other : neighbours(between)) {
      const bool known = std::find(running.begin(), running.end(), other) != running.end();
      if (!known && verdict_of(other) == kRuns) running.push_back(other);
    }
  }
  return running;
}

void check_supported(const Cell& cell) {
  if (verdict_of(cell) == kRuns) return;
  if (cell.model == ModelFlags::kBoth) {
    throw ConfigError("/bf16/enabled", "true while /fp16/enabled is true too",
                      "at most one of the two", "set one of them to false; " + nearest_text(cell));
  }
  for (const StageRow& row : kStageRows) {
    if (row.stage == cell.stage && row.verdict == kNotYet) {
      throw UnsupportedError("/zero_optimization/stage", fmt::to_string(cell.stage),
                             "0, 1 or 2 (stage 3 is not yet supported)",
                             "lower the stage; " + nearest_text(cell));
    }
  }
  throw_sharding(cell);
}

}  // namespace zerofp8
