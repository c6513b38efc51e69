// One training run: by the engine, or by LibTorch's FP32 AdamW on the same batches for comparison.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpt.h"
#include "text_data.h"
#include "zerofp8/engine.h"
#include "zerofp8/error.h"

namespace zerofp8::example {

struct RunOptions {
  GptOptions model;
  std::int64_t steps = 1500;
  std::int64_t warmup = 100;
  std::uint64_t seed = 0;
  std::int64_t log_every = 50;
  std::string save_to;  // checkpoint root; empty = none
  std::int64_t save_every = 0;
  std::string resume_from;
  bool quiet = false;
};

struct RunResult {
  std::string name;
  std::vector<double> losses;  // of each step, mean over ranks and micro-batches
  std::vector<double> norms;
  double train_loss = 0;  // mean of the last 100 steps
  double validation_loss = 0;
  std::int64_t parameters = 0;
  std::int64_t skipped = 0;
  double seconds = 0;                // training, without evaluation
  double tokens_per_second = 0;      // all ranks
  double step_seconds = 0;           // median of engine.step()
  double step_bytes = 0;             // that one step moves through memory, by the plan
  double copy_bytes_per_second = 0;  // of this rank while all ranks copy
  double planned_state_bytes = 0, counted_state_bytes = 0;
  double planned_bytes_per_parameter = 0;
  double planned_wire_bytes = 0, counted_wire_bytes = 0;  // payload per applied step and rank
  std::string plan_table;
  std::string plan_json;
};

// Both are collective over `comm`.
RunResult train_with_engine(const Settings& settings, const TextData& data,
                            const RunOptions& options, Communicator& comm);
RunResult train_with_fp32_adamw(const Settings& settings, const TextData& data,
                                const RunOptions& options, Communicator& comm);

}  // namespace zerofp8::example
