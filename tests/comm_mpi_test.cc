// The collectives over MPI: the checks that thread ranks pass, and what only separate processes can
// show. Run as `mpirun -n 2` and `-n 3`.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "src/comm/mpi_transport.h"
#include "tests/comm_checks.h"
#include "tests/mpi_world.h"
#include "zerofp8/launch.h"

namespace zerofp8::test {
namespace {

class MpiRanks : public testing::TestWithParam<NamedCheck> {};

TEST_P(MpiRanks, Check) { GetParam().run(world()); }

TEST_P(MpiRanks, CheckInTinyChunks) {
  for (const std::size_t chunk_bytes : {std::size_t{61}, std::size_t{4097}}) {
    const auto comm = make_mpi_communicator(chunk_bytes);
    GetParam().run(*comm);
  }
}

INSTANTIATE_TEST_SUITE_P(All, MpiRanks, testing::ValuesIn(kCommChecks),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Mpi, Backend) {
  EXPECT_TRUE(built_with_mpi());
  EXPECT_EQ(world().backend(), "mpi");
}

// Large enough for MPI's rendezvous protocols.
TEST(Mpi, LargeMessages) {
  const Bytes send = all_to_all_send(world(), 3'000'001);
  Bytes recv(send.size());
  world().all_to_all(send, recv, {.label = "large"})->wait();
  EXPECT_EQ(recv, all_to_all_expected(world(), 3'000'001));
}

// Counts beyond an int, which MPI calls take. 4 GiB of memory, so only where asked for.
TEST(Mpi, BeyondTwoGiB) {
  if (std::getenv("ZEROFP8_SLOW") == nullptr) GTEST_SKIP() << "set ZEROFP8_SLOW=1";
  const auto pair = world().split(world().rank() / 2, 0);
  if (pair->size() != 2) return;
  constexpr std::size_t kBytes = (std::size_t{1} << 31) + 8;
  const std::size_t probes[] = {0, (std::size_t{1} << 30) - 1, std::size_t{1} << 30,
                                (std::size_t{1} << 31) - 1, kBytes - 1};
  Bytes data(kBytes);
  if (pair->rank() == 0) {
    for (const std::size_t i : probes) data[i] = pattern(1, 2, i);
  }
  pair->broadcast(data, 0, {.dtype = DType::kE4m3, .label = "large"})->wait();
  for (const std::size_t i : probes) EXPECT_EQ(data[i], pattern(1, 2, i)) << i;
  EXPECT_EQ(pair->bytes_sent().of(DType::kE4m3), pair->rank() == 0 ? kBytes : 0u);
}

// The last rank stays away: the others' errors name it. Coming late, it gets the same story.
TEST(Mpi, TimeoutNamesTheAbsentRank) {
  const int last = world().size() - 1;
  const auto comm = world().split(0, 0);
  if (world().rank() == last) std::this_thread::sleep_for(std::chrono::seconds(1));
  try {
    comm->barrier(std::chrono::milliseconds(300));
    ADD_FAILURE() << "the barrier passed without rank " << last;
  } catch (const CommError& error) {
    EXPECT_EQ(error.absent_ranks(), std::vector<int>{last});
    expect_contains(error.what(), "nothing has come from rank " + std::to_string(last));
  }
  world().barrier(std::chrono::seconds(30));
  EXPECT_THROW(comm->barrier(std::chrono::seconds(30)), CommError);
}

TEST(Mpi, MismatchIsAnErrorOnBothSides) {
  const auto comm = world().split(0, 0);
  const auto ranks = static_cast<std::size_t>(comm->size());
  Bytes send((comm->rank() == 0 ? 8 : 12) * ranks), recv(send.size());
  const std::string text =
      message_of([&] { comm->all_to_all(send, recv, {.label = "grads"})->wait(); });
  expect_contains(text, "ranks disagree");
  expect_contains(text, "sending 8 bytes and expecting 8");
  expect_contains(text, "sending 12 bytes and expecting 12");
  world().barrier(std::chrono::seconds(30));
}

TEST(Mpi, ClosedCommunicatorIsNamed) {
  auto comm = world().split(0, 0);
  if (world().rank() == 0) {
    comm.reset();
  } else {
    const std::string text = message_of([&] { comm->barrier(std::chrono::seconds(30)); });
    expect_contains(text, "rank 0");
    expect_contains(text, "closed its communicator");
  }
  world().barrier(std::chrono::seconds(30));
}

// Freed MPI communicators give their numbers to the next: nothing may leak from one into the other.
TEST(Mpi, ManyRootsOneAfterTheOther) {
  for (int i = 0; i < 20; ++i) {
    const auto comm = make_mpi_communicator();
    check_gather_control(*comm);
  }
}

TEST(Mpi, LaunchVariablesAgree) {
  const LaunchEnv env = detect_launch_env();
  EXPECT_EQ(env.rank, world().rank());
  EXPECT_EQ(env.size, world().size());
  EXPECT_EQ(env.source, "Open MPI");
  EXPECT_EQ(env.local_rank, world().rank());
  EXPECT_EQ(local_rank_by_host(world()), world().rank());
  const auto comm = make_communicator(env);
  EXPECT_EQ(comm->backend(), "mpi");
  LaunchEnv wrong = env;
  wrong.rank = (env.rank + 1) % env.size;
  expect_contains(message_of([&] { make_communicator(wrong); }), "MPI says rank");
}

}  // namespace
}  // namespace zerofp8::test
