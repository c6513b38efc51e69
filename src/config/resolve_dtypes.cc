// Dtypes of all components: an explicit key wins over the level, the level over the default.
#include <fmt/format.h>

#include "src/config/presets.h"
#include "src/config/reader.h"
#include "src/config/support_table.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// Only for values that the key table has checked.
DType dtype_of(const Value& value) { return *dtype_from_string(std::get<std::string>(value.data)); }

template <class T>
Setting<T> from_level(const Settings& s, T value) {
  if (s.opt_level.origin == Origin::kDefault) return {value, Origin::kDefault, ""};
  return {value, Origin::kLevel, std::string(to_string(s.opt_level.value))};
}

// The first of two spellings that is written; an error if they contradict.
const Value* one_of_two(const Reader& read, std::string_view first, std::string_view second) {
  const Value* a = read.find(first);
  const Value* b = read.find(second);
  if (a && b) require_agreement(*a, *b, dtype_of(*a) == dtype_of(*b));
  return a ? a : b;
}

ModelFlags resolve_weight(const Reader& read, Settings& s) {
  const Setting<bool> bf16 = read.boolean("/bf16/enabled");
  const Setting<bool> fp16 = read.boolean("/fp16/enabled");
  if (bf16.value && fp16.value) return ModelFlags::kBoth;
  if (bf16.value) {
    s.weight = {DType::kBf16, Origin::kKey, bf16.where};
    return ModelFlags::kBf16;
  }
  if (fp16.value) {
    s.weight = {DType::kFp16, Origin::kKey, fp16.where};
    return ModelFlags::kFp16;
  }
  s.weight = {DType::kFp32, Origin::kDefault, ""};
  return ModelFlags::kFp32;
}

void apply_format(const Reader& read, const Value* written, Settings& s) {
  const Value* format = read.find("/gradient_accumulation_dtype/format");
  if (!format || !is_fp8(s.accumulation)) return;  // without FP8: a rule of setting_rules.cc
  const bool e5m2 = std::get<std::string>(format->data) == "e5m2";
  const DType dtype = e5m2 ? DType::kE5m2 : DType::kE4m3;
  // "fp8" leaves the format open; "fp8_e4m3" does not.
  const bool open = !written || std::get<std::string>(written->data) == "fp8";
  if (!open) require_agreement(*written, *format, s.accumulation.value == dtype);
  s.accumulation.value = dtype;
  if (!written) s.accumulation = {dtype, Origin::kKey, format->pointer};
}

void resolve_accumulation(const Reader& read, Settings& s) {
  s.accumulation = from_level(s, preset(s.opt_level).accumulation);
  const Value* ours = read.find("/gradient_accumulation_dtype")
                          ? read.find("/gradient_accumulation_dtype")
                          : read.find("/gradient_accumulation_dtype/dtype");
  const Value* theirs = read.find("/data_types/grad_accum_dtype");
  if (ours && theirs) require_agreement(*ours, *theirs, dtype_of(*ours) == dtype_of(*theirs));
  const Value* written = ours ? ours : theirs;
  if (written) s.accumulation = {dtype_of(*written), Origin::kKey, written->pointer};
  apply_format(read, written, s);
  s.error_feedback = read.boolean("/gradient_accumulation_dtype/error_feedback");
}

void resolve_sharding(const Reader& read, ModelFlags model, Settings& s) {
  Cell cell{.model = model,
            .accumulation = s.accumulation,
            .stage = s.stage,
            .pipeline = s.launch.pipeline_stages > 1};
  constexpr std::string_view kPath = "/gradient_accumulation_dtype/sharded";
  if (read.find(kPath)) {
    s.accumulation_sharded = read.boolean(kPath);
    cell.sharded = s.accumulation_sharded.value;
  } else {
    s.accumulation_sharded = {s.stage >= 2, Origin::kDefault, "follows the stage"};
  }
  check_supported(cell);
}

void resolve_wire(const Reader& read, Settings& s) {
  const DType fp8 = is_fp8(s.accumulation) ? s.accumulation.value : DType::kE4m3;
  const DType standard = preset(s.opt_level).gradient_wire;
  s.gradient_wire = from_level(s, is_fp8(standard) ? fp8 : standard);
  const Value* written =
      one_of_two(read, "/zerofp8/gradient_communication_dtype", "/communication_data_type");
  if (written) {
    const bool open = std::get<std::string>(written->data) == "fp8";
    s.gradient_wire = {open ? fp8 : dtype_of(*written), Origin::kKey, written->pointer};
  }
  s.weight_wire = {s.weight.value, Origin::kDefault, ""};
  if (const Value* wire = read.find("/zerofp8/weight_communication_dtype")) {
    s.weight_wire = {dtype_of(*wire), Origin::kKey, wire->pointer};
  }
}

void resolve_two_level(const Reader& read, Settings& s) {
  s.ranks_per_node = read.integer<int>("/zerofp8/two_level_reduce_scatter/ranks_per_node");
  if (s.ranks_per_node.origin == Origin::kDefault) s.ranks_per_node.where = "one level";
  s.in_node_wire = {DType::kFp32, Origin::kDefault, ""};
  if (const Value* wire = read.find("/zerofp8/two_level_reduce_scatter/in_node_dtype")) {
    s.in_node_wire = {dtype_of(*wire), Origin::kKey, wire->pointer};
  }
}

void resolve_master(const Reader& read, Settings& s) {
  const Preset& level = preset(s.opt_level);
  const Value* written = read.find("/zerofp8/master_weights");
  if (s.weight == DType::kFp32) {
    s.master = {MasterWeights::kNone, Origin::kDefault, "the weight is its own master"};
    if (written && std::get<std::string>(written->data) != "none") {
      s.warnings.push_back(
          fmt::format("{}: {} adds nothing to an fp32 model, whose weight is its own master",
                      written->pointer, written->text));
    }
    return;
  }
  s.master = from_level(s, s.weight == DType::kFp16 ? level.fp16_master : level.bf16_master);
  if (!written) return;
  for (const MasterWeights master : {MasterWeights::kNone, MasterWeights::kBits8,
                                     MasterWeights::kBits16, MasterWeights::kFp32}) {
    if (to_string(master) == std::get<std::string>(written->data)) {
      s.master = {master, Origin::kKey, written->pointer};
    }
  }
}

void resolve_moments(const Reader& read, Settings& s) {
  s.exp_avg = from_level(s, preset(s.opt_level).exp_avg);
  s.exp_avg_sq = from_level(s, preset(s.opt_level).exp_avg_sq);
  if (const Value* written = read.find("/zerofp8/exp_avg_dtype")) {
    s.exp_avg = {dtype_of(*written), Origin::kKey, written->pointer};
  }
  if (const Value* written = read.find("/zerofp8/exp_avg_sq_dtype")) {
    // The root of v has no sign, so its FP8 is UE4M4 however it is spelled.
    const DType dtype = dtype_of(*written);
    s.exp_avg_sq = {is_fp8(dtype) ? DType::kUe4m4 : dtype, Origin::kKey, written->pointer};
  }
  s.fp32_moments_below = read.integer<std::int64_t>("/zerofp8/fp32_moments_below");
}

}  // namespace

void resolve_dtypes(const Reader& read, Settings& s) {
  const ModelFlags model = resolve_weight(read, s);
  s.stage = read.integer<int>("/zero_optimization/stage");
  resolve_accumulation(read, s);
  resolve_sharding(read, model, s);
  resolve_wire(read, s);
  resolve_two_level(read, s);
  resolve_master(read, s);
  resolve_moments(read, s);
}

}  // namespace zerofp8
