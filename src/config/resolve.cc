// Config -> Settings: what was written, the level and the defaults become what will run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/config/mistakes.h"
#include "src/config/reader.h"
#include "src/config/support_table.h"
#include "zerofp8/error.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

// /zerofp8/opt_level, or MS-AMP's section if that is enabled.
Setting<std::string> written_level(const Reader& read) {
  constexpr std::string_view kOurs = "/zerofp8/opt_level", kTheirs = "/msamp/opt_level";
  const Setting<bool> msamp = read.boolean("/msamp/enabled");
  if (!msamp.value) return read.text(kOurs);
  const Value* ours = read.find(kOurs);
  const Value* theirs = read.find(kTheirs);
  if (ours && theirs) require_agreement(*ours, *theirs, ours->data == theirs->data);
  if (ours) return read.text(kOurs);
  return {read.text(kTheirs).value, Origin::kKey, theirs ? theirs->pointer : msamp.where};
}

Setting<OptLevel> resolve_level(const Reader& read, const Arguments& arguments) {
  const Setting<std::string> written = written_level(read);
  Setting<OptLevel> level{OptLevel::kO0, written.origin, written.where};
  for (const OptLevel known : {OptLevel::kO0, OptLevel::kO1, OptLevel::kO2, OptLevel::kO3}) {
    if (to_string(known) == written.value) level.value = known;
  }
  if (!arguments.opt_level) return level;
  if (written.origin == Origin::kKey && *arguments.opt_level != level.value) {
    throw ConfigError(written.where,
                      fmt::format("\"{}\", but the argument opt_level says {}", written.value,
                                  to_string(*arguments.opt_level)),
                      "one of the two, or the same value in both", "remove one of them");
  }
  return {*arguments.opt_level, Origin::kArgument, "opt_level"};
}

Setting<Offload> resolve_offload(const Reader& read) {
  const Setting<std::string> device = read.text("/zero_optimization/offload_optimizer/device");
  const Value* obsolete = read.find("/zero_optimization/cpu_offload");
  if (obsolete && std::get<bool>(obsolete->data)) {
    if (const Value* written = read.find("/zero_optimization/offload_optimizer/device")) {
      require_agreement(*written, *obsolete, device.value == to_string(Offload::kCpu));
    }
    return {Offload::kCpu, Origin::kKey, obsolete->pointer};
  }
  return {device.value == to_string(Offload::kCpu) ? Offload::kCpu : Offload::kNone, device.origin,
          device.where};
}

Setting<double> resolve_clipping(const Reader& read, const Arguments& arguments) {
  constexpr std::string_view kPath = "/gradient_clipping";
  if (!read.is_auto(kPath) || !arguments.auto_gradient_clipping) {
    Setting<double> clipping = read.number(kPath);
    if (clipping.origin == Origin::kDefault && clipping.where.empty()) clipping.where = "off";
    return clipping;
  }
  return {*arguments.auto_gradient_clipping, Origin::kArgument, "gradient_clipping"};
}

Setting<int> resolve_shard_ranks(const Reader& read, const Settings& s) {
  const Value* ours = read.find("/zerofp8/shard_group_size");
  const Value* theirs = read.find("/zero_optimization/zero_hpz_partition_size");
  if (theirs && std::get<std::int64_t>(theirs->data) <= 1) theirs = nullptr;  // "not set"
  if (ours && theirs) require_agreement(*ours, *theirs, ours->data == theirs->data);
  if (const Value* written = ours ? ours : theirs) {
    return read.integer<int>(canonical_path(written->pointer));
  }
  if (s.stage == 0) return {1, Origin::kDefault, "stage 0 shards nothing"};
  return {s.launch.data_ranks, Origin::kDefault, "all data ranks"};
}

// One rule for every number of nodes: the sum of a single one is rounded, too. That costs accuracy
// and saves no bytes.
void warn_about_one_node(Settings& s) {
  if (!is_two_level(s) || s.ranks_per_node < reduction_ranks(s)) return;
  s.warnings.push_back(fmt::format(
      "{}: {} ranks are all that reduce together, so nothing travels in {}; the node's sum is "
      "rounded to it as if it did",
      s.ranks_per_node.where, s.ranks_per_node.value, to_string(s.gradient_wire.value)));
}

