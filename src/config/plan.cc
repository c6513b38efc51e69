// The plan's rows and collectives from settings and sizes.
#include "zerofp8/plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace zerofp8 {
namespace {

std::string storage_text(const Settings& s, Component component, DType dtype) {
  std::string text(to_string(dtype));
  if (component == Component::kExpAvgSq && dtype != DType::kFp32) text += " root";
  if (is_block_scaled(component, dtype)) {
    text += fmt::format(" + fp32 scale / {}", s.block_size.value);
  }
  return text;
}

std::string place(const Settings& s, bool is_sharded) {
  std::string text =
      is_sharded && s.shard_ranks > 1 ? fmt::format("sharded / {}", s.shard_ranks.value) : "local";
  if (s.offload_optimizer == Offload::kCpu) text += ", on the CPU";
  return text;
}
std::string shard_place(const Settings& s) { return place(s, true); }

void add_weight_rows(const Settings& s, const ModelSize& size, Plan& plan) {
  const std::int64_t narrow = size.parameters - size.fp32_parameters;
  const auto add = [&](const std::string& name, DType dtype, std::int64_t elements) {
    plan.rows.push_back({.component = Component::kTransient,
                         .name = name,
                         .dtype = std::string(to_string(dtype)),
                         .place = "caller",
                         .bytes = elements * bytes_of(dtype),
                         .origin = s.weight.origin,
                         .where = s.weight.where});
  };
  if (narrow > 0 || size.fp32_parameters == 0) add("weight", s.weight, narrow);
  if (size.fp32_parameters > 0) {
    add(narrow > 0 ? "weight of fp32 parameters" : "weight", DType::kFp32, size.fp32_parameters);
  }
}

// Elements of this rank's shards whose weights are 16 bits wide, or of the model's FP32.
std::int64_t shard_of_dtype(const ModelSize& size) {
  return size.shard_elements - size.shard_elements_fp32_weights;
}

PlanRow accumulator_row(const Settings& s, const ModelSize& size) {
  const std::int64_t elements = s.accumulation_sharded ? size.shard_elements : size.local_elements;
  PlanRow row{
      .component = Component::kAccumulator,
      .name = "gradient accumulator",
      .dtype = storage_text(s, Component::kAccumulator, s.accumulation),
      .place = place(s, s.accumulation_sharded),
      .bytes = stored_bytes(Component::kAccumulator, s.accumulation, elements, s.block_size),
      .origin = s.accumulation.origin,
      .where = s.accumulation.where};
  if (s.error_feedback) {
    row.bytes *= 2;
    row.dtype += ", twice (error feedback)";
  }
  return row;
}

PlanRow reduced_gradient_row(const Settings& s, const ModelSize& size) {
  PlanRow row{.component = Component::kReducedGradient, .name = "reduced gradient"};
  if (reduced_gradient_needs_buffer(s)) {
    row.dtype = to_string(DType::kFp32);
    row.place = shard_place(s);
    row.bytes =
        stored_bytes(Component::kReducedGradient, DType::kFp32, size.shard_elements, s.block_size);
  } else {
    row.dtype = storage_text(s, Component::kAccumulator, s.accumulation);
    row.place = "same buffer as the accumulator";
  }
  return row;
}

// Copies of a tied parameter are summed in FP32 before Adam reads them.
void add_tied_row(const Settings& s, const ModelSize& size, Plan& plan) {
  const bool overwritten = s.accumulation == DType::kFp32 && !s.accumulation_sharded;
  if (size.tied_elements == 0 || overwritten || reduced_gradient_needs_buffer(s)) return;
  plan.rows.push_back({.component = Component::kReducedGradient,
                       .name = "reduced gradient of tied parameters",
                       .dtype = std::string(to_string(DType::kFp32)),
                       .place = shard_place(s),
                       .bytes = stored_bytes(Component::kReducedGradient, DType::kFp32,
                                             size.tied_elements, s.block_size)});
}

PlanRow master_row(const Settings& s, const ModelSize& size) {
  PlanRow row{.component = Component::kMaster,
              .name = "master weight",
              .place = shard_place(s),
              .bytes = shard_of_dtype(size) * master_bytes(s.master, s.weight),
              .origin = s.master.origin,
              .where = s.master.where};
  switch (s.master.value) {
    case MasterWeights::kNone:
      row.dtype = "none";
      row.place = s.weight == DType::kFp32 ? "the weight is its own master"
                                           : "stochastic rounding into the weight";
      if (s.weight == DType::kFp32) row.where.clear();
      break;
    case MasterWeights::kBits8:
      row.dtype = "8 more bits";
      break;
    case MasterWeights::kBits16:
      row.dtype = "16 more bits";
      break;
    case MasterWeights::kFp32:
      row.dtype = to_string(DType::kFp32);
      break;
  }
  return row;
}

void add_moment_rows(const Settings& s, const ModelSize& size, Component component,
                     const std::string& name, const Setting<DType>& dtype, Plan& plan) {
  const std::int64_t kept = moments_are_quantised(s) ? size.shard_elements_fp32_moments : 0;
  plan.rows.push_back(
      {.component = component,
       .name = name,
       .dtype = storage_text(s, component, dtype),
       .place = shard_place(s),
       .bytes = stored_bytes(component, dtype, size.shard_elements - kept, s.block_size),
       .origin = dtype.origin,
       .where = dtype.where});
  if (dtype == DType::kFp32 || s.fp32_moments_below == 0) return;
  plan.rows.push_back({.component = component,
                       .name = fmt::format("{} of parameters that are 1-D or below {}", name,
                                           s.fp32_moments_below.value),
                       .dtype = std::string(to_string(DType::kFp32)),
                       .place = shard_place(s),
                       .bytes = stored_bytes(component, DType::kFp32, kept, s.block_size),
                       .origin = s.fp32_moments_below.origin,
                       .where = s.fp32_moments_below.where});
}

// One all-to-all of every bucket, `bytes` to each other rank in all.
void add_exchange(const Settings& s, const ModelSize& size, const std::string& what, DType dtype,
                  int ranks, std::int64_t bytes, Plan& plan) {
  if (ranks == 1) return;
  const std::int64_t times = s.accumulation_sharded ? s.batch.accumulation_steps : 1;
  plan.collectives.push_back({.what = what + (s.accumulation_sharded ? ", every micro-batch" : ""),
                              .operation = "all_to_all",
                              .dtype = dtype,
                              .ranks = ranks,
                              .calls_per_step = size.buckets * times,
                              .bytes_per_step = (ranks - 1) * bytes * times});
}

void add_reduction(const Settings& s, const ModelSize& size, Plan& plan) {
  const int ranks = reduction_ranks(s), nodes = ranks / s.ranks_per_node;
  const std::int64_t shard = size.local_elements / ranks;
  if (is_two_level(s)) {
    add_exchange(s, size,
                 "gradient reduce-scatter inside nodes (all-to-all, FP32 sum in rank order)",
                 s.in_node_wire, s.ranks_per_node, nodes * shard * bytes_of(s.in_node_wire), plan);
  }
  add_exchange(s, size,
               is_two_level(s)
                   ? "gradient reduce-scatter across nodes (all-to-all, FP32 sum in node order)"
                   : "gradient reduce-scatter (all-to-all, FP32 sum in rank order)",
               s.gradient_wire, nodes, gradient_message_bytes(s, shard), plan);
  if (s.stage == 0 && ranks > 1) {
    plan.collectives.push_back({.what = "all-gather of the reduced gradient (stage 0)",
                                .operation = "all_gather",
                                .dtype = DType::kFp32,
                                .ranks = ranks,
                                .calls_per_step = size.buckets,
                                .bytes_per_step = (ranks - 1) * (size.local_elements / ranks) * 4});
  }
  if (is_hybrid(s)) {
    const int replicas = s.launch.data_ranks / s.shard_ranks;
    plan.collectives.push_back({.what = "sum of reduced shards over the replicas of a shard group",
                                .operation = "all_gather",
                                .dtype = DType::kFp32,
                                .ranks = replicas,
                                .calls_per_step = size.buckets,
                                .bytes_per_step = (replicas - 1) * size.shard_elements * 4});
  }
}

// Each bucket's shard is gathered in slices of allgather_bucket_size / ranks, in whole blocks;
// buckets are taken as equal.
std::int64_t weight_gather_calls(const Settings& s, const ModelSize& size) {
  const std::int64_t shard = (size.shard_elements + size.buckets - 1) / size.buckets;
  const std::int64_t blocks = s.allgather_bucket_size / s.shard_ranks / s.block_size;
  const std::int64_t slice = std::max<std::int64_t>(blocks, 1) * s.block_size;
  return size.buckets * ((shard + slice - 1) / slice);
}

void add_tied_sum(const ModelSize& size, Plan& plan) {
  if (size.tied_elements == 0 || size.tied_ranks < 2) return;
  plan.collectives.push_back({.what = "sum of tied gradients over pipeline stages",
                              .operation = "all_gather",
                              .dtype = DType::kFp32,
                              .ranks = size.tied_ranks,
                              .calls_per_step = 1,
                              .bytes_per_step = (size.tied_ranks - 1) * size.tied_elements * 4});
}

void add_collectives(const Settings& s, const ModelSize& size, Plan& plan) {
  add_reduction(s, size, plan);
  add_tied_sum(size, plan);
  const Launch& launch = s.launch;
  const int all_ranks = launch.data_ranks * launch.pipeline_stages * launch.tensor_ranks;
  if (all_ranks > 1) {
    plan.collectives.push_back({.what = "norm, non-finite flag and used parameters",
                                .operation = "control",
                                .dtype = DType::kFp32,
                                .ranks = all_ranks,
                                .calls_per_step = 1});
  }
  if (s.stage > 0 && s.shard_ranks > 1 && size.buckets > 0) {
    const std::int64_t bytes = shard_of_dtype(size) * bytes_of(s.weight_wire) +
                               size.shard_elements_fp32_weights * bytes_of(DType::kFp32);
    plan.collectives.push_back({.what = size.fp32_parameters > 0
                                            ? "weight all-gather; fp32 parameters in fp32"
                                            : "weight all-gather",
                                .operation = "all_gather",
                                .dtype = s.weight_wire,
                                .ranks = s.shard_ranks,
                                .calls_per_step = weight_gather_calls(s, size),
                                .bytes_per_step = (s.shard_ranks - 1) * bytes});
  }
}

}  // namespace

