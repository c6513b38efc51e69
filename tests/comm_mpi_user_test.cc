// zerofp8 in a program that uses MPI itself: the program starts and ends MPI and its own messages,
// on MPI_COMM_WORLD and at the same time, never meet ours. "--single" starts MPI without threads,
// which must be explained. Not a GoogleTest: MPI starts once in a process.
#include <mpi.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "tests/comm_checks.h"
#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8::test {
namespace {

int fail(const std::string& why) {
  std::fprintf(stderr, "comm_mpi_user_test: %s\n", why.c_str());
  return 1;
}

// The program's own traffic: tags and sizes like those of zerofp8.
bool own_messages_arrive(int rank, int size) {
  bool right = true;
  for (int i = 0; i < 500; ++i) {
    int out = rank * 1000 + i, in = -1, sum = 0;
    MPI_Sendrecv(&out, 1, MPI_INT, (rank + 1) % size, i % 4, &in, 1, MPI_INT,
                 (rank + size - 1) % size, i % 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    right = right && in == (rank + size - 1) % size * 1000 + i;
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    right = right && sum == size * (size - 1) / 2;
  }
  return right;
}

int run_with_threads() {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  bool right = false;
  {
    const auto comm = make_mpi_communicator();
    std::thread own([&] { right = own_messages_arrive(rank, size); });
    for (int i = 0; i < 3; ++i) {
      check_all_to_all(*comm);
      check_many_in_flight(*comm);
    }
    own.join();
  }
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return fail("zerofp8 ended an MPI that it had not started");
  if (!own_messages_arrive(rank, size)) return fail("MPI does not work after zerofp8 has gone");
  return right ? 0 : fail("the program's own messages were disturbed");
}

int run_without_threads() {
  const std::string text = message_of([] { make_mpi_communicator(); });
  if (text.find("MPI_THREAD_MULTIPLE") != std::string::npos) return 0;
  return fail("expected an error that names MPI_THREAD_MULTIPLE, got: " + text);
}

}  // namespace
}  // namespace zerofp8::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const bool single = argc > 1 && std::strcmp(argv[1], "--single") == 0;
  int level = 0;
  MPI_Init_thread(&argc, &argv, single ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE, &level);
  // Open MPI may give more than was asked for.
  const bool threads = level >= MPI_THREAD_MULTIPLE;
  const int result =
      threads ? zerofp8::test::run_with_threads() : zerofp8::test::run_without_threads();
  MPI_Finalize();
  return result != 0 || testing::Test::HasFailure() ? 1 : 0;
}
