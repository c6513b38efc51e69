#include "src/config/setting_lines.h"

#include <fmt/format.h>

#include "src/config/text_table.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

template <class T>
SettingLine line(std::string name, const Setting<T>& setting) {
  SettingLine out{std::move(name), std::string(), setting.origin, setting.where};
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, double>) {
    out.value = setting.value;
  } else if constexpr (std::is_integral_v<T>) {
    out.value = static_cast<std::int64_t>(setting.value);
  } else {
    out.value = std::string(to_string(setting.value));
  }
  return out;
}

std::string adam_text(const AdamOptions& adam) {
  const bool decoupled = adam.algorithm == Algorithm::kAdamW;
  return fmt::format("{} ({} weight decay {}), lr {}, betas {} and {}, eps {}",
                     to_string(adam.algorithm), decoupled ? "decoupled" : "L2", adam.weight_decay,
                     adam.lr, adam.beta1, adam.beta2, adam.eps);
}

std::string loss_scale_text(const LossScaleOptions& scale) {
  if (!scale.enabled) return "none";
  if (!scale.dynamic) return fmt::format("static {}", scale.initial);
  return fmt::format("dynamic from {}, window {}, hysteresis {}{}, floor {}", scale.initial,
                     scale.window, scale.hysteresis,
                     scale.consecutive_hysteresis ? " (consecutive)" : "", scale.min_scale);
}

}  // namespace

std::vector<SettingLine> setting_lines(const Settings& s) {
  return {
      line("opt_level", s.opt_level),
      line("weight", s.weight),
      line("stage", s.stage),
      line("shard_ranks", s.shard_ranks),
      line("gradient_accumulation_dtype", s.accumulation),
      line("gradient_accumulation_sharded", s.accumulation_sharded),
      line("gradient_accumulation_error_feedback", s.error_feedback),
      line("gradient_communication_dtype", s.gradient_wire),
      line("two_level_ranks_per_node", s.ranks_per_node),
      line("two_level_in_node_dtype", s.in_node_wire),
      line("weight_communication_dtype", s.weight_wire),
      line("master_weights", s.master),
      line("exp_avg_dtype", s.exp_avg),
      line("exp_avg_sq_dtype", s.exp_avg_sq),
      line("fp32_moments_below", s.fp32_moments_below),
      line("block_size", s.block_size),
      line("seed", s.seed),
      line("reduce_bucket_size", s.reduce_bucket_size),
      line("allgather_bucket_size", s.allgather_bucket_size),
      line("overlap_comm", s.overlap_comm),
      line("offload_optimizer", s.offload_optimizer),
      line("gradient_clipping", s.gradient_clipping),
      {"loss_scale", loss_scale_text(s.loss_scale), s.loss_scale.origin, s.loss_scale.where},
      {"optimizer", adam_text(s.adam), s.adam.origin, s.adam.where},
  };
}

std::string origin_text(Origin origin, const std::string& where) {
  if (where.empty()) return std::string(to_string(origin));
  if (origin == Origin::kDefault) return fmt::format("default ({})", where);
  return fmt::format("{} {}", to_string(origin), where);
}

}  // namespace zerofp8
