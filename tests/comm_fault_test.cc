// What ranks get to see when others are late, gone, broken or do something else: always an error
// that names the rank, never a hang. No test here waits for anything longer than its own short
// time-outs.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "src/comm/p2p_communicator.h"
#include "src/comm/thread_transport.h"
#include "tests/broken_transport.h"
#include "tests/comm_checks.h"
#include "tests/thread_ranks.h"

namespace zerofp8::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// A collective of `part` bytes per pair of ranks; 0 where it has no size.
struct NamedCall {
  const char* name;
  void (*run)(Communicator&, std::size_t part);
};
constexpr NamedCall kCalls[] = {
    {"all_to_all",
     [](Communicator& comm, std::size_t part) {
       Bytes send(part * static_cast<std::size_t>(comm.size())), recv(send.size());
       comm.all_to_all(send, recv, {.label = "grads"})->wait();
     }},
    {"all_gather",
     [](Communicator& comm, std::size_t part) {
       Bytes send(part), recv(part * static_cast<std::size_t>(comm.size()));
       comm.all_gather(send, recv, {.label = "weights"})->wait();
     }},
    {"all_reduce",
     [](Communicator& comm, std::size_t part) {
       std::vector<double> data(part / 8 + 1);
       comm.all_reduce(std::span(data), ReduceOp::kSum);
     }},
    {"gather_control",
     [](Communicator& comm, std::size_t part) {
       Bytes send(part), recv(part * static_cast<std::size_t>(comm.size()));
       comm.gather_control(send, recv);
     }},
    {"barrier", [](Communicator& comm, std::size_t) { comm.barrier(comm.timeout()); }},
};

// Long enough for all present ranks to come on a machine that is busy with other things.
constexpr milliseconds kShort{250};

// Lets the present ranks start together and the absent ones come when all present ranks have
// failed, so that no test depends on how long a thread takes to get a core.
class AbsentRanks {
 public:
  AbsentRanks(int ranks, int absent) : together_(ranks - absent), failed_(ranks - absent) {}
  void start(bool absent) {
    if (absent) {
      failed_.wait();
    } else {
      together_.arrive_and_wait();
    }
  }
  void end(bool absent) {
    if (!absent) failed_.count_down();
  }

 private:
  std::latch together_, failed_;
};

class Absent : public testing::TestWithParam<std::tuple<NamedCall, std::size_t, int>> {};

// One of three ranks does not call; the others name it; later calls fail at once with the story;
// and the rank itself, coming late, is told the same.
TEST_P(Absent, IsNamed) {
  const auto& [call, part, absent] = GetParam();
  AbsentRanks absence(3, 1);
  const Outcomes outcomes = run_ranks_to_the_end(3, [&](Communicator& comm) {
    comm.set_timeout(kShort);
    absence.start(comm.rank() == absent);
    try {
      call.run(comm, part);
      ADD_FAILURE() << "no error on rank " << comm.rank();
    } catch (const CommError& error) {
      EXPECT_EQ(error.absent_ranks(), std::vector<int>{absent});
      expect_contains(error.what(), call.name);
      expect_contains(error.what(), "nothing has come from rank " + std::to_string(absent));
      expect_contains(error.what(), "has not called it");
    }
    absence.end(comm.rank() == absent);
    const auto start = Clock::now();
    const std::string text = message_of([&] { call.run(comm, part); });
    EXPECT_LT(Clock::now() - start, seconds(1));
    expect_contains(text, "has failed before");
    expect_contains(text, "nothing has come from rank " + std::to_string(absent));
  });
  EXPECT_EQ(outcomes.first_failed, -1);
}

INSTANTIATE_TEST_SUITE_P(Rank, Absent,
                         testing::Combine(testing::ValuesIn(kCalls),
                                          testing::Values(std::size_t{8}, std::size_t{100000}),
                                          testing::Values(0, 2)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param).name) +
                                  std::to_string(std::get<1>(test.param)) + "BytesRank" +
                                  std::to_string(std::get<2>(test.param));
                         });

