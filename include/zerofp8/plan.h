// The plan: which dtype every part uses, where it lives, what it costs and where the choice came from.
//
//   Plan plan = make_plan(settings, uniform_size(7'000'000'000, settings));
//   std::cout << plan_table(plan);          // or plan_json(plan)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zerofp8/buffer.h"
#include "zerofp8/config.h"

namespace zerofp8 {

// Element counts of one rank, in the padded layout of its Partition.
struct ModelSize {
  std::int64_t parameters = 0;       // logical elements on this rank (one pipeline stage, one tensor slice)
  std::int64_t local_elements = 0;   // padded elements of all buckets
  std::int64_t shard_elements = 0;   // padded elements of this rank's shards: local / d
  std::int64_t shard_elements_fp32_moments = 0;  // of shard_elements, those whose moments stay FP32
  // FP32 parameters beside a 16-bit model: logical elements, and those of shard_elements.
  std::int64_t fp32_parameters = 0;
  std::int64_t shard_elements_fp32_weights = 0;
  std::int64_t buckets = 0;
  std::int64_t tied_elements = 0;    // of shard_elements, those of parameters tied over pipeline stages
  int tied_ranks = 1;                // most holders of a tied parameter
};

struct PlanRow {
  Component component = Component::kTransient;
  std::string name;                  // "weight", "gradient accumulator", "exp_avg", ...
  std::string dtype;                 // "fp8_e4m3 + fp32 scale / 128"
  std::string place;                 // "local" | "sharded / 8" | "same buffer as ..." | "caller"
  std::int64_t bytes = 0;            // per rank
  Origin origin = Origin::kDefault;
  std::string where;
};

struct PlanCollective {
  std::string what;                  // "gradient reduce-scatter (all-to-all + rank-order sum)"
  std::string operation;             // "all_to_all" | "all_gather" | "control"
  DType dtype = DType::kFp32;
  int ranks = 1;
  std::int64_t calls_per_step = 0;
  std::int64_t bytes_per_step = 0;   // sent by one rank to others
};

struct Plan {
  Settings settings;
  ModelSize size;
  std::vector<PlanRow> rows;
  std::vector<PlanCollective> collectives;  // in the order of one step
  std::string averaging;             // who divides by W, A and the loss scale
  double bytes_per_parameter() const;       // all rows, weight included
  std::int64_t state_bytes() const;         // rows that the engine allocates
};

// `loss_is_divided`: the trainer divides its loss by the micro-batches, so the engine does not.
Plan make_plan(const Settings& settings, const ModelSize& size, bool loss_is_divided = false);

// The size of `parameters` elements as one flat list, padded to whole blocks per rank. The engine takes
// the sizes of its Partition instead. Throws ArgumentError for less than 1 or more than 2^50 elements.
ModelSize uniform_size(std::int64_t parameters, const Settings& settings);

// Ranks between which one reduce-scatter runs: all data ranks at stage 0, else the shard group.
int reduction_ranks(const Settings& settings);
// True if shard groups are smaller than the data-parallel group (hybrid sharding): reduced shards are then
// summed in FP32 over the data_ranks / shard_ranks replicas.
bool is_hybrid(const Settings& settings);
// True if gradients are added up inside nodes of ranks_per_node ranks first, then across the nodes.
bool is_two_level(const Settings& settings);
// Whether the engine keeps reduced gradients in an FP32 buffer of their own between reduction and Adam, or
// Adam reads the accumulator.
bool reduced_gradient_needs_buffer(const Settings& settings);
bool moments_are_quantised(const Settings& settings);
// Memory that lives within an exchange, beside the plan's rows: about what one rank takes for a
// bucket that is being reduced, and for weights that are being gathered.
struct TemporaryBytes {
  std::int64_t per_bucket = 0;
  std::int64_t weights = 0;
};
TemporaryBytes temporary_bytes(const Settings& settings, const ModelSize& size);
// Bytes of the message that carries `elements` padded gradient elements to one other rank: codes and
// scales, for both blocks where a local FP8 accumulator with error feedback is sent as it is.
std::int64_t gradient_message_bytes(const Settings& settings, std::int64_t elements);

// Bytes that `elements` padded elements take in `dtype` as the engine stores it for `component`: codes plus
// 4 bytes of scale per block where the storage is block-scaled. The one place that knows.
std::int64_t stored_bytes(Component component, DType dtype, std::int64_t elements, int block_size);
bool is_block_scaled(Component component, DType dtype);
// Bytes per element of the part of the master kept beside a weight.
int master_bytes(MasterWeights master, DType weight);

// Columns of a table that is not written to a terminal.
inline constexpr int kTextWidth = 100;
// All settings with their origins, batch sizes, ranks and warnings. `width` 0: no lines are broken.
std::string settings_table(const Settings& settings, bool color = false, int width = kTextWidth);
std::string plan_table(const Plan& plan, bool color = false, int width = kTextWidth);
std::string plan_json(const Plan& plan);
// The supported-combination table as text (Markdown if `markdown`).
std::string support_matrix(bool markdown = false, int width = kTextWidth);

}  // namespace zerofp8
