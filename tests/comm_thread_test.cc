// The collectives on ranks that are threads: every check of comm_checks.h on 1, 2, 3, 4 and 8
// ranks, with whole messages and with payloads cut into tiny chunks, which must make no difference.
#include <gtest/gtest.h>

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>

#include "src/comm/chunks.h"
#include "src/comm/thread_transport.h"
#include "tests/comm_checks.h"
#include "tests/thread_ranks.h"

namespace zerofp8::test {
namespace {

using Case = std::tuple<NamedCheck, int, std::size_t>;  // check, ranks, chunk bytes

class ThreadRanks : public testing::TestWithParam<Case> {};

TEST_P(ThreadRanks, Check) {
  const auto& [check, size, chunk_bytes] = GetParam();
  throw_first(run_each(make_thread_communicators(size, chunk_bytes), check.run));
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const auto& [check, size, chunk_bytes] = info.param;
  std::string name = std::string(check.name) + "On" + std::to_string(size);
  if (chunk_bytes != kDefaultChunkBytes) name += "ChunksOf" + std::to_string(chunk_bytes);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Whole, ThreadRanks,
                         testing::Combine(testing::ValuesIn(kCommChecks),
                                          testing::Values(1, 2, 3, 4, 8),
                                          testing::Values(kDefaultChunkBytes)),
                         name_of);
// 4097 is above what a backend buffers, 61 below: the two ways in which messages wait for each
// other.
INSTANTIATE_TEST_SUITE_P(Chunked, ThreadRanks,
                         testing::Combine(testing::ValuesIn(kCommChecks), testing::Values(2, 3),
                                          testing::Values(std::size_t{61}, std::size_t{4097})),
                         name_of);

TEST(SelfCommunicator, PassesEveryCheck) {
  for (const NamedCheck& check : kCommChecks) {
    SCOPED_TRACE(check.name);
    const auto comm = make_self_communicator();
    EXPECT_EQ(comm->backend(), "self");
    check.run(*comm);
  }
}

TEST(ThreadCommunicators, RefuseZeroRanks) {
  EXPECT_THROW(make_thread_communicators(0), ArgumentError);
  EXPECT_THROW(make_thread_communicators(2, 0), ArgumentError);
}

TEST(ThreadCommunicators, OneByteChunks) {
  throw_first(run_each(make_thread_communicators(3, 1), [](Communicator& comm) {
    const Bytes send = all_to_all_send(comm, 333);
    Bytes recv(send.size());
    comm.all_to_all(send, recv, {})->wait();
    EXPECT_EQ(recv, all_to_all_expected(comm, 333));
  }));
}

TEST(ThreadCommunicators, TimeoutIsInheritedBySplit) {
  run_ranks(2, [](Communicator& comm) {
    EXPECT_EQ(comm.timeout(), std::chrono::minutes(10));
    comm.set_timeout(std::chrono::milliseconds(12345));
    EXPECT_EQ(comm.split(0, 0)->timeout(), std::chrono::milliseconds(12345));
  });
}

TEST(ThreadCommunicators, DroppedWorkStillArrives) {
  run_ranks(3, [](Communicator& comm) {
    const Bytes send = all_to_all_send(comm, 5000);
    Bytes recv(send.size());
    comm.all_to_all(send, recv, {});  // its destructor waits
    EXPECT_EQ(recv, all_to_all_expected(comm, 5000));
  });
}

TEST(ThreadCommunicators, ChildOutlivesParent) {
  auto parents = make_thread_communicators(2);
  throw_first(run_each(std::move(parents), [](Communicator& comm) {
    std::unique_ptr<Communicator> child = comm.split(0, 0);
    std::unique_ptr<Communicator> grandchild = child->split(0, 0);
    child.reset();
    check_all_gather(*grandchild);
  }));
}

TEST(AllReduce, IntegerOverflowIsAnErrorOnEveryRank) {
  const Outcomes outcomes = run_ranks_to_the_end(2, [](Communicator& comm) {
    std::int32_t value = INT_MAX;
    comm.all_reduce(std::span(&value, 1), ReduceOp::kSum);
  });
  for (const RankOutcome& rank : outcomes.ranks)
    expect_contains(rank.what, "does not fit into 32 bits");
}

// Counts, offsets and totals beyond 32 bits, without the memory.
TEST(ChunkPlan, CoversSizesBeyond32Bits) {
  constexpr std::uint64_t kTwoTo31 = std::uint64_t{1} << 31;
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{INT_MAX}, kTwoTo31, kTwoTo31 + 8,
        (std::uint64_t{1} << 32) + 1, std::uint64_t{1} << 40}) {
    for (const std::uint64_t chunk_bytes :
         {std::uint64_t{kDefaultChunkBytes}, std::uint64_t{INT_MAX}, std::uint64_t{100000007}}) {
      const ChunkPlan plan{bytes, chunk_bytes};
      std::uint64_t covered = 0;
      for (std::uint64_t i = 0; i < plan.count(); ++i) {
        const ChunkPlan::Chunk chunk = plan.at(i);
        ASSERT_EQ(chunk.offset, covered);
        ASSERT_GT(chunk.bytes, 0u);
        ASSERT_LE(chunk.bytes, static_cast<std::uint64_t>(INT_MAX));
        covered += chunk.bytes;
      }
      EXPECT_EQ(covered, bytes) << "in chunks of " << chunk_bytes;
    }
  }
  EXPECT_EQ((ChunkPlan{kTwoTo31 + 8, kDefaultChunkBytes}.count()), 3u);
  EXPECT_EQ((ChunkPlan{UINT64_MAX, 1u << 30}.count()), std::uint64_t{1} << 34);
}

TEST(WireBytes, CountsBeyond32Bits) {
  WireBytes bytes;
  bytes.payload[1] = 5'000'000'000;
  WireBytes sum = bytes;
  sum += bytes;
  EXPECT_EQ(sum.total_payload(), 10'000'000'000u);
  EXPECT_EQ((sum - bytes).of(DType::kBf16), 5'000'000'000u);
}

// 2^31 + 8 elements and bytes for real; 6 GiB, so only where asked for.
TEST(LargeMessages, BeyondTwoGiB) {
  if (std::getenv("ZEROFP8_SLOW") == nullptr) GTEST_SKIP() << "needs 6 GiB; set ZEROFP8_SLOW=1";
  run_ranks(2, [](Communicator& comm) {
    constexpr std::size_t kBytes = (std::size_t{1} << 31) + 8;
    Bytes data(kBytes);
    const std::size_t probes[] = {0, (std::size_t{1} << 30) - 1, std::size_t{1} << 30,
                                  (std::size_t{1} << 31) - 1, kBytes - 1};
    if (comm.rank() == 0) {
      for (const std::size_t i : probes) data[i] = pattern(1, 2, i);
    }
    comm.broadcast(data, 0, {.dtype = DType::kE4m3, .label = "large"})->wait();
    for (const std::size_t i : probes) EXPECT_EQ(data[i], pattern(1, 2, i)) << i;
    EXPECT_EQ(comm.bytes_sent().of(DType::kE4m3), comm.rank() == 0 ? kBytes : 0u);
  });
}

}  // namespace
}  // namespace zerofp8::test
