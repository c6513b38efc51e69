// Everything the engine keeps for one bucket: accumulator, reduced gradient, Adam state, and the
// ranges of the bucket that this rank reduces and updates.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/comm/part_store.h"
#include "src/comm/reduce_scatter.h"
#include "zerofp8/buffer.h"
#include "zerofp8/partition.h"

namespace zerofp8 {

// Where the step's gradient of the state range lies; value = decode(main) + decode(residual), times
// factor.
struct GradientSource {
  View main, residual;
  float factor = 1.0f;
};

struct BucketState {
  const Bucket* bucket = nullptr;
  Communicator* reduce_comm = nullptr;  // all ranks that share the gradient
  Communicator* shard_comm =
      nullptr;               // reduce-scatter and weight gather; size = bucket->shard_ranks
  ReduceRanks reduce_ranks;  // of shard_comm, in one or two levels
  Communicator* replica_comm =
      nullptr;  // hybrid sharding: the ranks that hold the same shard; or null
  Communicator* tied_comm = nullptr;  // holders of the tied parameter, in stage order; or null
  double divisor = 1;                 // of the sum over ranks: W, or the reduce group's own
  bool first_replica = true;          // this rank counts its shard in the norm

  // Ranges in elements of the bucket. The state range is the shard, or all of it at stage 0.
  std::int64_t shard_begin = 0, shard_end = 0;
  std::int64_t state_begin = 0, state_end = 0;
  std::vector<Segment> shard_segments, state_segments;
  std::int64_t state_elements() const { return state_end - state_begin; }

  // Gradients. Local accumulator: one part per rank. Sharded: one part, this rank's shard;
  // gradients of the current micro-batch wait in `staging` (FP32, one part per rank).
  PartLayout accumulator_layout;
  Buffer accumulator;
  PartLayout staging_layout;
  PooledBuffer staging, late, sending;  // late: second and later gradients of a parameter
  bool sending_late = false;
  int parameters_ready = 0;  // distinct parameters with a gradient in this micro-batch
  std::unique_ptr<ReduceScatter> in_flight;
  bool direct = false;      // Adam decodes the accumulator: nothing to reduce at the boundary
  Buffer reduced;           // FP32, state range; empty where the accumulator serves
  float* reduced_values();  // FP32 memory of the state range; null if direct
  GradientSource gradient;  // valid after the reduction

  // Adam state over the state range.
  View exp_avg, exp_avg_sq;
  bool exact_moments() const {
    return exp_avg.storage == Storage::kFp32 && exp_avg_sq.storage == Storage::kFp32;
  }
  Buffer exp_avg_memory, exp_avg_sq_memory, master;
  int master_bits = 0;
};

}  // namespace zerofp8
