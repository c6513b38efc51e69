// The plan and the settings as tables.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

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

std::int64_t total_bytes(const Plan& plan) {
  std::int64_t total = 0;
  for (const PlanRow& row : plan.rows) total += row.bytes;
  return total;
}

TextTable memory_table(const Plan& plan) {
  const std::int64_t total = total_bytes(plan);
  const ByteUnit unit(total);
  TextTable table{{{"component"},
                   {"dtype"},
                   {"place"},
                   {fmt::format("{} per rank", unit.name), true},
                   {"B/param", true},
                   {"from"}},
                  {}};
  for (const PlanRow& row : plan.rows) {
    if (row.bytes == 0) continue;  // memoryless_text() names it
    table.rows.push_back({row.name, row.dtype, row.place, unit.text(row.bytes),
                          per_parameter(row.bytes, plan), origin_text(row.origin, row.where)});
  }
  table.rows.push_back({"total", "", "", unit.text(total), per_parameter(total, plan), ""});
  table.rows.push_back({"of which the engine allocates", "", "", unit.text(plan.state_bytes()),
                        per_parameter(plan.state_bytes(), plan), ""});
  return table;
}

// Parts without memory of their own, and why.
std::string memoryless_text(const Plan& plan) {
  std::string text;
  for (const PlanRow& row : plan.rows) {
    const bool own = row.place == "local" || row.place.starts_with("sharded");
    if (row.bytes > 0 || own || row.component == Component::kTransient) continue;
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", row.name, row.place);
  }
  return text.empty() ? "" : "Without memory of its own: " + text + ".";
}

// What lives within one exchange: the messages of a bucket, and weights as they are gathered.
std::string temporaries_text(const Plan& plan) {
  const TemporaryBytes bytes = temporary_bytes(plan.settings, plan.size);
  if (bytes.per_bucket == 0) return "Temporaries: small, one rank exchanges nothing.";
  const std::string weights = bytes.weights == 0 ? ""
                                                 : fmt::format(" and {} as weights are gathered",
                                                               bytes_text(bytes.weights));
  return fmt::format(
      "Temporaries may add about {} for each bucket that is being reduced{}; lower "
      "/zero_optimization/reduce_bucket_size and allgather_bucket_size for less.",
      bytes_text(bytes.per_bucket), weights);
}

TextTable wire_table(const Plan& plan) {
  std::int64_t most = 0;
  for (const PlanCollective& c : plan.collectives) most = std::max(most, c.bytes_per_step);
  const ByteUnit unit(most);
  TextTable table{{{"collective, in order"},
                   {"dtype"},
                   {"ranks", true},
                   {"calls/step", true},
                   {fmt::format("{} sent per rank and step", unit.name), true}},
                  {}};
  for (const PlanCollective& c : plan.collectives) {
    const bool control = c.operation == "control";
    table.rows.push_back({c.what, control ? "-" : std::string(to_string(c.dtype)),
                          fmt::to_string(c.ranks), count_text(c.calls_per_step),
                          control ? "control" : unit.text(c.bytes_per_step)});
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

std::string warnings_text(const Settings& s, int width) {
  std::string text;
  for (const std::string& warning : s.warnings) text += paragraph("warning: " + warning, width);
  if (!s.assumed.empty()) {
    text += paragraph(fmt::format("assumed for each \"auto\", until the trainer fills it: {}",
                                  fmt::join(s.assumed, ", ")),
                      width);
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

std::string settings_table(const Settings& settings, bool color, int width) {
  const TableStyle style = color ? TableStyle::kColor : TableStyle::kPlain;
  TextTable table{{{"setting"}, {"value"}, {"from"}}, {}};
  for (const SettingLine& line : setting_lines(settings)) {
    table.rows.push_back({line.name, value_text(line), origin_text(line.origin, line.where)});
  }
  table.rows.push_back({"batch", batch_text(settings), ""});
  table.rows.push_back({"ranks", ranks_text(settings.launch), settings.launch.from});
  return table.text(style, width) + warnings_text(settings, width);
}

std::string plan_table(const Plan& plan, bool color, int width) {
  const TableStyle style = color ? TableStyle::kColor : TableStyle::kPlain;
  std::string text = settings_table(plan.settings, color, width) + "\n";
  text += fmt::format("{}: {} parameters on this rank\n", bold("Memory", style),
                      count_text(plan.size.parameters));
  text += memory_table(plan).text(style, width);
  const std::string memoryless = memoryless_text(plan);
  if (!memoryless.empty()) text += paragraph(memoryless, width);
  text += paragraph(temporaries_text(plan), width) + "\n";
  text += bold("Wire", style) + (plan.collectives.empty() ? ": one rank, nothing is sent\n" : "\n");
  if (!plan.collectives.empty()) text += wire_table(plan).text(style, width);
  if (is_two_level(plan.settings)) {
    text += paragraph(
        "Gradients of named reduce groups are reduced in one level, not counted apart here.",
        width);
  }
  text += "\n" + paragraph(fmt::format("Averaging: {}.", plan.averaging), width);
  text += paragraph(
      "Not counted: the model's own gradients and activations; named reduce groups are counted as "
      "the others are.",
      width);
  if (plan.settings.offload_optimizer == Offload::kCpu) {
    text += paragraph(
        "Offloaded from a CUDA device: host memory also has page-locked copies of the weights and "
        "of a few gradients.",
        width);
  }
  return text +
         paragraph(fmt::format("Bytes per parameter elsewhere, unsharded: {}.", peers_text()),
                   width);
}

}  // namespace zerofp8
