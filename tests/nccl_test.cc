// The NCCL communicator over fakes of CUDA and NCCL: results, and that they are right in the order
// of the streams, whatever the host does meanwhile. What happens when things go wrong is in
// nccl_fault_test.cc, a part of the same program. None of this has seen a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/comm_checks.h"
#include "tests/nccl_ranks.h"

namespace zerofp8::test {
namespace {

using std::chrono::milliseconds;

// Not here: BadArguments (gives a stream to communicators that take none), SplitConcurrency and
// ConcurrentSplits (calls in different orders, which device communicators do not allow).
constexpr NamedCheck kChecks[] = {
    {"AllToAll", check_all_to_all},
    {"AllGather", check_all_gather},
    {"AllGatherInPlace", check_all_gather_in_place},
    {"Broadcast", check_broadcast},
    {"AllReduce", check_all_reduce},
    {"MaxKeepsNan", check_max_keeps_nan},
    {"GatherControl", check_gather_control},
    {"Barrier", check_barrier},
    {"ManyInFlight", check_many_in_flight},
    {"SplitOrder", check_split_order},
    {"WireBytes", check_wire_bytes},
    {"SameTexts", check_same_texts},
    {"DifferentTexts", check_different_texts},
};

class NcclRanks : public NcclTest,
                  public testing::WithParamInterface<std::tuple<NamedCheck, int>> {};

TEST_P(NcclRanks, Check) {
  const auto& [check, size] = GetParam();
  run_nccl(size, [run = check.run](Communicator& comm) {
    HostView view(comm, comm.rank());
    run(view);
  });
}

INSTANTIATE_TEST_SUITE_P(Host, NcclRanks,
                         testing::Combine(testing::ValuesIn(kChecks), testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param).name) + "On" +
                                  std::to_string(std::get<1>(test.param));
                         });

// Made apart or split: kernels of all of them run in one order.
TEST_F(NcclTest, CommunicatorsOfADeviceShareItsStream) {
  const auto first = make_nccl_communicator(make_self_communicator(), 0);
  const auto second = make_nccl_communicator(make_self_communicator(), 0);
  const auto child = second->split(0, 0);
  EXPECT_EQ(live_streams(), 1);
  const auto other = make_nccl_communicator(make_self_communicator(), 1);
  EXPECT_EQ(live_streams(), 2);
}

TEST_F(NcclTest, SaysWhatItIs) {
  EXPECT_TRUE(built_with_nccl());
  run_nccl(2, [](Communicator& comm) {
    EXPECT_EQ(comm.backend(), "nccl");
    EXPECT_TRUE(comm.on_device());
    EXPECT_FALSE(make_self_communicator()->on_device());
    EXPECT_EQ(comm.timeout(), std::chrono::minutes(10));
    comm.set_timeout(milliseconds(12345));
    EXPECT_EQ(comm.split(0, 0)->timeout(), milliseconds(12345));
  });
}

TEST_F(NcclTest, LeavesTheThreadsDeviceAlone) {
  run_nccl(2, [](Communicator& comm) {
    cudaSetDevice(5);
    Bytes data(8);
    HostView(comm, comm.rank()).broadcast(data, 0, {})->wait();
    int device = -1;
    cudaSetDevice(6);
    const auto work = comm.broadcast(data, 0, {});
    work->wait();
    cudaGetDevice(&device);
    EXPECT_EQ(device, 6);
    wait_on_host(*work);
  });
}

