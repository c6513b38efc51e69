// What ranks get to see of NCCL when others are late, gone, broken or do something else: an error
// that says why, within the time-out, on all ranks; then the same from each later call.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm_checks.h"
#include "tests/nccl_ranks.h"

namespace zerofp8::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kShort{300};

struct Buffers {
  Bytes &send, &recv;
};
using Call = std::function<std::unique_ptr<Work>(Communicator&, const Buffers&)>;

const Call kAllToAll = [](Communicator& comm, const Buffers& buffers) {
  return comm.all_to_all(buffers.send, buffers.recv, {.label = "grads"});
};
const Call kAllGather = [](Communicator& comm, const Buffers& buffers) {
  return comm.all_gather(std::span(buffers.send).first(8), buffers.recv, {.label = "weights"});
};
const Call kBroadcast = [](Communicator& comm, const Buffers& buffers) {
  return comm.broadcast(buffers.send, 0, {.label = "start"});
};

class NcclFault : public NcclTest {
 protected:
  Buffers buffers_of(const Communicator& comm) {
    const std::size_t bytes = 8 * static_cast<std::size_t>(comm.size());
    return {keep(bytes), keep(bytes)};
  }
  void expect_stays_failed(Communicator& comm, const std::string& story);
  void check_absent(const Call& call, const std::string& name, bool lazily);
  void check_async_error(ncclResult_t code, const std::string& said);
  void check_failed_call(const std::function<void()>& breaks, const Call& call,
                         const std::string& said);
};

// What the call throws, or its work once the host has seen it end.
CommError error_of(Communicator& comm, const Buffers& buffers, const Call& call) {
  try {
    const std::unique_ptr<Work> work = call(comm, buffers);
    wait_on_host(*work);
    work->wait();
  } catch (const CommError& error) {
    return error;
  }
  ADD_FAILURE() << "no error on rank " << comm.rank();
  return CommError("none");
}

// Every later call of any kind has the first story, at once.
void NcclFault::expect_stays_failed(Communicator& comm, const std::string& story) {
  const Buffers buffers = buffers_of(comm);
  double value = 1;
  const std::function<void()> calls[] = {
      [&] { kAllToAll(comm, buffers); },
      [&] { kAllGather(comm, buffers); },
      [&] { kBroadcast(comm, buffers); },
      [&] { comm.all_reduce(std::span(&value, 1), ReduceOp::kSum); },
      [&] { check_gather_control(comm); },
      [&] { comm.barrier(seconds(60)); },
      [&] { comm.split(0, 0); },
  };
  const auto start = Clock::now();
  for (const auto& call : calls) {
    const std::string text = message_of(call);
    expect_contains(text, "has failed before");
    expect_contains(text, story);
  }
  EXPECT_LT(Clock::now() - start, seconds(2));
}

void NcclFault::check_absent(const Call& call, const std::string& name, bool lazily) {
  connect_lazily(lazily);
  std::latch failed(2);
  run_nccl(3, [&](Communicator& comm) {
    comm.set_timeout(kShort);
    const Buffers buffers = buffers_of(comm);
    if (comm.rank() == 2) failed.wait();
    const auto start = Clock::now();
    const CommError error = error_of(comm, buffers, call);
    EXPECT_LT(Clock::now() - start, 2 * kShort + seconds(2));
    EXPECT_EQ(error.absent_ranks(), std::vector<int>{2});
    expect_contains(error.what(), name);
    expect_contains(error.what(), "nothing has come from rank 2");
    expect_stays_failed(comm, error.what());
    if (comm.rank() != 2) failed.count_down();
  });
}

TEST_F(NcclFault, AbsentRankIsNamed) {
  check_absent(kAllToAll, "all_to_all 'grads' (call 1, 16 bytes to other ranks) timed out", false);
  check_absent(kAllGather, "all_gather 'weights'", false);
  check_absent(kBroadcast, "broadcast 'start'", false);
}

// The call itself waits then, as the first exchange of two ranks connects them.
TEST_F(NcclFault, AbsentRankIsNamedWhileConnecting) { check_absent(kAllToAll, "'grads'", true); }

TEST_F(NcclFault, LateRankLearnsItFromAControlCall) {
  std::latch failed(1), learned(1);
  run_nccl(2, [&](Communicator& comm) {
    const Buffers buffers = buffers_of(comm);
    if (comm.rank() == 0) {
      comm.set_timeout(kShort);
      error_of(comm, buffers, kAllToAll);
      expect_stays_failed(comm, "nothing has come from rank 1");
      failed.count_down();
      learned.wait();
      return;
    }
    failed.wait();
    const auto start = Clock::now();
    expect_contains(message_of([&] { comm.barrier(seconds(60)); }), "closed its communicator");
    expect_stays_failed(comm, "closed its communicator");
    EXPECT_LT(Clock::now() - start, seconds(5));
    learned.count_down();
  });
}

