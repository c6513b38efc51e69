// Properties of the partition for any model, world size, block and bucket size.
#include "zerofp8/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using Specs = std::vector<ParameterSpec>;

ParameterSpec spec(std::string name, std::vector<std::int64_t> shape) {
  return {.name = std::move(name), .shape = std::move(shape)};
}

// What must hold of every partition.
void check_bucket(const Bucket& b, const Specs& specs, const PartitionOptions& options) {
  const std::int64_t block = options.block_size;
  ASSERT_EQ(b.elements, b.shard_elements * b.shard_ranks);
  ASSERT_EQ(b.shard_elements % (4 * block), 0);
  ASSERT_GT(b.shard_elements, 0);
  std::int64_t next = 0;
  for (const Placement& p : b.placements) {
    const ParameterSpec& s = specs[static_cast<std::size_t>(p.parameter)];
    ASSERT_EQ(p.offset, next) << "placements leave gaps or overlap";
    ASSERT_EQ(p.offset % block, 0);
    ASSERT_EQ(p.elements, s.numel());
    ASSERT_EQ(p.padded, (p.elements + block - 1) / block * block);
    ASSERT_EQ(b.group, s.group);
    ASSERT_EQ(b.dtype, s.dtype);
    ASSERT_EQ(b.reduce_group, s.reduce_group);
    ASSERT_EQ(b.tied, s.tied);
    ASSERT_EQ(b.fp32_moments, s.fp32_moments);
    next = p.offset + p.padded;
  }
  ASSERT_LE(next, b.elements);
  ASSERT_LT(b.elements - next, 4 * block * b.shard_ranks) << "more padding than equal shards need";
  ASSERT_TRUE(b.tied.empty() || b.placements.size() == 1);
}

// Each rank's segments: together they cover every logical element of the bucket once, in whole
// blocks.
void check_segments(const Bucket& b, std::int64_t block) {
  std::int64_t logical = 0, covered = 0;
  for (int rank = 0; rank < b.shard_ranks; ++rank) {
    std::int64_t at = 0;
    for (const Segment& s :
         segments_in(b, rank * b.shard_elements, (rank + 1) * b.shard_elements)) {
      ASSERT_EQ(s.offset, at) << "a gap inside a shard";
      ASSERT_EQ(s.offset % block, 0);
      ASSERT_EQ(s.parameter_offset % block, 0);
      ASSERT_EQ(s.padded % block, 0);
      ASSERT_GT(s.elements, 0);
      ASSERT_LE(s.elements, s.padded);
      ASSERT_GT(s.elements, s.padded - block) << "a block of padding only counts as a parameter's";
      at += s.padded;
      logical += s.elements;
      covered += s.padded;
    }
    ASSERT_LE(at, b.shard_elements);
  }
  std::int64_t expected = 0, padded = 0;
  for (const Placement& p : b.placements) expected += p.elements, padded += p.padded;
  ASSERT_EQ(logical, expected);
  ASSERT_EQ(covered, padded);
}

void check_partition(const Partition& p, const Specs& specs, bool segments = true) {
  ASSERT_EQ(p.homes.size(), specs.size());
  std::vector<int> placed(specs.size());
  for (std::size_t b = 0; b < p.buckets.size(); ++b) {
    ASSERT_EQ(p.buckets[b].index, static_cast<int>(b));
    ASSERT_NO_FATAL_FAILURE(check_bucket(p.buckets[b], specs, p.options));
    if (segments) {
      ASSERT_NO_FATAL_FAILURE(check_segments(p.buckets[b], p.options.block_size));
    }
    for (const Placement& placement : p.buckets[b].placements) ++placed[placement.parameter];
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const bool empty = specs[i].numel() == 0;
    ASSERT_EQ(placed[i], empty ? 0 : 1);
    ASSERT_EQ(p.homes[i].bucket < 0, empty);
    if (empty) continue;
    const Bucket& home = p.buckets[static_cast<std::size_t>(p.homes[i].bucket)];
    ASSERT_EQ(home.placements[static_cast<std::size_t>(p.homes[i].placement)].parameter, int(i));
  }
}

