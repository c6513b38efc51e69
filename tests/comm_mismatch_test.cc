// Ranks that do not make the same calls, or do not have the same config: an error on every rank
// that says what each of them did, instead of a hang or mixed-up memory.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/comm/p2p_communicator.h"
#include "src/comm/thread_transport.h"
#include "tests/broken_transport.h"
#include "tests/comm_checks.h"
#include "tests/thread_ranks.h"

namespace zerofp8::test {
namespace {

using std::chrono::seconds;

using RankCall = std::function<void(Communicator&)>;
struct Mismatch {
  const char* name;
  RankCall on_rank_0, on_others;
  std::vector<std::string> said;
};

std::vector<Mismatch> mismatches() {
  const auto all_to_all = [](std::size_t part, DType dtype, const char* label) {
    return [=](Communicator& comm) {
      Bytes send(part * static_cast<std::size_t>(comm.size())), recv(send.size());
      comm.all_to_all(send, recv, {.dtype = dtype, .label = label})->wait();
    };
  };
  const auto gather = [](Communicator& comm) {
    Bytes send(8), recv(8 * static_cast<std::size_t>(comm.size()));
    comm.all_gather(send, recv, {.label = "weights"})->wait();
  };
  const auto broadcast_from = [](int root) {
    return [=](Communicator& comm) {
      Bytes data(8);
      comm.broadcast(data, root, {})->wait();
    };
  };
  return {
      {"Sizes",
       all_to_all(8, DType::kFp32, "g"),
       all_to_all(12, DType::kFp32, "g"),
       {"rank 0 is in call 1: all_to_all 'g'", "sending 8 bytes", "expecting 12"}},
      {"LargeSizes",
       all_to_all(80000, DType::kFp32, "g"),
       all_to_all(80001, DType::kFp32, "g"),
       {"sending 80000 bytes", "expecting 80001"}},
      {"SomethingAndNothing",
       all_to_all(0, DType::kFp32, "g"),
       all_to_all(1, DType::kFp32, "g"),
       {"sending 0 bytes", "expecting 1"}},
      {"Kinds",
       all_to_all(8, DType::kFp32, "g"),
       gather,
       {"all_to_all 'g'", "all_gather 'weights'"}},
      {"Formats",
       all_to_all(8, DType::kE4m3, "g"),
       all_to_all(8, DType::kE5m2, "g"),
       {"fp8_e4m3", "fp8_e5m2"}},
      {"Labels",
       all_to_all(8, DType::kFp32, "bucket 1"),
       all_to_all(8, DType::kFp32, "bucket 2"),
       {"'bucket 1'", "'bucket 2'"}},
      {"Roots", broadcast_from(0), broadcast_from(1), {"from rank 0", "from rank 1"}},
  };
}

class Mismatched : public testing::TestWithParam<std::size_t> {};

TEST_P(Mismatched, IsAnErrorOnEveryRank) {
  const Mismatch mismatch = mismatches()[GetParam()];
  for (const int size : {2, 3}) {
    const Outcomes outcomes = run_ranks_to_the_end(size, [&](Communicator& comm) {
      comm.set_timeout(seconds(60));
      (comm.rank() == 0 ? mismatch.on_rank_0 : mismatch.on_others)(comm);
      comm.barrier(seconds(60));  // reached where a rank had nothing to do with rank 0
    });
    for (const RankOutcome& rank : outcomes.ranks) {
      expect_contains(rank.what, "ranks disagree");
      // Of three ranks, two may have finished among themselves: then the story is of their next
      // call.
      if (size != 2) continue;
      for (const std::string& part : mismatch.said) expect_contains(rank.what, part);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, Mismatched, testing::Range(std::size_t{0}, mismatches().size()),
                         [](const auto& test) {
                           return std::string(mismatches()[test.param].name);
                         });

TEST(ChunkSizes, ThatDifferBetweenRanksAreAnError) {
  std::vector<std::unique_ptr<Communicator>> comms;
  for (auto& transport : make_thread_transports(2, 100)) {
    const bool other = transport->rank() == 1;
    comms.push_back(make_p2p_communicator(std::make_shared<BrokenTransport>(
        std::move(transport), BrokenTransport::Way::kNotAtAll, other ? 50 : 100)));
  }
  const Outcomes outcomes = run_each(std::move(comms), [](Communicator& comm) {
    Bytes send(600), recv(600);
    comm.all_to_all(send, recv, {})->wait();
  });
  for (const RankOutcome& rank : outcomes.ranks) {
    expect_contains(rank.what, "in messages of up to 100");
    expect_contains(rank.what, "in messages of up to 50");
  }
}

TEST(CheckSame, NamesEveryVariantWithItsRanks) {
  run_ranks(8, [](Communicator& comm) {
    const char* texts[] = {"a\nb\n", "a\nb\n", "a\nc\n", "a\nb\nd\n", "a\nb\n", "", "a\nc\n", "x"};
    const std::string story =
        message_of([&] { check_same_on_all_ranks(comm, "config", texts[comm.rank()]); });
    expect_contains(story, "config differs between ranks");
    expect_contains(story, "line 2: ranks 0, 1, 4 has 'b', ranks 2, 6 has 'c'");
    expect_contains(story,
                    "line 3: ranks 0, 1, 4 has nothing (the text ends before), rank 3 has 'd'");
    expect_contains(story, "1 more variant");
    comm.barrier(seconds(60));
  });
}

TEST(CheckSame, ShortensLongLines) {
  run_ranks(2, [](Communicator& comm) {
    const std::string text(100000, comm.rank() == 0 ? 'a' : 'b');
    const std::string story = message_of([&] { check_same_on_all_ranks(comm, "names", text); });
    EXPECT_LT(story.size(), 1000u);
    expect_contains(story, "aaa' ...");
  });
}

}  // namespace
}  // namespace zerofp8::test
