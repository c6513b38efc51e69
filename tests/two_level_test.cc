// The two-level reduce-scatter on thread ranks whose nodes are simulated: bits against plain loops
// where formats are exact or plain, the error bound in FP8, and what is not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "src/comm/reduce_scatter.h"
#include "tests/codecs.h"
#include "tests/stored.h"
#include "tests/thread_ranks.h"

namespace zerofp8::test {
namespace {

constexpr int kBlock = 128;
using Gradients = std::vector<std::vector<float>>;  // [rank][element]

struct Levels {
  int per_node = 1;  // 1: flat
  Storage in_node = Storage::kFp32, wire = Storage::kFp32;
};

// Two reduce-scatters at once, of the gradients and of their negatives, both sent across before the
// first is waited for. All shards' results side by side, times `factor`; the second's must be the
// first's, negated.
std::vector<float> reduce(const Gradients& g, const Levels& levels, float factor,
                          std::uint32_t* amax = nullptr) {
  const int ranks = static_cast<int>(g.size()), k = levels.per_node;
  const auto shard = static_cast<std::int64_t>(g[0].size()) / ranks;
  std::vector<float> out(g[0].size());
  std::vector<std::uint32_t> largest(g.size());
  run_ranks(ranks, [&](Communicator& comm) {
    const int rank = comm.rank();
    const auto in_node = comm.split(rank / k, rank), across = comm.split(rank % k, rank);
    const ReduceRanks flat{&comm}, two{across.get(), in_node.get(), levels.in_node};
    const auto device = make_cpu_device();
    BufferPool pool(device->allocator());
    const PartLayout layout{Storage::kFp32, false, ranks, kBlock, shard};
    std::vector<float> mine = g[std::size_t(rank)], negated = mine;
    for (float& x : negated) x = -x;
    ReduceScatter first(k == 1 ? flat : two, *device, pool, layout, mine.data(), levels.wire);
    ReduceScatter second(k == 1 ? flat : two, *device, pool, layout, negated.data(), levels.wire);
    first.send_across();
    second.send_across();
    first.wait();
    second.wait();
    float* sum = out.data() + rank * shard;
    std::vector<float> other(std::size_t(shard), 0.0f);
    device->decode_sum({.in = first.received(0),
                        .factor = factor,
                        .out = sum,
                        .elements = shard,
                        .amax = &largest[std::size_t(rank)]});
    device->decode_sum(
        {.in = second.received(0), .factor = -factor, .out = other.data(), .elements = shard});
    for (std::int64_t i = 0; i < shard; ++i) {
      ASSERT_TRUE(sum[i] == other[std::size_t(i)] || std::isnan(sum[i])) << "element " << i;
    }
  });
  if (amax != nullptr) *amax = *std::max_element(largest.begin(), largest.end());
  return out;
}

Gradients gradients(int ranks, std::int64_t n, bool heavy, std::uint32_t seed = 100) {
  Gradients g;
  for (int r = 0; r < ranks; ++r) {
    const std::uint32_t own = seed + std::uint32_t(r);
    g.push_back(heavy ? heavy_tailed(n, own) : gaussian(n, own));
  }
  return g;
}

// A plain format's rounding by table search.
float rounded(Storage storage, float x) {
  if (storage == Storage::kFp32) return x;
  return static_cast<float>((storage == Storage::kBf16 ? ref::bf16() : ref::fp16()).round_ieee(x));
}

// The documented order, as a plain loop: local ranks of a node, then nodes.
std::vector<float> plain_loop(const Gradients& g, const Levels& levels, float factor) {
  std::vector<float> out(g[0].size());
  const std::size_t k = std::size_t(levels.per_node);
  for (std::size_t i = 0; i < out.size(); ++i) {
    float sum = 0;
    for (std::size_t begin = 0; begin < g.size(); begin += k) {
      float node = 0;
      for (std::size_t r = begin; r < begin + k; ++r) node += rounded(levels.in_node, g[r][i]);
      sum += rounded(levels.wire, node);
    }
    out[i] = sum * factor;
  }
  return out;
}

TEST(TwoLevel, PlainFormatsHaveTheBitsOfTheDocumentedOrder) {
  for (const auto& [ranks, k] : {std::pair{4, 2}, {4, 4}, {6, 3}, {8, 2}, {8, 4}, {12, 4}}) {
    const Gradients g = gradients(ranks, ranks * 2 * kBlock, true);
    const float factor = 1.0f / float(ranks);
    const auto flat = reduce(g, {}, factor);
    for (const Storage in_node : {Storage::kFp32, Storage::kBf16}) {
      for (const Storage wire : {Storage::kFp32, Storage::kBf16, Storage::kFp16}) {
        const Levels levels{k, in_node, wire};
        const auto found = reduce(g, levels, factor), expected = plain_loop(g, levels, factor);
        for (std::size_t i = 0; i < found.size(); ++i) {
          ASSERT_EQ(found[i], expected[i]) << ranks << "/" << k << " " << storage_name(in_node)
                                           << " " << storage_name(wire) << " element " << i;
        }
        // The order shows in the bits, so a wrong one would, too. (One node in FP32 has the flat
        // one's.)
        const bool same = k == ranks && in_node == Storage::kFp32 && wire == Storage::kFp32;
        EXPECT_EQ(found == flat, same) << ranks << "/" << k;
      }
    }
  }
}

// One rank per node: nothing to add inside, and the flat one's bits in every wire.
TEST(TwoLevel, OneRankPerNodeHasTheFlatBits) {
  const Gradients g = gradients(4, 8 * kBlock, true);
  for (const Storage wire : {Storage::kFp32, Storage::kBf16, Storage::kE4m3Block}) {
    std::vector<float> two(g[0].size());
    run_ranks(4, [&](Communicator& comm) {
      const auto alone = comm.split(comm.rank(), 0);
      const auto device = make_cpu_device();
      BufferPool pool(device->allocator());
      std::vector<float> mine = g[std::size_t(comm.rank())];
      ReduceScatter rs({&comm, alone.get()}, *device, pool,
                       {Storage::kFp32, false, 4, kBlock, 2 * kBlock}, mine.data(), wire);
      rs.wait();
      device->decode_sum({.in = rs.received(0),
                          .factor = 0.25f,
                          .out = two.data() + comm.rank() * 2 * kBlock,
                          .elements = 2 * kBlock});
    });
    EXPECT_EQ(two, reduce(g, {1, Storage::kFp32, wire}, 0.25f)) << storage_name(wire);
  }
}

struct Row {
  int ranks, per_node;
  bool heavy;
};
class TwoLevelBound : public testing::TestWithParam<Row> {};
std::vector<Row> rows() {
  std::vector<Row> all;
  for (const int ranks : {4, 8, 16, 32, 64}) {
    for (const int k : {2, 4, 8}) {
      for (const bool heavy : {false, true}) {
        if (ranks % k == 0) all.push_back({ranks, k, heavy});
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, TwoLevelBound, testing::ValuesIn(rows()), [](const auto& row) {
  return std::string(row.param.heavy ? "heavy_tailed_" : "gaussian_") +
         std::to_string(row.param.ranks) + "_by_" + std::to_string(row.param.per_node);
});

// What a node has added up in float64, and how far the FP32 sum of what its ranks sent may be off.
struct NodeSum {
  std::vector<double> value, slack, size;
};
std::vector<NodeSum> node_sums(const Gradients& g, const Levels& levels) {
  const std::size_t n = g[0].size(), k = std::size_t(levels.per_node);
  const double relative = (levels.in_node == Storage::kBf16 ? 0x1p-8 : 0) + double(k) * 0x1p-24;
  std::vector<NodeSum> nodes(g.size() / k);
  for (std::size_t r = 0; r < g.size(); ++r) {
    NodeSum& node = nodes[r / k];
    for (std::vector<double>* x : {&node.value, &node.slack, &node.size}) x->resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      node.value[i] += g[r][i];
      node.size[i] += std::fabs(g[r][i]);
      node.slack[i] = relative * node.size[i];
    }
  }
  return nodes;
}

// RMS error of the sum of ranks over [begin, end), over sqrt(sum over nodes |node's sum|^2).
double relative_error(const std::vector<NodeSum>& nodes, const std::vector<float>& sum,
                      std::size_t begin, std::size_t end) {
  double error = 0, squares = 0;
  for (std::size_t i = begin; i < end; ++i) {
    double exact = 0;
    for (const NodeSum& node : nodes) {
      exact += node.value[i];
      squares += node.value[i] * node.value[i];
    }
    error += (sum[i] - exact) * (sum[i] - exact);
  }
  return std::sqrt(error / squares);
}

// As in reduce_scatter_test, with sums of nodes in the place of ranks: each is rounded once, so the
// error of the sum is .0265 sqrt(sum over nodes |node's sum|^2) in the root mean square. bf16
// inside a node adds at most 2^-7 / sqrt(12) of each rank's: under 1 % of that in the square.
TEST_P(TwoLevelBound, Fp8AcrossNodes) {
  const auto& [ranks, k, heavy] = GetParam();
  constexpr std::size_t kN = 128 * kBlock, kSet = 16 * kBlock;
  const Gradients g = gradients(ranks, kN, heavy);
  for (const Storage in_node : {Storage::kFp32, Storage::kBf16}) {
    const Levels levels{k, in_node, Storage::kE4m3Block};
    const std::vector<float> sum = reduce(g, levels, 1.0f);
    const std::vector<NodeSum> nodes = node_sums(g, levels);
    const double error = relative_error(nodes, sum, 0, kN);
    EXPECT_LE(error, 0.0265);
    RecordProperty(storage_name(in_node), std::to_string(error));
    for (std::size_t begin = 0; begin < kN; begin += kSet) {
      EXPECT_LE(relative_error(nodes, sum, begin, begin + kSet), 0.0265 * 1.5);
    }
  }
}

// Element by element: half an ulp of each node's block, what the node's own sum is off by, and the
// FP32 additions.
TEST_P(TwoLevelBound, EachElementIsWithinTheRoundingsOfItsNodes) {
  const auto& [ranks, k, heavy] = GetParam();
  constexpr std::size_t kN = 128 * kBlock;
  const Gradients g = gradients(ranks, kN, heavy);
  for (const Storage in_node : {Storage::kFp32, Storage::kBf16}) {
    const Levels levels{k, in_node, Storage::kE4m3Block};
    const std::vector<float> sum = reduce(g, levels, 1.0f);
    std::vector<double> exact(kN), bound(kN), size(kN);
    for (const NodeSum& node : node_sums(g, levels)) {
      const auto largest = [&](std::size_t i) { return std::fabs(node.value[i]) + node.slack[i]; };
      for (std::size_t block = 0; block < kN; block += kBlock) {
        double amax = 0;
        for (std::size_t i = block; i < block + kBlock; ++i) amax = std::max(amax, largest(i));
        for (std::size_t i = block; i < block + kBlock; ++i) {
          exact[i] += node.value[i];
          size[i] += node.size[i];
          bound[i] += node.slack[i] + ref::block_error_bound(ref::e4m3(), largest(i), amax);
        }
      }
    }
    for (std::size_t i = 0; i < kN; ++i) {
      ASSERT_LE(std::fabs(sum[i] - exact[i]),
                bound[i] + (ranks + 4) * 0x1p-24 * (size[i] + bound[i]))
          << storage_name(in_node) << " element " << i;
    }
  }
}

// What may overflow and what is bad from the start: seen by the rank that sums it.
TEST(TwoLevel, NonFiniteValuesOfAnyRankAreReported) {
  for (const Storage in_node : {Storage::kFp32, Storage::kBf16}) {
    for (const Storage wire : {Storage::kFp32, Storage::kBf16, Storage::kFp16, Storage::kE4m3Block,
                               Storage::kE5m2Block}) {
      for (int rank = 0; rank < 4; ++rank) {
        for (const float bad : {INFINITY, -INFINITY, NAN}) {
          Gradients g = gradients(4, 4 * kBlock, false);
          std::uint32_t amax = 0;
          reduce(g, {2, in_node, wire}, 0.25f, &amax);
          EXPECT_FALSE(not_finite(amax));
          g[std::size_t(rank)][200] = bad;
          reduce(g, {2, in_node, wire}, 0.25f, &amax);
          EXPECT_TRUE(not_finite(amax))
              << storage_name(in_node) << " " << storage_name(wire) << " rank " << rank;
        }
      }
    }
  }
}

TEST(TwoLevel, OverflowOnTheWayIsReported) {
  const auto overflows = [](const std::vector<float>& values, const Levels& levels) {
    Gradients g;
    for (const float x : values) g.emplace_back(4 * kBlock, x);
    std::uint32_t amax = 0;
    reduce(g, levels, 0.25f, &amax);
    return not_finite(amax);
  };
  constexpr float kLargest = std::numeric_limits<float>::max();
  using enum Storage;
  for (const Storage wire : {kFp32, kBf16, kE4m3Block}) {
    // The node's sum is beyond FP32 though the sum of all is not.
    EXPECT_TRUE(overflows({2e38f, 2e38f, -2e38f, -1.9e38f}, {2, kFp32, wire}));
    EXPECT_FALSE(overflows({2e38f, -2e38f, 1e38f, 1e38f}, {2, kFp32, wire}));
    // FP32's largest rounds to infinity in bf16.
    EXPECT_TRUE(overflows({kLargest, 0, 0, 0}, {2, kBf16, wire}));
    EXPECT_FALSE(overflows({kLargest, 0, 0, 0}, {2, kFp32, kFp32}));
  }
  // fp16 across: what must fit is the node's sum, not a rank's gradient.
  EXPECT_FALSE(overflows({40000, 40000, 0, 0}, {1, kFp32, kFp16}));
  EXPECT_TRUE(overflows({40000, 40000, 0, 0}, {2, kFp32, kFp16}));
}

// The residual of an error-feedback accumulator is added before the node's exchange.
TEST(TwoLevel, ResidualsOfTheAccumulatorCount) {
  run_ranks(4, [](Communicator& comm) {
    const auto in_node = comm.split(comm.rank() / 2, comm.rank());
    const auto across = comm.split(comm.rank() % 2, comm.rank());
    const auto device = make_cpu_device();
    BufferPool pool(device->allocator());
    const PartLayout layout{Storage::kE4m3Block, true, 4, kBlock, kBlock};
    std::vector<std::byte> memory(static_cast<std::size_t>(layout.bytes()));
    const std::vector<float> value(kBlock, 1.0f), rest(kBlock, 0x1p-10f);
    for (int part = 0; part < 4; ++part) {
      cpu_ops().encode(value.data(), layout.view(memory.data(), part), kBlock, kBlock,
                       Rounding::kNearest, {});
      cpu_ops().encode(rest.data(), layout.residual_view(memory.data(), part), kBlock, kBlock,
                       Rounding::kNearest, {});
    }
    ReduceScatter rs({across.get(), in_node.get()}, *device, pool, layout, memory.data(),
                     Storage::kFp32);
    rs.wait();
    std::vector<float> sum(kBlock);
    device->decode_sum({.in = rs.received(0), .out = sum.data(), .elements = kBlock});
    for (const float x : sum) EXPECT_NEAR(x, 4 * (1 + 0x1p-10), 4 * 0x1p-21);
  });
}

}  // namespace
}  // namespace zerofp8::test
