// Rules between settings that the published table does not list, as data.
#include <fmt/format.h>

#include <cmath>

#include "src/config/config_impl.h"
#include "src/config/mistakes.h"
#include "src/config/support_table.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

using Written = Config::Impl;

struct SettingRule {
  std::string_view pointer;
  bool not_yet;
  bool (*broken)(const Settings&, const Written&);
  std::string (*given)(const Settings&, const Written&);
  std::string_view allowed;
  std::string_view fix;
  std::string_view alias = {};  // DeepSpeed's spelling of the same key
};

std::string with_accumulation(std::string_view what, const Settings& s) {
  return fmt::format("{} with {} accumulation", what, to_string(s.accumulation.value));
}

constexpr SettingRule kRules[] = {
    {"/gradient_accumulation_dtype/error_feedback", false,
     [](const Settings& s, const Written&) { return s.error_feedback && !is_fp8(s.accumulation); },
     [](const Settings& s, const Written&) { return with_accumulation("true", s); },
     "true with FP8 accumulation only",
     "remove it, or set /gradient_accumulation_dtype/dtype to \"fp8\""},
    {"/gradient_accumulation_dtype/format", false,
     [](const Settings& s, const Written& w) {
       return w.find("/gradient_accumulation_dtype/format") && !is_fp8(s.accumulation);
     },
     [](const Settings& s, const Written& w) {
       return with_accumulation(w.find("/gradient_accumulation_dtype/format")->text, s);
     },
     "a format with FP8 accumulation only",
     "remove it, or set /gradient_accumulation_dtype/dtype to \"fp8\""},
    {"/data_types/param_dtype", false,
     [](const Settings& s, const Written& w) {
       const Value* param = w.find("/data_types/param_dtype");
       return param && dtype_from_string(std::get<std::string>(param->data)) != s.weight.value;
     },
     [](const Settings& s, const Written& w) {
       return fmt::format("{} while /bf16/enabled and /fp16/enabled make it {}",
                          w.find("/data_types/param_dtype")->text, to_string(s.weight.value));
     },
     "the dtype that the flags say", "set the flag to match, or remove the key"},
    {"/zerofp8/weight_communication_dtype", true,
     [](const Settings& s, const Written&) { return s.weight_wire.value != s.weight.value; },
     [](const Settings& s, const Written&) {
       return fmt::format("{} for {} weights", to_string(s.weight_wire.value),
                          to_string(s.weight.value));
     },
     "the weight's own dtype (others are not yet supported)", "remove the key"},
    {"/zerofp8/overrides", true,
     [](const Settings&, const Written& w) {
       const Value* overrides = w.find("/zerofp8/overrides");
       return overrides && std::get<std::int64_t>(overrides->data) > 0;
     },
     [](const Settings&, const Written& w) { return w.find("/zerofp8/overrides")->text; },
     "an empty list (overrides are not yet supported)", "remove the key"},
    {"/zerofp8/shard_group_size", false,
     [](const Settings& s, const Written&) { return s.stage == 0 && s.shard_ranks > 1; },
     [](const Settings& s, const Written&) {
       return fmt::format("{} while /zero_optimization/stage is 0", s.shard_ranks.value);
     },
     "a group size at stages 1 and 2", "stage 0 shards nothing: remove it or set stage 1 or 2",
     "/zero_optimization/zero_hpz_partition_size"},
    {"/zerofp8/shard_group_size", false,
     [](const Settings& s, const Written&) { return s.launch.data_ranks % s.shard_ranks != 0; },
     [](const Settings& s, const Written&) {
       return fmt::format("{} with {} data ranks", s.shard_ranks.value, s.launch.data_ranks);
     },
     "a divisor of the number of data ranks", "choose a size that divides the data ranks",
     "/zero_optimization/zero_hpz_partition_size"},
    {"/zerofp8/two_level_reduce_scatter/ranks_per_node", false,
     [](const Settings& s, const Written&) { return reduction_ranks(s) % s.ranks_per_node != 0; },
     [](const Settings& s, const Written&) {
       return fmt::format("{} with {} {}", s.ranks_per_node.value, reduction_ranks(s),
                          is_hybrid(s) ? "ranks per shard group" : "data ranks");
     },
     "a divisor of the number of ranks that reduce together",
     "choose a size that divides them, or remove /zerofp8/two_level_reduce_scatter"},
    {"/zerofp8/two_level_reduce_scatter/in_node_dtype", false,
     [](const Settings& s, const Written&) {
       return s.in_node_wire.origin == Origin::kKey && s.ranks_per_node.origin != Origin::kKey;
     },
     [](const Settings& s, const Written&) {
       return fmt::format("\"{}\" without ranks_per_node beside it",
                          to_string(s.in_node_wire.value));
     },
     "both keys, or neither", "add /zerofp8/two_level_reduce_scatter/ranks_per_node or remove it"},
    {"/fp16/min_loss_scale", false,
     [](const Settings& s, const Written&) {
       return s.loss_scale.value.dynamic &&
              s.loss_scale.value.min_scale > s.loss_scale.value.initial;
     },
     [](const Settings& s, const Written&) {
       return fmt::format("{} above the first scale, {}", s.loss_scale.value.min_scale,
                          s.loss_scale.value.initial);
     },
     "at most 2 to the power of /fp16/initial_scale_power", "lower it or raise that power"},
};

}  // namespace

void check_settings(const Settings& settings, const Config::Impl& written, Mistakes& mistakes) {
  for (const SettingRule& rule : kRules) {
    if (!rule.broken(settings, written)) continue;
    const Value* value = written.find(rule.pointer);
    if (!value) value = written.find(rule.alias);
    const std::string pointer(value ? value->pointer : rule.pointer);
    const std::string given = rule.given(settings, written);
    const std::string allowed(rule.allowed), fix(rule.fix);
    mistakes.add(ConfigError(pointer, given, allowed, fix), rule.not_yet);
  }
}

}  // namespace zerofp8