// Filled late on the caller's stream, used and overwritten behind wait() on it, from one buffer all
// the time; the host is through before the first byte has moved.
void check_stream_order(Communicator& comm, bool wait) {
  constexpr int kRounds = 6;
  constexpr std::size_t kPart = 5000;
  const auto ranks = static_cast<std::size_t>(comm.size());
  const CallersStream stream(comm.rank());
  Bytes send(ranks * kPart), recv(ranks * kPart), gathered(ranks * kPart);
  std::vector<Bytes> exchanged(kRounds), all(kRounds);
  std::atomic<bool> open{false};
  enqueue(stream.get(), [&] {
    while (!open) std::this_thread::sleep_for(milliseconds(1));
  });
  for (int round = 0; round < kRounds; ++round) {
    const Bytes fill = all_to_all_send(comm, kPart, round);
    enqueue(stream.get(), [&, fill] {
      std::this_thread::sleep_for(milliseconds(2));
      std::copy(fill.begin(), fill.end(), send.begin());
    });
    std::unique_ptr<Work> work = comm.all_to_all(send, recv, {.stream = stream.get()});
    if (wait) work->wait();
    work.reset();  // makes the stream wait, too
    work = comm.all_gather(std::span(recv).first(kPart), gathered, {.stream = stream.get()});
    if (wait) work->wait();
    EXPECT_FALSE(work->done());
    work.reset();
    enqueue(stream.get(), [&, round] {
      exchanged[static_cast<std::size_t>(round)] = recv;
      all[static_cast<std::size_t>(round)] = gathered;
      for (Bytes* each : {&send, &recv, &gathered}) {
        std::fill(each->begin(), each->end(), std::byte{0xaa});
      }
    });
  }
  open = true;
  synchronize(stream.get());
  for (int round = 0; round < kRounds; ++round) {
    EXPECT_EQ(exchanged[static_cast<std::size_t>(round)], all_to_all_expected(comm, kPart, round));
    Bytes expected;  // each rank's first received part: what rank 0 has sent to it
    for (int r = 0; r < comm.size(); ++r) append(expected, pattern_bytes(0, r, kPart, round));
    EXPECT_EQ(all[static_cast<std::size_t>(round)], expected);
  }
}

TEST_F(NcclTest, FollowsTheCallersStream) {
  for (int size = 1; size <= 4; ++size) {
    run_nccl(size, [](Communicator& comm) { check_stream_order(comm, true); });
  }
}

TEST_F(NcclTest, DroppedWorkHoldsTheStreamBack) {
  for (int size = 1; size <= 3; ++size) {
    run_nccl(size, [](Communicator& comm) { check_stream_order(comm, false); });
  }
}

TEST_F(NcclTest, BroadcastInStreamOrder) {
  run_nccl(3, [](Communicator& comm) {
    const CallersStream stream(comm.rank());
    Bytes data(3000), seen;
    const Bytes expected = pattern_bytes(1, 0, data.size());
    enqueue(stream.get(), [&] {
      std::this_thread::sleep_for(milliseconds(5));
      if (comm.rank() == 1) std::copy(expected.begin(), expected.end(), data.begin());
    });
    comm.broadcast(data, 1, {.stream = stream.get()})->wait();
    enqueue(stream.get(), [&] { seen = data; });
    synchronize(stream.get());
    EXPECT_EQ(seen, expected);
  });
}

// Rows and columns of a grid and all ranks, in use at once, in one order on all ranks.
TEST_F(NcclTest, SeveralCommunicatorsAtOnce) {
  run_nccl(4, [](Communicator& comm) {
    const int row = comm.rank() / 2, column = comm.rank() % 2;
    const auto across = comm.split(row, column);
    const auto down = comm.split(column, -row);
    ASSERT_EQ(across->size(), 2);
    EXPECT_EQ(down->rank(), 1 - row);
    constexpr int kRounds = 10;
    struct Use {
      Communicator* comm;
      Bytes send, recv, all;
      int round;
    };
    std::vector<Use> uses;
    for (int round = 0; round < kRounds; ++round) {
      for (Communicator* each : {&comm, across.get(), down.get()}) {
        Bytes send = all_to_all_send(*each, 777, round);
        uses.push_back(
            {each, send, Bytes(send.size()), Bytes(send.size() * send.size() / 777), round});
      }
    }
    std::vector<std::unique_ptr<Work>> works;
    for (Use& use : uses) {
      works.push_back(use.comm->all_to_all(use.send, use.recv, {}));
      works.push_back(use.comm->all_gather(use.send, use.all, {}));
    }
    for (const auto& work : works) work->wait();
    for (const auto& work : works) wait_on_host(*work);
    for (const Use& use : uses) {
      EXPECT_EQ(use.recv, all_to_all_expected(*use.comm, 777, use.round));
      Bytes expected;
      for (int from = 0; from < use.comm->size(); ++from) {
        for (int to = 0; to < use.comm->size(); ++to) {
          append(expected, pattern_bytes(from, to, 777, use.round));
        }
      }
      EXPECT_EQ(use.all, expected);
    }
  });
}

