// From a DeepSpeed-style JSON file to the settings that will run.
//
//   Config config = Config::from_file("ds_config.json");            // what was written
//   Settings s = resolve(config, {.data_ranks = 8});                // what will run, with origins
//
// Nothing is allocated and nothing is sent before resolve() returns. Errors are ConfigError with
// the JSON pointer of the key.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zerofp8/dtype.h"
#include "zerofp8/error.h"

namespace zerofp8 {

// The config is sound, but this version does not run it yet ("not yet supported").
class UnsupportedError : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

// Where a value comes from; printed beside each value of the plan.
enum class Origin : std::uint8_t { kDefault, kLevel, kKey, kArgument };
std::string_view to_string(Origin origin);

template <class T>
struct Setting {
  T value{};
  Origin origin = Origin::kDefault;
  std::string where;  // JSON pointer, level or argument name; empty for a default
  operator const T&() const { return value; }
};

enum class OptLevel : std::uint8_t { kO0, kO1, kO2, kO3 };
std::string_view to_string(OptLevel level);

// What is kept beside the weight so that small updates are not lost.
enum class MasterWeights : std::uint8_t {
  kNone,    // stochastic rounding into the weight (fp32 weights: the weight is the master)
  kBits8,   // 8 more mantissa bits
  kBits16,  // 16 more mantissa bits: a bf16 weight's exact FP32 master
  kFp32,    // a separate FP32 copy
};
std::string_view to_string(MasterWeights master);

// Where the state of a model on a CUDA device is, and Adam runs.
enum class Offload : std::uint8_t { kNone, kCpu };  // on that device | in host memory, on the CPU
std::string_view to_string(Offload offload);

enum class Algorithm : std::uint8_t { kAdam, kAdamW };  // L2 term in the gradient | decoupled decay
std::string_view to_string(Algorithm algorithm);

// Hyper-parameters of one parameter group. lr may change every step.
struct AdamOptions {
  Algorithm algorithm = Algorithm::kAdamW;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

struct LossScaleOptions {
  bool enabled = false;  // fp16 only
  bool dynamic = false;
  double initial = 1.0;  // the static scale, or the first dynamic one
  std::int64_t window = 1000;
  int hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_scale = 1.0;
};

struct BatchSizes {
  std::int64_t train_batch = 0;
  std::int64_t micro_batch = 0;
  std::int64_t accumulation_steps = 1;  // A
};

// How many ranks there are of each kind: known only after the launcher's variables were read.
struct Launch {
  int data_ranks = 1;  // W
  int pipeline_stages = 1;
  int tensor_ranks = 1;
  std::string from = "launch";  // where the numbers come from, as printed beside them
};

// What `initialize`-like calls and the command line pass beside the file. A value that differs from
// the file's is an error that names both.
struct Arguments {
  std::optional<OptLevel> opt_level;
  std::optional<BatchSizes> auto_batch;  // values for "auto" in the batch keys
  std::optional<double> auto_gradient_clipping;
  std::optional<AdamOptions> auto_adam;  // values for "auto" under /optimizer/params
  // Of the model's 16-bit parameters, else fp32. It decides, and flags that contradict it are an
  // error or, for an fp32 model, a warning. Without it the flags tell the model's dtype.
  std::optional<DType> weight;
  // An "auto" that nothing supplies takes the key's default and is noted in Settings::assumed. Else
  // it is an error.
  bool assume_auto = false;
};

// Everything that decides what runs. One validated point of the supported-combination table.
struct Settings {
  Launch launch;
  Setting<OptLevel> opt_level;
  Setting<DType> weight;        // fp32, bf16 or fp16: the model's dtype
  Setting<int> stage;           // 0, 1, 2
  Setting<int> shard_ranks;     // d: 1 at stage 0, else data_ranks or /zerofp8/shard_group_size
  Setting<DType> accumulation;  // fp32, bf16, fp16, fp8_e4m3, fp8_e5m2
  Setting<bool> accumulation_sharded;
  Setting<bool> error_feedback;  // fp8 accumulators only
  Setting<DType> gradient_wire;  // fp32, bf16, fp16, fp8_e4m3, fp8_e5m2
  // k of the two-level reduce-scatter; 1: flat
  Setting<int> ranks_per_node{1, Origin::kDefault, ""};
  Setting<DType> in_node_wire;  // fp32, bf16: of gradients inside a node
  Setting<DType> weight_wire;
  Setting<MasterWeights> master;
  Setting<DType> exp_avg;     // fp32, bf16, fp16, fp8_e4m3
  Setting<DType> exp_avg_sq;  // fp32 (v), bf16 / fp16 / fp8_ue4m4 (root of v)
  Setting<std::int64_t>
      fp32_moments_below;  // smaller or one-dimensional parameters keep FP32 moments
  Setting<int> block_size;
  Setting<std::uint64_t> seed;
  Setting<std::int64_t> reduce_bucket_size;     // elements
  Setting<std::int64_t> allgather_bucket_size;  // elements
  Setting<bool> overlap_comm;
  Setting<Offload> offload_optimizer;
  Setting<double> gradient_clipping;  // 0 = off
  Setting<LossScaleOptions> loss_scale;
  BatchSizes batch;
  Setting<AdamOptions> adam;          // default hyper-parameters of every group
  std::vector<std::string> warnings;  // e.g. bf16 accumulation of more than 256 micro-batches
  std::vector<std::string> assumed;   // "/gradient_clipping 0": what an "auto" was taken for
};

// A parsed file. Cheap to copy.
class Config {
 public:
  // `source` names the text in errors (a path, "dict", ...). Comments are accepted, duplicate keys
  // and mistyped keys are errors. All mistakes of a text are in one error.
  // `changes`: "/path=value" with a JSON value or a bare string, set before anything is checked.
  static Config parse(const std::string& text, const std::string& source = "config",
                      const std::vector<std::string>& changes = {});
  static Config from_file(const std::string& path, const std::vector<std::string>& changes = {});
  // Canonical JSON text of what was written: the same for every rank with the same config.
  std::string canonical() const;
  const std::string& source() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  Config() = default;
  std::shared_ptr<const Impl> impl_;
};

// Data ranks that a fully written batch triple implies: train / (micro-batch x A), or nullopt.
std::optional<int> implied_data_ranks(const Config& config);

// Validates against the supported-combination table. Throws ConfigError.
Settings resolve(const Config& config, const Launch& launch, const Arguments& arguments = {});

// JSON Schema (draft 2020-12) of the config file, made from the key table.
std::string config_schema();
// The README's reference of all keys (Markdown table), made from the key table.
std::string config_reference();

}  // namespace zerofp8