Plan make_plan(const Settings& s, const ModelSize& size, bool loss_is_divided) {
  Plan plan{.settings = s, .size = size};
  add_weight_rows(s, size, plan);
  plan.rows.push_back(accumulator_row(s, size));
  plan.rows.push_back(reduced_gradient_row(s, size));
  add_tied_row(s, size, plan);
  plan.rows.push_back(master_row(s, size));
  add_moment_rows(s, size, Component::kExpAvg, "exp_avg", s.exp_avg, plan);
  add_moment_rows(s, size, Component::kExpAvgSq, "exp_avg_sq", s.exp_avg_sq, plan);
  add_collectives(s, size, plan);
  const std::string micro =
      loss_is_divided ? "" : fmt::format(" x {} micro-batches", s.batch.accumulation_steps);
  plan.averaging =
      fmt::format("the engine multiplies the FP32 sum once by 1 / ({} data ranks{}{}){}",
                  s.launch.data_ranks, micro, s.loss_scale.value.enabled ? " x loss scale" : "",
                  loss_is_divided ? "; the trainer divides its loss by the micro-batches" : "");
  return plan;
}

double Plan::bytes_per_parameter() const {
  if (size.parameters == 0) return 0;  // a rank may hold no parameters
  std::int64_t bytes = 0;
  for (const PlanRow& row : rows) bytes += row.bytes;
  return static_cast<double>(bytes) / static_cast<double>(size.parameters);
}

std::int64_t Plan::state_bytes() const {
  std::int64_t bytes = 0;
  for (const PlanRow& row : rows) {
    if (row.component != Component::kTransient) bytes += row.bytes;
  }
  return bytes;
}

}  // namespace zerofp8
