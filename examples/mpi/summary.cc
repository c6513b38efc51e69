#include "summary.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace zerofp8::example {
namespace {

std::string check(double planned, double counted) {
  return planned == counted ? "as planned" : "NOT AS PLANNED";
}

nlohmann::json to_value(const RunResult& r) {
  return {{"name", r.name},
          {"losses", r.losses},
          {"norms", r.norms},
          {"train_loss", r.train_loss},
          {"validation_loss", r.validation_loss},
          {"parameters", r.parameters},
          {"skipped", r.skipped},
          {"seconds", r.seconds},
          {"tokens_per_second", r.tokens_per_second},
          {"step_seconds", r.step_seconds},
          {"step_bytes", r.step_bytes},
          {"copy_bytes_per_second", r.copy_bytes_per_second},
          {"planned_state_bytes", r.planned_state_bytes},
          {"counted_state_bytes", r.counted_state_bytes},
          {"bytes_per_parameter", r.planned_bytes_per_parameter},
          {"planned_wire_bytes", r.planned_wire_bytes},
          {"counted_wire_bytes", r.counted_wire_bytes},
          {"plan", r.plan_json.empty() ? nlohmann::json() : nlohmann::json::parse(r.plan_json)}};
}

}  // namespace

std::string summary_text(const RunResult& r, const RunResult* baseline) {
  std::string text =
      fmt::format("\n{} parameters, {} steps, {} skipped, {:.0f} tokens/s, {:.1f} s\n",
                  r.parameters, r.losses.size(), r.skipped, r.tokens_per_second, r.seconds);
  text += fmt::format("  {:<22}{:>14}{:>14}\n", "loss (nats per byte)", "training", "validation");
  text += fmt::format("  {:<22}{:>14.4f}{:>14.4f}\n", "zerofp8 " + r.name, r.train_loss,
                      r.validation_loss);
  if (baseline != nullptr) {
    text += fmt::format("  {:<22}{:>14.4f}{:>14.4f}\n", "plain FP32 AdamW", baseline->train_loss,
                        baseline->validation_loss);
    text += fmt::format("  {:<22}{:>+14.4f}{:>+14.4f}\n", "difference",
                        r.train_loss - baseline->train_loss,
                        r.validation_loss - baseline->validation_loss);
  }
  text += fmt::format(
      "  state of rank 0: {:.0f} bytes counted, {:.0f} planned: {}; {:.3f} bytes per parameter "
      "with the weight\n",
      r.counted_state_bytes, r.planned_state_bytes,
      check(r.planned_state_bytes, r.counted_state_bytes), r.planned_bytes_per_parameter);
  text += fmt::format("  wire of rank 0: {:.0f} bytes per step counted, {:.0f} planned: {}\n",
                      r.counted_wire_bytes, r.planned_wire_bytes,
                      check(r.planned_wire_bytes, r.counted_wire_bytes));
  text += fmt::format(
      "  step: median {:.2f} ms for {:.2f} MB of state: {:.0f} % of this machine's copy speed "
      "({:.1f} GB/s per rank)\n",
      r.step_seconds * 1e3, r.step_bytes / 1e6,
      r.step_seconds > 0 ? 100 * r.step_bytes / r.step_seconds / r.copy_bytes_per_second : 0,
      r.copy_bytes_per_second / 1e9);
  return text;
}

std::string results_json(const std::vector<const RunResult*>& runs, const RunOptions& o,
                         int ranks) {
  nlohmann::json list = nlohmann::json::array();
  for (const RunResult* run : runs) list.push_back(to_value(*run));
  const nlohmann::json value = {{"ranks", ranks},
                                {"seed", o.seed},
                                {"steps", o.steps},
                                {"model",
                                 {{"layers", o.model.layers},
                                  {"width", o.model.width},
                                  {"heads", o.model.heads},
                                  {"context", o.model.context}}},
                                {"runs", list}};
  return value.dump(1) + "\n";
}

}  // namespace zerofp8::example