Specs random_specs(std::uint32_t seed) {
  std::mt19937 generator(seed);
  const auto pick = [&](int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); };
  Specs specs(static_cast<std::size_t>(pick(25)));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i] = spec("p" + std::to_string(i), {});
    for (int d = pick(4); d > 0; --d) specs[i].shape.push_back(pick(8) == 0 ? 0 : 1 + pick(40));
    specs[i].dtype = static_cast<DType>(pick(3));
    specs[i].group = pick(3);
    specs[i].fp32_moments = pick(3) == 0;
    if (pick(6) == 0) specs[i].tied = "tied" + std::to_string(i);
    if (pick(4) == 0) specs[i].reduce_group = "expert";
  }
  return specs;
}

struct Grid {
  int ranks;
  std::int64_t bucket;
};
class PartitionTest : public testing::TestWithParam<Grid> {};
std::vector<Grid> grid() {
  std::vector<Grid> all;
  for (const int ranks : {1, 2, 3, 4, 7, 8, 64, 1000}) {
    for (const std::int64_t bucket : {1ll, 7ll, 4096ll, 1000000000ll})
      all.push_back({ranks, bucket});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, PartitionTest, testing::ValuesIn(grid()), [](const auto& param) {
  return std::to_string(param.param.ranks) + "ranks_bucket" + std::to_string(param.param.bucket);
});

TEST_P(PartitionTest, CoversEachElementOnceInEqualAlignedShards) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    const Specs specs = random_specs(seed);
    for (const int block : {32, 128, 256}) {
      const Partition p = make_partition(specs, {.shard_ranks = GetParam().ranks,
                                                 .group_shard_ranks = {{"expert", 3}},
                                                 .block_size = block,
                                                 .bucket_elements = GetParam().bucket});
      ASSERT_NO_FATAL_FAILURE(check_partition(p, specs)) << "seed " << seed;
      for (const Bucket& b : p.buckets) {
        ASSERT_EQ(b.shard_ranks, b.reduce_group.empty() ? GetParam().ranks : 3);
      }
    }
  }
}

// A bucket is closed once the next parameter would make it larger than asked, never before.
TEST_P(PartitionTest, BucketsAreAsLargeAsAskedFor) {
  Specs specs;
  for (int i = 0; i < 50; ++i) specs.push_back(spec("p" + std::to_string(i), {128 * (1 + i % 5)}));
  const std::int64_t limit = GetParam().bucket;
  const Partition p =
      make_partition(specs, {.shard_ranks = GetParam().ranks, .bucket_elements = limit});
  for (std::size_t b = 0; b < p.buckets.size(); ++b) {
    std::int64_t used = 0;
    for (const Placement& placement : p.buckets[b].placements) used += placement.padded;
    EXPECT_TRUE(p.buckets[b].placements.size() == 1 || used <= limit) << used;
    if (b + 1 < p.buckets.size()) {
      EXPECT_GT(used + p.buckets[b + 1].placements[0].padded, limit);
    }
  }
}

TEST_P(PartitionTest, AnyRangeOfABucketIsCoveredBySegments) {
  const Specs specs = {spec("a", {1000}), spec("b", {3}), spec("c", {128}), spec("d", {777})};
  const Partition p = make_partition(
      specs, {.shard_ranks = GetParam().ranks, .bucket_elements = GetParam().bucket});
  for (const Bucket& b : p.buckets) {
    const std::int64_t last = std::min<std::int64_t>(b.elements, 24 * 128);
    for (std::int64_t begin = 0; begin <= last; begin += 128) {
      EXPECT_TRUE(segments_in(b, begin, begin).empty());
      for (std::int64_t end = begin + 128; end <= last; end += 128) {
        std::int64_t at = 0;
        for (const Segment& s : segments_in(b, begin, end)) {
          ASSERT_EQ(s.offset, at);
          ASSERT_GT(s.elements, 0);
          at += s.padded;
        }
        ASSERT_LE(at, end - begin);
      }
    }
  }
}

