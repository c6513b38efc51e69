// The plan and the settings as tables.
#include <fmt/format.h>

#include "src/config/peers.h"
#include "src/config/setting_lines.h"
#include "src/config/text_table.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

std::string value_text(const SettingLine& line) {
  return std::visit(
      [](const auto& value) {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::int64_t>) return count_text(value);
        return fmt::format("{}", value);
      },
      line.value);
}

std::string per_parameter(std::int64_t bytes, const Plan& plan) {
  if (plan.size.parameters == 0) return "-";
  return fmt::format("{:.3f}",
                     static_cast<double>(bytes) / static_cast<double>(plan.size.parameters));
}

TextTable memory_table(const Plan& plan) {
  TextTable table{
      {{"component"}, {"dtype"}, {"place"}, {"per rank", true}, {"B/param", true}, {"from"}}, {}};
  std::int64_t total = 0;
  for (const PlanRow& row : plan.rows) {
    total += row.bytes;
    table.rows.push_back({row.name, row.dtype, row.place, bytes_text(row.bytes),
                          per_parameter(row.bytes, plan), origin_text(row.origin, row.where)});
  }
  table.rows.push_back({"total", "", "", bytes_text(total), per_parameter(total, plan), ""});
  table.rows.push_back({"of which the engine allocates", "", "", bytes_text(plan.state_bytes()),
                        per_parameter(plan.state_bytes(), plan), ""});
  return table;
}

TextTable wire_table(const Plan& plan) {
  TextTable table{{{"collective, in order"},
                   {"dtype"},
                   {"ranks", true},
                   {"calls/step", true},
                   {"sent per rank and step", true}},
                  {}};
  for (const PlanCollective& c : plan.collectives) {
    const bool control = c.operation == "control";
    table.rows.push_back({c.what, control ? "-" : std::string(to_string(c.dtype)),
                          fmt::to_string(c.ranks), count_text(c.calls_per_step),
                          control ? "control" : bytes_text(c.bytes_per_step)});
  }
  return table;
}

std::string batch_text(const Settings& s) {
  if (s.batch.micro_batch == 0) {
    return fmt::format("{} micro-batches per step; batch sizes are left to the trainer",
                       s.batch.accumulation_steps);
  }
  return fmt::format("{} samples = {} per micro-batch x {} micro-batches x {} data ranks",
                     s.batch.train_batch, s.batch.micro_batch, s.batch.accumulation_steps,
                     s.launch.data_ranks);
}

std::string ranks_text(const Launch& launch) {
  return fmt::format("{} data x {} pipeline x {} tensor", launch.data_ranks, launch.pipeline_stages,
                     launch.tensor_ranks);
}

std::string warnings_text(const Settings& s) {
  std::string text;
  for (const std::string& warning : s.warnings) text += "warning: " + warning + "\n";
  if (!s.assumed.empty()) {
    text += fmt::format("assumed for each \"auto\", until the trainer fills it: {}\n",
                        fmt::join(s.assumed, ", "));
  }
  return text;
}

std::string peers_text() {
  std::string text;
  for (const Peer& peer : kPeers) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", peer.name, peer.total());
  }
  return text;
}

}  // namespace

std::string settings_table(const Settings& settings, bool color) {
  const TableStyle style = color ? TableStyle::kColor : TableStyle::kPlain;
  TextTable table{{{"setting"}, {"value"}, {"from"}}, {}};
  for (const SettingLine& line : setting_lines(settings)) {
    table.rows.push_back({line.name, value_text(line), origin_text(line.origin, line.where)});
  }
  table.rows.push_back({"batch", batch_text(settings), ""});
  table.rows.push_back({"ranks", ranks_text(settings.launch), "launch"});
  return table.text(style) + warnings_text(settings);
}

std::string plan_table(const Plan& plan, bool color) {
  const TableStyle style = color ? TableStyle::kColor : TableStyle::kPlain;
  std::string text = settings_table(plan.settings, color) + "\n";
  text += fmt::format("{}: {} parameters on this rank\n", bold("Memory", style),
                      count_text(plan.size.parameters));
  text += memory_table(plan).text(style) + "\n";
  text += bold("Wire", style) + (plan.collectives.empty() ? ": one rank, nothing is sent\n" : "\n");
  if (!plan.collectives.empty()) text += wire_table(plan).text(style);
  if (is_two_level(plan.settings)) {
    text += "Gradients of named reduce groups are reduced in one level, not counted apart here.\n";
  }
  text += fmt::format("\nAveraging: {}.\n", plan.averaging);
  text +=
      "Not counted: the model's own gradients and activations, and buffers that live within one "
      "exchange; fp32 parameters\nbeside a 16-bit model and named reduce groups are counted as the "
      "others are.\n";
  if (plan.settings.offload_optimizer == Offload::kCpu) {
    text +=
        "Offloaded from a CUDA device: host memory also has page-locked copies of the weights and "
        "of a few gradients.\n";
  }
  return text + fmt::format("Bytes per parameter elsewhere, unsharded: {}.\n", peers_text());
}

}  // namespace zerofp8
