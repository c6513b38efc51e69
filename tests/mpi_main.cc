// main() of tests that run under mpirun. Rank 0 prints as usual, other ranks only their failures;
// every process ends with an error if any rank has failed.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "tests/mpi_world.h"
#include "zerofp8/error.h"

namespace zerofp8::test {
namespace {

std::unique_ptr<Communicator> g_world;

class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", g_world->rank(),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.summary());
  }
};

int run_tests() {
  if (g_world->rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  std::int32_t failed = RUN_ALL_TESTS();
  g_world->all_reduce(std::span(&failed, 1), ReduceOp::kMax);
  return failed;
}

// mpirun -n 3 of another MPI library starts three worlds of one rank, and every check would pass.
void expect_ranks(const char* expected) {
  if (expected == nullptr || g_world->size() == std::atoi(expected)) return;
  throw CommError(std::string("this test expects ") + expected + " ranks and has " +
                  std::to_string(g_world->size()));
}

}  // namespace

Communicator& world() { return *g_world; }

}  // namespace zerofp8::test

int main(int argc, char** argv) {
  using zerofp8::test::g_world;
  testing::InitGoogleTest(&argc, argv);
  int result = 1;
  try {
    g_world = zerofp8::make_mpi_communicator();
    g_world->set_timeout(std::chrono::seconds(60));
    zerofp8::test::expect_ranks(std::getenv("ZEROFP8_TEST_RANKS"));
    result = zerofp8::test::run_tests();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi test: %s\n", error.what());
  }
  g_world.reset();
  return result;
}
