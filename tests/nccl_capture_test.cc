// Collectives that are captured into a CUDA graph, and their replays.
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <thread>

#include "tests/comm_checks.h"
#include "tests/nccl_ranks.h"

namespace zerofp8::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kTimeout{300};

struct Buffers {
  Bytes &send, &recv;
};
using NcclCapture = NcclTest;

// Nothing is asked about what is captured, which has not run; the data comes with the replay.
TEST_F(NcclCapture, CapturedCollectivesAreLeftAlone) {
  run_nccl(2, [&](Communicator& comm) {
    const Buffers buffers{keep(16), keep(16)};
    std::fill(buffers.send.begin(), buffers.send.end(), static_cast<std::byte>(comm.rank() + 1));
    CallersStream stream(comm.rank());
    const std::unique_ptr<Work> before =
        comm.all_to_all(buffers.send, buffers.recv, {.stream = stream.get()});
    comm.barrier(seconds(10));
    set_capturing(comm.rank(), true);
    const std::unique_ptr<Work> work =
        comm.all_to_all(buffers.send, buffers.recv, {.stream = stream.get()});
    EXPECT_TRUE(work->done());
    work->wait();
    std::this_thread::sleep_for(milliseconds(60));  // the watchdog looks
    set_capturing(comm.rank(), false);
    comm.watch(stream.get());
    synchronize(stream.get());
    EXPECT_EQ(buffers.recv.front(), std::byte{1});
    EXPECT_EQ(buffers.recv.back(), std::byte{2});
    EXPECT_EQ(comm.failure(), "");
    comm.barrier(seconds(10));
  });
}

// Asked for within a capture, watching would ask about an event that is captured.
TEST_F(NcclCapture, WatchingWithinACaptureDoesNothing) {
  run_nccl(2, [&](Communicator& comm) {
    const Buffers buffers{keep(16), keep(16)};
    CallersStream stream(comm.rank());
    set_capturing(comm.rank(), true);
    comm.all_to_all(buffers.send, buffers.recv, {.stream = stream.get()})->wait();
    comm.watch(stream.get());
    std::this_thread::sleep_for(milliseconds(60));
    set_capturing(comm.rank(), false);
    synchronize(stream.get());
    EXPECT_EQ(comm.failure(), "");
    comm.barrier(seconds(10));
  });
}

// A rank that does not replay: found out by watch(), which ends the kernels that wait for it.
TEST_F(NcclCapture, ReplaysAreWatched) {
  std::latch ended(1);
  run_nccl(2, [&](Communicator& comm) {
    comm.set_timeout(kTimeout);
    if (comm.rank() == 1) return ended.wait();
    const Buffers buffers{keep(16), keep(16)};
    CallersStream stream(0);
    set_capturing(0, true);
    comm.all_to_all(buffers.send, buffers.recv, {.stream = stream.get()})->wait();
    set_capturing(0, false);
    std::this_thread::sleep_for(2 * kTimeout);
    EXPECT_EQ(comm.failure(), "");  // nobody has looked
    comm.watch(stream.get());
    synchronize(stream.get());
    for (int i = 0; i < 1000 && comm.failure().empty(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    expect_contains(comm.failure(), "replays of captured collectives");
    expect_contains(comm.failure(), "nothing has come from rank 1");
    ended.count_down();
  });
}

}  // namespace
}  // namespace zerofp8::test