TEST(Timeout, NamesEachAbsentRankLabelAndBytes) {
  AbsentRanks absence(4, 2);
  run_ranks(4, [&](Communicator& comm) {
    check_gather_control(comm);
    comm.set_timeout(kShort);
    absence.start(comm.rank() % 2 == 1);
    if (comm.rank() % 2 == 1) return;
    Bytes send(10), recv(40);
    try {
      comm.all_gather(send, recv, {.label = "bucket 7"})->wait();
      ADD_FAILURE();
    } catch (const CommError& error) {
      EXPECT_EQ(error.absent_ranks(), (std::vector<int>{1, 3}));
      expect_contains(error.what(), "all_gather 'bucket 7' (call 2, 30 bytes to other ranks)");
      expect_contains(error.what(), "ranks 1, 3");
      expect_contains(error.what(), "last heard from");
      expect_contains(error.what(), "in call 1: gather_control");
    }
    absence.end(false);
  });
}

TEST(Timeout, BroadcastRootNamesTheAbsentReceiver) {
  AbsentRanks absence(3, 1);
  run_ranks(3, [&](Communicator& comm) {
    Bytes data(5000);
    comm.set_timeout(kShort);
    absence.start(comm.rank() == 1);
    if (comm.rank() == 1) return;
    // Rank 2 has its data: only the root can know that rank 1 is missing.
    const std::string text = message_of([&] { comm.broadcast(data, 0, {})->wait(); });
    if (comm.rank() == 0) expect_contains(text, "nothing has come from rank 1");
    absence.end(false);
  });
}

TEST(Timeout, BarrierHasItsOwn) {
  AbsentRanks absence(2, 1);
  run_ranks(2, [&](Communicator& comm) {
    absence.start(comm.rank() == 1);
    if (comm.rank() == 1) return;
    const std::string text = message_of([&] { comm.barrier(milliseconds(50)); });
    expect_contains(text, "timed out after 0.05 s");
    absence.end(false);
  });
}

TEST(Timeout, SlowRankWithinTheLimitIsNoError) {
  run_ranks(3, [](Communicator& comm) {
    comm.set_timeout(seconds(60));
    std::this_thread::sleep_for(milliseconds(60 * comm.rank()));
    check_all_to_all(comm);
  });
}

TEST(Timeout, StartsWhenTheCallIsNext) {
  // The second call waits longer than its time-out for the first, which is no fault of any rank.
  run_ranks(2, [](Communicator& comm) {
    Bytes send(2), recv(2), part(1), all(2);
    comm.set_timeout(seconds(60));
    if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(400));
    const auto first = comm.all_to_all(send, recv, {.label = "first"});
    comm.set_timeout(milliseconds(200));
    const auto second = comm.all_gather(part, all, {.label = "second"});
    first->wait();
    second->wait();
  });
}

TEST(Closing, RankThatThrowsEndsTheOthers) {
  for (int size = 2; size <= 4; ++size) {
    const auto start = Clock::now();
    const Outcomes outcomes = run_ranks_to_the_end(size, [](Communicator& comm) {
      check_gather_control(comm);
      if (comm.rank() == 1) throw std::runtime_error("out of luck");
      comm.barrier(seconds(600));
    });
    EXPECT_LT(Clock::now() - start, seconds(30));
    EXPECT_EQ(outcomes.first_failed, 1);
    EXPECT_EQ(outcomes.ranks[1].what, "out of luck");
    for (int rank = 0; rank < size; ++rank) {
      if (rank == 1) continue;
      const RankOutcome& outcome = outcomes.ranks[static_cast<std::size_t>(rank)];
      expect_contains(outcome.what, "rank 1");
      expect_contains(outcome.what, "closed its communicator");
    }
  }
}

TEST(Closing, AfterTheLastCallIsNoError) {
  for (int i = 0; i < 50; ++i) {
    run_ranks(3, [](Communicator& comm) {
      Bytes send(3 * 9000), recv(3 * 9000);
      comm.all_to_all(send, recv, {})
          ->wait();  // data may still be under way to others when one leaves
    });
  }
}