// Case 23, the partition's side: more ranks than elements, odd rank counts, saved length 17 and
// not 18.
TEST(Partition, Case23MoreRanksThanBlocks) {
  struct Row {
    Specs specs;
    int ranks;
    std::int64_t bucket;
  };
  Specs nineteen;
  for (int i = 0; i < 19; ++i) nineteen.push_back(spec("p" + std::to_string(i), {1 + i}));
  const Row rows[] = {{{spec("a", {1}), spec("b", {3})}, 4, 500000000},
                      {{spec("a", {17})}, 3, 5},
                      {nineteen, 8, 40},
                      {{spec("a", {})}, 1024, 1}};
  for (const Row& row : rows) {
    const Partition p =
        make_partition(row.specs, {.shard_ranks = row.ranks, .bucket_elements = row.bucket});
    ASSERT_NO_FATAL_FAILURE(check_partition(p, row.specs));
  }
  const Partition p = make_partition(rows[1].specs, {.shard_ranks = 3});
  EXPECT_EQ(p.buckets[0].placements[0].elements, 17);
}

// Case 24, the partition's side: empty tensors, wherever they stand, leave the others as they are.
TEST(Partition, Case24EmptyTensorsChangeNothing) {
  const auto placements = [](const Partition& p, const Specs& specs) {
    std::vector<std::tuple<std::string, int, std::int64_t, std::int64_t>> all;
    for (const Bucket& b : p.buckets) {
      for (const Placement& q : b.placements) {
        all.emplace_back(specs[q.parameter].name, b.index, q.offset, q.elements);
      }
    }
    return all;
  };
  for (const int ranks : {1, 2, 3}) {
    for (const int where : {0, 29, 35, 39}) {
      Specs without, with;
      for (int i = 0; i < 40; ++i) {
        with.push_back(spec("p" + std::to_string(i), {i == where ? 0 : 3 * i + 1}));
        if (i != where) without.push_back(with.back());
      }
      const PartitionOptions options{.shard_ranks = ranks, .bucket_elements = 500};
      const Partition a = make_partition(with, options), b = make_partition(without, options);
      ASSERT_NO_FATAL_FAILURE(check_partition(a, with));
      EXPECT_EQ(placements(a, with), placements(b, without));
    }
  }
  for (const Specs& specs : {Specs{spec("e", {0})}, Specs{spec("e", {0, 8})}, Specs{},
                             Specs{spec("a", {8}), spec("e", {0}), spec("b", {24})},
                             Specs{spec("a", {4, 4}), spec("e", {0})}}) {
    ASSERT_NO_FATAL_FAILURE(check_partition(make_partition(specs, {.shard_ranks = 3}), specs));
  }
  // A dimension of 0 makes a tensor empty whatever the others are.
  EXPECT_EQ(spec("e", {1ll << 40, 1ll << 40, 0}).numel(), 0);
}

// Case 29: sizes beyond 2^31, without memory for them.
TEST(Partition, Case29LargeSizes) {
  for (const std::int64_t n : {(1ll << 31) - 1, 1ll << 31, (1ll << 31) + 8, 1ll << 40, 1ll << 61}) {
    for (const int ranks : {1, 3, 8, 1024}) {
      const Specs specs = {spec("big", {n}), spec("small", {5})};
      const Partition p =
          make_partition(specs, {.shard_ranks = ranks, .bucket_elements = 1ll << 62});
      ASSERT_NO_FATAL_FAILURE(check_partition(p, specs));
      ASSERT_EQ(p.buckets.size(), 1u);
      const Bucket& b = p.buckets[0];
      const std::int64_t begin = b.placements[1].offset;
      for (const std::int64_t element : {std::int64_t{0}, std::int64_t{INT32_MAX}, n - 1}) {
        if (element >= n) continue;
        const std::int64_t block = (begin + element) / 128 * 128;
        const std::vector<Segment> found = segments_in(b, block, block + 128);
        ASSERT_EQ(found.size(), 1u);
        EXPECT_EQ(found[0].parameter, 0);
        EXPECT_LE(found[0].parameter_offset, element);
        EXPECT_GT(found[0].parameter_offset + found[0].elements, element);
      }
    }
  }
  // Products of dimensions are 64-bit as well.
  EXPECT_EQ(spec("m", {65536, 65536}).numel(), 1ll << 32);
  EXPECT_EQ(spec("m", {3, 1ll << 60}).numel(), 3ll << 60);
}

