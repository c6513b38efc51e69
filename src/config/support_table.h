// Which combinations run: the only place with rules about more than one key.
//
//   check_supported({.model = ModelFlags::kBf16, .accumulation = DType::kFp16, .stage = 2});
//
// kSupportTable is the published table; kStageRows and kShardedRows hold what applies to all of its
// rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zerofp8/config.h"

namespace zerofp8 {

class Mistakes;

enum class ModelFlags : std::uint8_t { kFp32, kBf16, kFp16, kBoth };

enum class Verdict : std::uint8_t { kRuns, kContradiction, kNotYet };

// One point of the table.
struct Cell {
  ModelFlags model = ModelFlags::kFp32;
  DType accumulation = DType::kFp32;
  std::optional<bool> sharded;  // nullopt: follows the stage
  int stage = 0;
  bool pipeline = false;
  bool operator==(const Cell&) const = default;
};

// A set of cells; sets are written as masks of 1 << value.
struct SupportRow {
  unsigned models;
  unsigned accumulations;
  unsigned pipelines;
  unsigned stages;
  std::string_view deepspeed;  // what DeepSpeed's own discussion of this key says
  Verdict verdict;
  std::string_view note;
};

struct StageRow {
  int stage;
  Verdict verdict;
};

struct ShardedRow {
  bool sharded;
  unsigned stages;  // at which the explicit value holds
};

std::span<const SupportRow> support_rows();
std::span<const StageRow> stage_rows();
std::span<const ShardedRow> sharded_rows();

Verdict verdict_of(const Cell& cell);
// Cells that run and differ from `cell` in one thing, or in two if no single change helps.
std::vector<Cell> nearest_running(const Cell& cell);

// Throws ConfigError (UnsupportedError for "not yet") that names the keys and the nearest cells
// that run.
void check_supported(const Cell& cell);
// Rules about the other settings, e.g. error feedback without FP8 (setting_rules.cc). Throws as
// check_supported.
void check_settings(const Settings& settings, const Config::Impl& written, Mistakes& mistakes);

}  // namespace zerofp8