TEST(Closing, FailsWhatIsPending) {
  run_ranks(2, [](Communicator& comm) {
    auto child = comm.split(0, 0);
    if (comm.rank() == 0) {
      Bytes send(2), recv(2);
      const auto work = child->all_to_all(send, recv, {.label = "pending"});
      child.reset();
      expect_contains(message_of([&] { work->wait(); }), "closed its communicator");
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT_THROW(child->barrier(seconds(600)), CommError);
    }
    comm.barrier(seconds(60));  // the parent does not mind
  });
}

TEST(Closing, QueuedCallsGetTheStoryOfTheFirst) {
  run_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) return;
    std::vector<Bytes> sends(5, Bytes(2)), recvs(5, Bytes(2));
    std::vector<std::unique_ptr<Work>> works;
    try {
      for (std::size_t i = 0; i < 5; ++i) works.push_back(comm.all_to_all(sends[i], recvs[i], {}));
    } catch (const CommError&) {  // the peer may already be gone by the second call
    }
    for (const auto& work : works) {
      expect_contains(message_of([&] { work->wait(); }), "rank 1 closed its communicator");
      EXPECT_TRUE(work->done());
    }
  });
}

Outcomes run_with_broken_rank_1(BrokenTransport::Way way,
                                const std::function<void(Communicator&)>& call) {
  std::vector<std::unique_ptr<Communicator>> comms;
  for (auto& transport : make_thread_transports(3)) {
    const bool broken = transport->rank() == 1;
    comms.push_back(
        make_p2p_communicator(broken ? std::make_shared<BrokenTransport>(std::move(transport), way)
                                     : std::move(transport)));
  }
  return run_each(std::move(comms), call);
}

TEST(BrokenLink, ErrorOfTheProgressThreadReachesEveryRank) {
  for (const auto& [way, said] : {std::pair(BrokenTransport::Way::kPostThrows, "cable cut"),
                                  std::pair(BrokenTransport::Way::kTestThrows, "link went down")}) {
    const Outcomes outcomes = run_with_broken_rank_1(way, [](Communicator& comm) {
      Bytes send(30000), recv(30000);
      const auto work = comm.all_to_all(send, recv, {});
      EXPECT_THROW(work->wait(), CommError);
      work->wait();  // throws again
    });
    for (const RankOutcome& rank : outcomes.ranks) expect_contains(rank.what, said);
  }
}

// Present but stuck is told apart from absent.
TEST(BrokenLink, StuckRankIsNotCalledAbsent) {
  const Outcomes outcomes =
      run_with_broken_rank_1(BrokenTransport::Way::kPayloadIsLost, [](Communicator& comm) {
        comm.set_timeout(4 * kShort);
        Bytes send(30000), recv(30000);
        comm.all_to_all(send, recv, {.label = "grads"})->wait();
      });
  for (const RankOutcome& rank : outcomes.ranks) {
    expect_contains(rank.what, "data is missing");
    expect_contains(rank.what, "has called it, but");
  }
}

TEST(Split, FailureOfAChildLeavesTheParentAlone) {
  AbsentRanks absence(3, 1);
  run_ranks(3, [&](Communicator& comm) {
    const bool absent = comm.rank() == 2;
    const auto child = comm.split(0, 0);
    absence.start(absent);
    if (!absent) {
      EXPECT_THROW(child->barrier(kShort), CommError);
    }
    absence.end(absent);
    check_all_to_all(comm);
    EXPECT_THROW(child->barrier(seconds(60)), CommError);
    check_gather_control(comm);
  });
}

TEST(Split, ErrorsNameTheRankInTheWorldToo) {
  run_ranks(4, [](Communicator& comm) {
    const auto odd = comm.split(comm.rank() % 2, 0);
    if (comm.rank() == 1) {
      const std::string text = message_of([&] { odd->barrier(milliseconds(60)); });
      expect_contains(text, "rank 1 (world rank 3) has not called it");
    }
    comm.barrier(seconds(60));
  });
}

TEST(RunRanks, ReportsTheCauseNotItsConsequences) {
  try {
    run_ranks(3, [](Communicator& comm) {
      if (comm.rank() == 2) throw std::out_of_range("cause");
      comm.barrier(seconds(60));
    });
    FAIL();
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), 2);
    EXPECT_STREQ(error.what(), "rank 2: cause");
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

}  // namespace
}  // namespace zerofp8::test