TEST(Partition, BucketsFollowTheReverseOrderOfRegistration) {
  const Specs specs = {spec("first", {128}), spec("second", {128}), spec("third", {128})};
  const Partition p = make_partition(specs, {.bucket_elements = 256});
  ASSERT_EQ(p.buckets.size(), 2u);
  EXPECT_EQ(p.buckets[0].placements[0].parameter, 2);
  EXPECT_EQ(p.buckets[0].placements[1].parameter, 1);
  EXPECT_EQ(p.buckets[1].placements[0].parameter, 0);
}

// A tied parameter's partition depends on its shape and on d, not on what else a stage holds.
TEST(Partition, TiedParametersAreAloneAndEqualOnEveryStage) {
  ParameterSpec tied = spec("embed", {50, 16});
  tied.tied = "embedding";
  ParameterSpec head = tied;
  head.name = "head";
  const Specs first = {tied, spec("a", {1000}), spec("b", {64, 64})};
  const Specs last = {spec("z", {7}), head};
  for (const std::int64_t bucket : {1ll, 4096ll, 1000000000ll}) {
    const PartitionOptions options{.shard_ranks = 3, .bucket_elements = bucket};
    const Partition p = make_partition(first, options), q = make_partition(last, options);
    const Bucket& a = p.buckets[p.homes[0].bucket];
    const Bucket& b = q.buckets[q.homes[1].bucket];
    EXPECT_EQ(a.placements.size(), 1u);
    EXPECT_EQ(b.placements.size(), 1u);
    EXPECT_EQ(a.elements, b.elements);
    EXPECT_EQ(a.shard_elements, b.shard_elements);
    EXPECT_EQ(a.placements[0].offset, b.placements[0].offset);
  }
}

template <class F>
void expect_error(F f, const std::vector<std::string>& parts) {
  try {
    f();
    FAIL() << "no error";
  } catch (const ArgumentError& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << error.what() << " lacks " << part;
    }
  }
}

TEST(Partition, ErrorsNameTheParameter) {
  expect_error([] { make_partition({spec("twice", {1}), spec("twice", {2})}, {}); }, {"\"twice\""});
  expect_error([] { make_partition({spec("bad", {3, -2})}, {}); }, {"\"bad\"", "-2"});
  expect_error([] { make_partition({spec("bad", {0, -2})}, {}); }, {"\"bad\"", "-2"});
  expect_error(
      [] {
        make_partition({spec("huge", {1ll << 40, 1ll << 40})}, {});
      },
      {"\"huge\"", "2^63"});
  expect_error([] { make_partition({spec("a", {INT64_MAX})}, {}); }, {"2^63"});
  ParameterSpec expert = spec("moe", {8});
  expert.reduce_group = "experts";
  expect_error([&] { make_partition({expert}, {}); }, {"\"experts\""});
  ParameterSpec left = spec("left", {8}), right = spec("right", {4, 2});
  left.tied = right.tied = "t";
  expect_error([&] { make_partition({left, right}, {}); }, {"\"left\"", "\"right\"", "\"t\""});
  right.shape = left.shape;
  right.dtype = DType::kBf16;
  expect_error([&] { make_partition({left, right}, {}); }, {"\"left\"", "\"right\"", "\"t\""});
  for (const PartitionOptions& wrong :
       {PartitionOptions{.shard_ranks = 0}, PartitionOptions{.block_size = 0},
        PartitionOptions{.bucket_elements = 0}}) {
    expect_error([&] { make_partition({spec("a", {1})}, wrong); }, {"at least 1"});
  }
}

}  // namespace
}  // namespace zerofp8