void warn_about_narrow_sums(Settings& s) {
  // To nearest, a running sum of ones would stop at 2^(mantissa bits + 1); the accumulator rounds
  // stochastically from 17 micro-batches on, so that beyond this limit addends count on average
  // only.
  const std::int64_t steps = s.batch.accumulation_steps;
  const bool plain_16_bit = s.accumulation == DType::kBf16 || s.accumulation == DType::kFp16;
  const std::int64_t limit = std::int64_t{2} << format_info(s.accumulation).mantissa_bits;
  if (!plain_16_bit || steps <= limit) return;
  s.warnings.push_back(fmt::format(
      "{} accumulation of {} micro-batches: addends below 1/{} of the sum count on average only "
      "(stochastic rounding); fp32 has no such noise",
      to_string(s.accumulation.value), steps, limit));
}

void warn_about_no_effect(const Config::Impl& written, Settings& s) {
  std::string list;
  for (const std::string& pointer : written.no_effect) {
    list += (list.empty() ? "" : ", ") + pointer;
  }
  if (!list.empty()) s.warnings.push_back("no effect here, zerofp8 does this part itself: " + list);
  if (written.unknown.empty()) return;
  s.warnings.push_back(
      fmt::format("unknown, passed over as DeepSpeed does: {}", fmt::join(written.unknown, ", ")));
}

void check_launch(const Launch& launch) {
  if (launch.data_ranks >= 1 && launch.pipeline_stages >= 1 && launch.tensor_ranks >= 1) return;
  throw ArgumentError(fmt::format(
      "launch: data_ranks {}, pipeline_stages {} and tensor_ranks {} must all be at least 1",
      launch.data_ranks, launch.pipeline_stages, launch.tensor_ranks));
}

}  // namespace

Settings resolve(const Config& config, const Launch& launch, const Arguments& arguments) {
  check_launch(launch);
  Settings s;
  s.launch = launch;
  s.assumed = config.impl().assumed;
  const Reader read(config.impl(), arguments, s.assumed);
  Mistakes mistakes;
  DTypeFlags flags;
  mistakes.of([&] { s.opt_level = resolve_level(read, arguments); });
  mistakes.of([&] { flags = read_flags(read); });
  mistakes.of([&] { resolve_dtypes(read, flags, s); });
  // Rules between settings would report what only follows from a mistake before.
  const bool whole = !mistakes.any();
  if (whole) mistakes.of([&] { check_cell(read, flags, s); });
  s.shard_ranks.value = 1;
  mistakes.of([&] { s.shard_ranks = resolve_shard_ranks(read, s); });
  s.block_size = read.integer<int>("/zerofp8/block_size");
  s.seed = read.integer<std::uint64_t>("/zerofp8/seed");
  s.reduce_bucket_size = read.integer<std::int64_t>("/zero_optimization/reduce_bucket_size");
  s.allgather_bucket_size = read.integer<std::int64_t>("/zero_optimization/allgather_bucket_size");
  s.overlap_comm = read.boolean("/zero_optimization/overlap_comm");
  mistakes.of([&] { s.offload_optimizer = resolve_offload(read); });
  mistakes.of([&] { s.gradient_clipping = resolve_clipping(read, arguments); });
  s.loss_scale = resolve_loss_scale(read, flags.fp16.value || s.weight == DType::kFp16);
  mistakes.of([&] { s.batch = resolve_batch(read, launch, arguments); });
  mistakes.of([&] { s.adam = resolve_adam(read, arguments, s.warnings); });
  warn_about_narrow_sums(s);
  warn_about_no_effect(config.impl(), s);
  if (whole) check_settings(s, config.impl(), mistakes);
  mistakes.raise();
  warn_about_one_node(s);
  return s;
}

}  // namespace zerofp8
