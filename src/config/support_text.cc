// The supported-combination table and the opt levels as text.
#include <fmt/format.h>

#include "src/config/presets.h"
#include "src/config/support_table.h"
#include "src/config/text_table.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

bool has(unsigned mask, int value) { return (mask >> value & 1U) != 0; }

// "1", "2, 3", or "any" for all of `count` values.
template <class Name>
std::string mask_text(unsigned mask, int count, Name name) {
  std::string text;
  int found = 0;
  for (int value = 0; value < count; ++value) {
    if (!has(mask, value)) continue;
    ++found;
    text += (text.empty() ? "" : ", ") + std::string(name(value));
  }
  return found == count ? "any" : text;
}

std::string flag_text(unsigned models, bool bf16) {
  if (has(models, static_cast<int>(ModelFlags::kBoth))) return "true";
  const bool fp32 = has(models, static_cast<int>(ModelFlags::kFp32));
  const bool on = has(models, static_cast<int>(bf16 ? ModelFlags::kBf16 : ModelFlags::kFp16));
  if (on && fp32) return "at most one";
  return on ? "true" : "false";
}

std::string accumulation_text(unsigned mask) {
  return mask_text(mask, static_cast<int>(DType::kUe4m4),
                   [](int value) { return to_string(static_cast<DType>(value)); });
}

std::string stage_text(unsigned mask) {
  return mask_text(mask, static_cast<int>(stage_rows().size()),
                   [](int v) { return fmt::to_string(v); });
}

std::string pipeline_text(unsigned mask) {
  return mask_text(mask, 2, [](int value) { return value == 0 ? "no" : "yes"; });
}

std::string verdict_text(const SupportRow& row) {
  if (row.verdict == Verdict::kContradiction) return fmt::format("error: {}", row.note);
  std::string text = "runs";
  if (!row.note.empty()) text += fmt::format(" ({})", row.note);
  for (const StageRow& stage : stage_rows()) {
    if (has(row.stages, stage.stage) && stage.verdict == Verdict::kNotYet) {
      text += fmt::format("; stage {}: not yet", stage.stage);
    }
  }
  return text;
}

std::string sharded_text() {
  std::string text;
  for (const ShardedRow& row : sharded_rows()) {
    text += fmt::format("{}sharded: {} holds for stages {}", text.empty() ? "" : "; ", row.sharded,
                        stage_text(row.stages));
  }
  return text;
}

TextTable level_table() {
  TextTable table{{{"level"},
                   {"accumulation"},
                   {"gradient wire"},
                   {"master (bf16)"},
                   {"master (fp16)"},
                   {"exp_avg"},
                   {"second moment"},
                   {"what"}},
                  {}};
  for (const Preset& level : kPresets) {
    const bool root = level.exp_avg_sq != DType::kFp32;
    table.rows.push_back(
        {std::string(to_string(level.level)), std::string(to_string(level.accumulation)),
         std::string(to_string(level.gradient_wire)), std::string(to_string(level.bf16_master)),
         std::string(to_string(level.fp16_master)), std::string(to_string(level.exp_avg)),
         std::string(to_string(level.exp_avg_sq)) + (root ? " root" : ""),
         std::string(level.help)});
  }
  return table;
}

// How to read the matrix.
constexpr std::string_view kKey[] = {
    "Each row is a kind of config: bf16 and fp16 are the enabled flags of these blocks (both "
    "false: "
    "an fp32 model), accumulation is gradient_accumulation_dtype, PP is whether the model is cut "
    "into pipeline stages, stage is /zero_optimization/stage.",
    "The last two columns say what happens with it: under DeepSpeed alone, as its own discussion "
    "of this key says, and here.",
};

}  // namespace

std::string support_matrix(bool markdown, int width) {
  const TableStyle style = markdown ? TableStyle::kMarkdown : TableStyle::kPlain;
  if (markdown) width = 0;
  TextTable table{
      {{"bf16"}, {"fp16"}, {"accumulation"}, {"PP"}, {"stage"}, {"DeepSpeed"}, {"zerofp8"}}, {}};
  for (const SupportRow& row : support_rows()) {
    table.rows.push_back({flag_text(row.models, true), flag_text(row.models, false),
                          accumulation_text(row.accumulations), pipeline_text(row.pipelines),
                          stage_text(row.stages), std::string(row.deepspeed), verdict_text(row)});
  }
  std::string text = table.text(style, width) + "\n";
  for (const std::string_view line : kKey) text += paragraph(line, width);
  text += "\n" +
          paragraph(fmt::format("Of /gradient_accumulation_dtype/sharded: {}.", sharded_text()),
                    width) +
          paragraph("Every gradient communication dtype goes with every row.", width) + "\n";
  return text + level_table().text(style, width);
}

}  // namespace zerofp8
