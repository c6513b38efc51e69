// How parameters become flat buckets and equal shards. Pure arithmetic: no memory is touched, so
// sizes may be virtual (2^40 elements are fine).
//
//   Partition p = make_partition(specs, {.shard_ranks = 4, .block_size = 128, .bucket_elements =
//   500000000}); for (const Bucket& b : p.buckets) ... b.shard_elements * 4 == b.elements
//
// Rules: a parameter is in exactly one bucket and begins on a block; a shard is a
// whole number of groups of kShardBlocks blocks; so a block never straddles parameters or ranks and
// resharding copies whole blocks. Buckets are made in reverse order of registration, the order in
// which backward produces gradients.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zerofp8/buffer.h"
#include "zerofp8/dtype.h"

namespace zerofp8 {

// One parameter of the model, as seen by the optimizer on this rank.
struct ParameterSpec {
  std::string name;  // unique; hashed into the random stream; key of checkpoints
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFp32;  // of the weight: fp32, bf16 or fp16
  int group = 0;               // index of its hyper-parameter group
  std::string reduce_group;    // "" = data parallel; else a name known to the engine
  std::string tied;            // copies on several pipeline stages share this name; "" = not tied
  bool counts_in_norm = true;  // false on all but one of tied or tensor-replicated copies
  bool fp32_moments = false;   // moments stay FP32 (one-dimensional or small parameters)
  std::int64_t numel() const;
};

struct Placement {
  int parameter = 0;          // index into the list of specs
  std::int64_t offset = 0;    // in the bucket, a multiple of the block size
  std::int64_t elements = 0;  // logical
  std::int64_t padded = 0;    // rounded up to whole blocks
};

struct Bucket {
  int index = 0;
  int group = 0;
  DType dtype = DType::kFp32;
  std::string reduce_group;
  std::string tied;
  bool fp32_moments = false;
  std::vector<Placement> placements;
  int shard_ranks = 1;
  std::int64_t elements = 0;        // padded: shard_ranks * shard_elements
  std::int64_t shard_elements = 0;  // a multiple of kShardBlocks blocks
};

// A run of elements of one parameter inside a range of a bucket.
struct Segment {
  int parameter = 0;
  std::int64_t parameter_offset =
      0;                      // first element, in the logical parameter; a multiple of block size
  std::int64_t elements = 0;  // logical elements; the last block may be partly padding
  std::int64_t padded = 0;    // whole blocks
  std::int64_t offset = 0;    // of the first element, relative to the range's begin
};

struct PartitionOptions {
  int shard_ranks = 1;                           // d of the data-parallel group
  std::map<std::string, int> group_shard_ranks;  // d of the named reduce groups
  int block_size = 128;
  std::int64_t bucket_elements = 500'000'000;
};

struct Partition {
  PartitionOptions options;
  std::vector<Bucket> buckets;
  // For each parameter: bucket and index of its placement; {-1, -1} for parameters without
  // elements.
  struct Home {
    int bucket = -1;
    int placement = -1;
  };
  std::vector<Home> homes;
};

// Throws ArgumentError for a duplicate name, a negative dimension, an overflow of 2^63 elements, or
// tied copies whose shapes or dtypes differ.
Partition make_partition(const std::vector<ParameterSpec>& specs, const PartitionOptions& options);

// The runs of parameters inside [begin, end) of a bucket, in order; begin and end are
// block-aligned.
std::vector<Segment> segments_in(const Bucket& bucket, std::int64_t begin, std::int64_t end);

}  // namespace zerofp8
