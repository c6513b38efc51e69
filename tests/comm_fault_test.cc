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

// A transport that breaks in the chosen way on one rank.
class BrokenTransport final : public Transport {
 public:
  enum class Way { kNotAtAll, kPostThrows, kTestThrows, kPayloadIsLost };
  BrokenTransport(std::shared_ptr<Transport> inner, Way way,
                  std::size_t chunk_bytes = kDefaultChunkBytes)
      : Transport(chunk_bytes), inner_(std::move(inner)), way_(way) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string backend() const override { return "broken"; }
  int max_tag() const override { return inner_->max_tag(); }
  std::unique_ptr<Request> post_send(int peer, int tag, std::span<const std::byte> bytes) override {
    const bool payload = tag % 2 == 1;
    if (payload && way_ == Way::kPostThrows) throw std::runtime_error("cable cut");
    if (payload && way_ == Way::kTestThrows) return std::make_unique<ThrowingRequest>();
    if (payload && way_ == Way::kPayloadIsLost) return std::make_unique<EndlessRequest>();
    return inner_->post_send(peer, tag, bytes);
  }
  std::unique_ptr<Request> post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    return inner_->post_recv(peer, tag, bytes);
  }
  void idle(std::chrono::microseconds waited) override { inner_->idle(waited); }
  void wake() override { inner_->wake(); }

 private:
  struct ThrowingRequest final : Request {
    bool test() override { throw CommError("link went down"); }
  };
  struct EndlessRequest final : Request {
    bool test() override { return false; }
  };
  std::shared_ptr<Transport> inner_;
  const Way way_;
};

Outcomes run_with_broken_rank_1(BrokenTransport::Way way, const RankCall& call) {
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