TEST_F(NcclFault, DifferentCallsAreBothTold) {
  expect_mismatches(2);
  std::vector<std::string> texts(2);
  run_nccl(2, [&](Communicator& comm) {
    comm.set_timeout(kShort);
    const Buffers buffers = buffers_of(comm);
    const CommError error = error_of(comm, buffers, comm.rank() == 0 ? kAllToAll : kAllGather);
    texts[static_cast<std::size_t>(comm.rank())] = error.what();
    EXPECT_TRUE(error.absent_ranks().empty());
    expect_stays_failed(comm, error.what());
  });
  EXPECT_EQ(texts[0], texts[1]);
  expect_contains(texts[0], "rank 0 waits in call 1: all_to_all 'grads' of fp32");
  expect_contains(texts[0], "rank 1 waits in call 1: all_gather 'weights' of fp32");
}

TEST_F(NcclFault, DifferentSizesAreBothTold) {
  expect_mismatches(3);
  run_nccl(3, [&](Communicator& comm) {
    comm.set_timeout(kShort);
    const Buffers buffers = buffers_of(comm);
    buffers.send.resize(comm.rank() == 2 ? 12 : 24);
    const CommError error = error_of(comm, buffers, kBroadcast);
    expect_contains(error.what(),
                    "rank 0 waits in call 1: broadcast 'start' from rank 0 of fp32, "
                    "sending 24 bytes");
    expect_contains(error.what(),
                    "rank 2 waits in call 1: broadcast 'start' from rank 0 of fp32, "
                    "sending 12 bytes");
  });
}

TEST_F(NcclFault, StuckDeviceIsNoAbsentRank) {
  run_nccl(2, [&](Communicator& comm) {
    comm.set_timeout(kShort);
    const Buffers buffers = buffers_of(comm);
    stall(comm.rank(), true);
    const CommError error = error_of(comm, buffers, kAllToAll);
    EXPECT_TRUE(error.absent_ranks().empty());
    expect_contains(error.what(), "made no progress within 0.3 s");
  });
}

TEST_F(NcclFault, TimeoutStartsWhenTheCallIsNext) {
  run_nccl(2, [&](Communicator& comm) {
    const Buffers one = buffers_of(comm), two = buffers_of(comm);
    stall(comm.rank(), true);
    comm.set_timeout(seconds(50));
    const auto first = kAllToAll(comm, one);
    comm.set_timeout(kShort);
    const auto second = kAllGather(comm, two);
    std::this_thread::sleep_for(2 * kShort);
    stall(comm.rank(), false);
    wait_on_host(*second);
    first->wait();
    second->wait();
  });
}

// One rank is told by NCCL, at once; the others when they ask.
void NcclFault::check_async_error(ncclResult_t code, const std::string& said) {
  std::latch under_way(3), told(3);  // the failed rank stays until it was asked
  run_nccl(3, [&](Communicator& comm) {
    comm.set_timeout(2 * kShort);
    const Buffers buffers = buffers_of(comm);
    stall(comm.rank(), true);
    const auto work = kAllToAll(comm, buffers);
    work->wait();  // does not know yet
    under_way.arrive_and_wait();
    if (comm.rank() == 1) set_async_error(1, code);
    const auto start = Clock::now();
    wait_on_host(*work);
    if (comm.rank() == 1) {
      EXPECT_LT(Clock::now() - start, kShort);
    }
    const std::string text = message_of([&] { work->wait(); });
    expect_contains(text, said);
    if (comm.rank() != 1) expect_contains(text, "rank 1 has failed");
    expect_stays_failed(comm, text);
    told.arrive_and_wait();
  });
  mend();
}

TEST_F(NcclFault, AsynchronousErrors) {
  check_async_error(ncclRemoteError, "remote process exited or there was a network error");
  check_async_error(ncclSystemError, "unhandled system error (as the fake was told)");
}

