#include "zerofp8/partition.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  if (value > kMax - unit) throw ArgumentError("partition: more than 2^63 elements");
  return (value + unit - 1) / unit * unit;
}

// Parameters that may share a bucket: everything that decides how the bucket is treated.
using Key = std::tuple<int, DType, std::string, std::string, bool>;

Key key_of(const ParameterSpec& spec) {
  return {spec.group, spec.dtype, spec.reduce_group, spec.tied, spec.fp32_moments};
}

Bucket start_bucket(const ParameterSpec& spec) {
  Bucket bucket;
  bucket.group = spec.group;
  bucket.dtype = spec.dtype;
  bucket.reduce_group = spec.reduce_group;
  bucket.tied = spec.tied;
  bucket.fp32_moments = spec.fp32_moments;
  return bucket;
}

void append(Bucket& bucket, int parameter, std::int64_t elements, int block) {
  const std::int64_t padded = round_up(elements, block);
  if (bucket.elements > kMax - padded) throw ArgumentError("partition: more than 2^63 elements");
  bucket.placements.push_back({parameter, bucket.elements, elements, padded});
  bucket.elements += padded;
}

// Pads the bucket to the same whole number of groups of blocks on every rank.
void finish(Bucket& bucket, const PartitionOptions& options) {
  bucket.shard_ranks = options.shard_ranks;
  if (!bucket.reduce_group.empty()) {
    const auto found = options.group_shard_ranks.find(bucket.reduce_group);
    if (found == options.group_shard_ranks.end() || found->second < 1) {
      throw ArgumentError("reduce group \"" + bucket.reduce_group +
                          "\" is not known; pass its communicator");
    }
    bucket.shard_ranks = found->second;
  }
  const std::int64_t unit = std::int64_t{bucket.shard_ranks} * options.block_size * kShardBlocks;
  bucket.elements = round_up(bucket.elements, unit);
  bucket.shard_elements = bucket.elements / bucket.shard_ranks;
}

void check_names(const std::vector<ParameterSpec>& specs) {
  std::unordered_map<std::string, const ParameterSpec*> seen;
  for (const ParameterSpec& spec : specs) {
    if (!seen.emplace(spec.name, &spec).second) {
      throw ArgumentError("parameter \"" + spec.name +
                          "\" is registered twice; each parameter needs a name of its own and is "
                          "passed once (tied copies on other stages share the key `tied`)");
    }
  }
}

// The partition of a tied parameter depends on its shape, so copies must not differ in it.
void check_tied(const std::vector<ParameterSpec>& specs) {
  std::unordered_map<std::string, const ParameterSpec*> seen;
  for (const ParameterSpec& spec : specs) {
    if (spec.tied.empty()) continue;
    const ParameterSpec& other = *seen.emplace(spec.tied, &spec).first->second;
    if (other.shape != spec.shape || other.dtype != spec.dtype) {
      throw ArgumentError("parameters \"" + other.name + "\" and \"" + spec.name +
                          "\" are both tied as \"" + spec.tied + "\" but differ in shape or dtype");
    }
  }
}

void check_options(const PartitionOptions& options) {
  if (options.shard_ranks < 1 || options.block_size < 1 || options.bucket_elements < 1) {
    throw ArgumentError(
        "partition: shard_ranks, block_size and bucket_elements must be at least 1");
  }
}

}  // namespace

std::int64_t ParameterSpec::numel() const {
  for (const std::int64_t dim : shape) {
    if (dim < 0) {
      throw ArgumentError("parameter \"" + name + "\": dimension " + std::to_string(dim) +
                          " is negative");
    }
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t product = 1;
  for (const std::int64_t dim : shape) {
    if (product > kMax / dim) {
      throw ArgumentError("parameter \"" + name + "\": more than 2^63 elements");
    }
    product *= dim;
  }
  return product;
}

Partition make_partition(const std::vector<ParameterSpec>& specs, const PartitionOptions& options) {
  check_options(options);
  check_names(specs);
  check_tied(specs);
  Partition partition;
  partition.options = options;
  partition.homes.resize(specs.size());
  std::map<Key, int> open;  // the bucket of each kind that still takes parameters
  for (std::size_t i = specs.size(); i-- > 0;) {
    const ParameterSpec& spec = specs[i];
    const std::int64_t elements = spec.numel();
    if (elements == 0) continue;
    const Key key = key_of(spec);
    auto found = open.find(key);
    // A tied parameter is alone, so that its partition depends on its shape and d only.
    const bool full = found != open.end() &&
                      (!spec.tied.empty() ||
                       partition.buckets[found->second].elements >
                           options.bucket_elements - std::min(elements, options.bucket_elements));
    if (found == open.end() || full) {
      open[key] = static_cast<int>(partition.buckets.size());
      partition.buckets.push_back(start_bucket(spec));
      found = open.find(key);
    }
    Bucket& bucket = partition.buckets[found->second];
    append(bucket, static_cast<int>(i), elements, options.block_size);
    partition.homes[i] = {found->second, static_cast<int>(bucket.placements.size()) - 1};
  }
  for (std::size_t b = 0; b < partition.buckets.size(); ++b) {
    partition.buckets[b].index = static_cast<int>(b);
    finish(partition.buckets[b], options);
  }
  return partition;
}

std::vector<Segment> segments_in(const Bucket& bucket, std::int64_t begin, std::int64_t end) {
  std::vector<Segment> segments;
  if (begin >= end) return segments;
  const auto first =
      std::partition_point(bucket.placements.begin(), bucket.placements.end(),
                           [&](const Placement& p) { return p.offset + p.padded <= begin; });
  for (auto p = first; p != bucket.placements.end() && p->offset < end; ++p) {
    const std::int64_t from = std::max(begin, p->offset);
    const std::int64_t to = std::min(end, p->offset + p->padded);
    Segment segment;
    segment.parameter = p->parameter;
    segment.parameter_offset = from - p->offset;
    segment.padded = to - from;
    segment.elements = std::min(segment.padded, p->elements - segment.parameter_offset);
    segment.offset = from - begin;
    segments.push_back(segment);
  }
  return segments;
}

}  // namespace zerofp8
