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

Setting<DType> weight_of(const DTypeFlags& flags) {
  if (flags.bf16.value) return {DType::kBf16, flags.bf16.origin, flags.bf16.where};
  if (flags.fp16.value) return {DType::kFp16, flags.fp16.origin, flags.fp16.where};
  return {DType::kFp32, Origin::kDefault, ""};
}

// The model's own dtype wins. An fp32 model below a 16-bit flag is common (autocast) and trains
// well as it is; the other contradictions are mistakes of the file or of the model.
void resolve_weight(const Reader& read, const DTypeFlags& flags, Settings& s) {
  s.weight = weight_of(flags);
  const std::optional<DType>& model = read.arguments().weight;
  if (!model || *model == s.weight.value) return;
  const Setting<DType> says = s.weight;
  s.weight = {*model, Origin::kArgument, "the model's parameters"};
  if (says == DType::kFp32) return;
  if (*model == DType::kFp32) {
    s.warnings.push_back(fmt::format(
        "{}: the model's parameters are fp32 and are trained as fp32; a {} model has parameters "
        "of that dtype: convert it before initialize, or remove the key",
        says.where, to_string(says.value)));
    return;
  }
  throw ConfigError(says.where,
                    fmt::format("true, but the model's parameters are {}", to_string(*model)),
                    fmt::format("/{}/enabled: true for this model", to_string(*model)),
                    "change the key, or convert the model");
}

ModelFlags model_flags(const DTypeFlags& flags, DType weight) {
  if (flags.bf16.value && flags.fp16.value) return ModelFlags::kBoth;
  if (weight == DType::kBf16) return ModelFlags::kBf16;
  return weight == DType::kFp16 ? ModelFlags::kFp16 : ModelFlags::kFp32;
}

// A flag that may be "auto": then it is what the model's dtype says, or `otherwise`, assumed.
Setting<bool> flag(const Reader& read, std::string_view path, DType dtype, bool otherwise) {
  if (!read.is_auto(path)) return read.boolean(path);
  const std::optional<DType>& model = read.arguments().weight;
  if (model) return {*model == dtype, Origin::kArgument, "the model's parameters"};
  read.assume(path, otherwise ? "true" : "false");
  return {otherwise, Origin::kDefault, "\"auto\""};
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

constexpr std::string_view kSharded = "/gradient_accumulation_dtype/sharded";

void resolve_sharding(const Reader& read, Settings& s) {
  s.accumulation_sharded = {s.stage >= 2, Origin::kDefault, "follows the stage"};
  if (read.find(kSharded)) s.accumulation_sharded = read.boolean(kSharded);
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

DTypeFlags read_flags(const Reader& read) {
  constexpr std::string_view kBf16 = "/bf16/enabled", kFp16 = "/fp16/enabled";
  // Trainers fill one of the two from their own argument; bf16 is what most of them say.
  const bool fp16_is_written = !read.is_auto(kFp16) && read.boolean(kFp16).value;
  DTypeFlags flags;
  flags.bf16 = flag(read, kBf16, DType::kBf16, !fp16_is_written);
  flags.fp16 = flag(read, kFp16, DType::kFp16, !flags.bf16.value);
  return flags;
}

void check_cell(const Reader& read, const DTypeFlags& flags, const Settings& s) {
  Cell cell{.model = model_flags(flags, s.weight),
            .accumulation = s.accumulation,
            .stage = s.stage,
            .pipeline = s.launch.pipeline_stages > 1};
  if (read.find(kSharded)) cell.sharded = s.accumulation_sharded.value;
  check_supported(cell);
}

void resolve_dtypes(const Reader& read, const DTypeFlags& flags, Settings& s) {
  resolve_weight(read, flags, s);
  s.stage = read.integer<int>("/zero_optimization/stage");
  resolve_accumulation(read, s);
  resolve_sharding(read, s);
  resolve_wire(read, s);
  resolve_two_level(read, s);
  resolve_master(read, s);
  resolve_moments(read, s);
}

}  // namespace zerofp8