void NcclFault::check_failed_call(const std::function<void()>& breaks, const Call& call,
                                  const std::string& said) {
  std::latch told(3);
  run_nccl(3, [&](Communicator& comm) {
    comm.set_timeout(2 * kShort);
    const Buffers buffers = buffers_of(comm);
    if (comm.rank() == 1) {
      breaks();
      const std::string text = message_of([&] { call(comm, buffers); });
      expect_contains(text, "on this rank: " + said);
      expect_stays_failed(comm, text);
    } else {
      const std::string text = error_of(comm, buffers, call).what();
      expect_contains(text, "rank 1 has failed");
      expect_contains(text, said);
    }
    told.arrive_and_wait();
  });
}

TEST_F(NcclFault, FailedLaunch) {
  const auto breaks = [] { fail_next_launch(1, ncclSystemError); };
  check_failed_call(breaks, kAllToAll, "ncclGroupEnd: unhandled system error");
  check_failed_call(breaks, kAllGather, "ncclAllGather: unhandled system error");
  check_failed_call(breaks, kBroadcast, "ncclBroadcast: unhandled system error");
}

TEST_F(NcclFault, FailedCudaCall) {
  check_failed_call([] { break_event_record(1, 1); }, kAllToAll, "cudaEventRecord");
  check_failed_call([] { break_event_record(1, 2); }, kAllToAll, "cudaEventRecord");
}

TEST_F(NcclFault, ChildLeavesTheParentAlone) {
  std::latch failed(1);
  run_nccl(2, [&](Communicator& comm) {
    const auto child = comm.split(0, 0);
    child->set_timeout(kShort);
    const Buffers buffers = buffers_of(comm);
    if (comm.rank() == 0) {
      EXPECT_EQ(error_of(*child, buffers, kAllToAll).absent_ranks(), std::vector<int>{1});
      failed.count_down();
    } else {
      failed.wait();
    }
    HostView view(comm, comm.rank());
    check_all_to_all(view);
    check_all_reduce(view);
  });
}

TEST_F(NcclFault, ClosedWithWorkThatNobodyJoins) {
  std::latch closed(1);
  auto comms = make_nccl_ranks(2);
  const Buffers first = buffers_of(*comms[0]), second = buffers_of(*comms[1]);
  throw_first(run_each(std::move(comms), [&](Communicator& comm) {
    auto child = comm.split(0, 0);
    if (comm.rank() == 0) {
      child->set_timeout(kShort);
      const auto work = kAllToAll(*child, first);
      child->set_timeout(kShort / 3);
      const auto start = Clock::now();
      child.reset();
      EXPECT_LT(Clock::now() - start, seconds(5));
      expect_contains(message_of([&] { work->wait(); }), "rank 0 closed its communicator while");
      closed.count_down();
    } else {
      closed.wait();
      child->set_timeout(kShort);
      const CommError error = error_of(*child, second, kAllToAll);
      EXPECT_EQ(error.absent_ranks(), std::vector<int>{0});
      expect_contains(error.what(), "closed its communicator");
    }
    comm.barrier(seconds(60));  // the parent does not mind
  }));
}

// --- making one ---

std::vector<std::string> texts_of_making(int size, const std::function<int(int rank)>& device_of) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  auto controls = make_thread_communicators(size);
  std::latch failed(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto control = std::move(controls[static_cast<std::size_t>(rank)]);
      control->set_timeout(kShort);
      const int device = device_of(rank);
      if (device >= 0) {
        texts[static_cast<std::size_t>(rank)] =
            message_of([&] { make_nccl_communicator(std::move(control), device); });
      }
      failed.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

TEST_F(NcclFault, RankThatNeverComes) {
  const auto texts = texts_of_making(3, [](int rank) { return rank == 2 ? -1 : rank; });
  for (const std::size_t r : {0u, 1u}) {
    expect_contains(texts[r], "the NCCL communicator did not come about");
    expect_contains(texts[r], "nothing has come from rank 2");
  }
}

TEST_F(NcclFault, RankWithoutADevice) {
  for (const auto& text : texts_of_making(3, [](int rank) { return rank == 1 ? 99 : rank; })) {
    expect_contains(text, "did not come about: rank 1: cuda:99: cudaErrorInvalidDevice");
  }
}

TEST_F(NcclFault, NoUniqueId) {
  fail_unique_id(true);
  for (const auto& text : texts_of_making(2, [](int rank) { return rank; })) {
    expect_contains(text, "rank 0: ncclGetUniqueId: unhandled system error");
  }
}

TEST_F(NcclFault, RankThatCannotMeet) {
  set_async_error(1, ncclSystemError);
  for (const auto& text : texts_of_making(3, [](int rank) { return rank; })) {
    expect_contains(text, "rank 1: NCCL: unhandled system error");
  }
}

}  // namespace
}  // namespace zerofp8::test