WireBytes bytes_of_some_calls(Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const WireBytes before = comm.bytes_sent();
  Bytes send(64 * ranks), recv(send.size()), part(9), all(9 * ranks), data(1000);
  comm.all_to_all(send, recv, {.dtype = DType::kE5m2})->wait();
  comm.all_gather(part, all, {.dtype = DType::kBf16})->wait();
  comm.broadcast(data, comm.size() - 1, {.dtype = DType::kE4m3})->wait();
  float value = 1;
  comm.all_reduce(std::span(&value, 1), ReduceOp::kMax);
  check_gather_control(comm);
  return comm.bytes_sent() - before;
}

TEST_F(NcclTest, CountsBytesAsTheThreadCommunicatorDoes) {
  for (int size = 1; size <= 3; ++size) {
    std::vector<WireBytes> host(static_cast<std::size_t>(size)), device(host.size());
    run_ranks(size, [&](Communicator& comm) {
      host[static_cast<std::size_t>(comm.rank())] = bytes_of_some_calls(comm);
    });
    run_nccl(size, [&](Communicator& comm) {
      HostView view(comm, comm.rank());
      device[static_cast<std::size_t>(comm.rank())] = bytes_of_some_calls(view);
    });
    for (std::size_t r = 0; r < host.size(); ++r) {
      EXPECT_EQ(device[r].payload, host[r].payload);
      EXPECT_EQ(device[r].control, host[r].control);
    }
  }
}

TEST_F(NcclTest, WrongArgumentsDoNoHarm) {
  for (int size = 1; size <= 3; ++size) {
    run_nccl(size, [](Communicator& comm) {
      const auto ranks = static_cast<std::size_t>(comm.size());
      Bytes small(3 * ranks), large(4 * ranks), odd(ranks + 1), odd_too(ranks + 1);
      EXPECT_THROW(comm.all_to_all(small, large, {}), ArgumentError);
      EXPECT_THROW(comm.all_to_all(small, small, {}), ArgumentError);
      if (ranks > 1) {
        EXPECT_THROW(comm.all_to_all(odd, odd_too, {}), ArgumentError);
      }
      EXPECT_THROW(comm.all_gather(small, odd, {}), ArgumentError);
      const std::span<std::byte> whole(large);
      EXPECT_THROW(comm.all_gather(whole.subspan(1, 3), whole.first(3 * ranks), {}), ArgumentError);
      EXPECT_THROW(comm.broadcast(small, comm.size(), {}), ArgumentError);
      EXPECT_THROW(comm.broadcast(small, -1, {}), ArgumentError);
      HostView view(comm, comm.rank());
      check_all_gather(view);
    });
  }
  EXPECT_THROW(make_nccl_communicator(nullptr, 0), ArgumentError);
  EXPECT_THROW(make_nccl_communicator(make_nccl_communicator(make_self_communicator(), 0), 0),
               ArgumentError);
}

TEST_F(NcclTest, IntegerOverflowLeavesItUsable) {
  run_nccl(2, [](Communicator& comm) {
    std::int32_t value = std::numeric_limits<std::int32_t>::max();
    EXPECT_THROW(comm.all_reduce(std::span(&value, 1), ReduceOp::kSum), CommError);
    HostView view(comm, comm.rank());
    check_all_to_all(view);
  });
}

// Closing lets what is queued arrive; nothing is aborted.
TEST_F(NcclTest, ClosedWithWorkOnTheDevice) {
  const int aborted = aborted_comms();
  std::vector<Bytes> sends(3), recvs(3), expected(3);
  run_nccl(3, [&](Communicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    const auto child = comm.split(0, 0);
    sends[r] = all_to_all_send(comm, 4000);
    recvs[r].resize(sends[r].size());
    expected[r] = all_to_all_expected(comm, 4000);
    cudaSetDevice(comm.rank());
    enqueue(nullptr, [] { std::this_thread::sleep_for(milliseconds(60)); });
    child->all_to_all(sends[r], recvs[r], {})->wait();
  });
  EXPECT_EQ(recvs, expected);
  EXPECT_EQ(aborted_comms(), aborted);
}

TEST_F(NcclTest, ChildOutlivesParentAndWorkBoth) {
  auto comms = make_nccl_ranks(2);
  std::vector<std::unique_ptr<Work>> works(2);
  std::vector<Bytes> sends(2, Bytes(2000)), recvs(2, Bytes(2000));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto child = comms[r]->split(0, 0);
      comms[r].reset();
      works[r] = child->all_to_all(sends[r], recvs[r], {});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& work : works) {
    EXPECT_TRUE(work->done());
    work->wait();
  }
}

}  // namespace
}  // namespace zerofp8::test
