#include <gtest/gtest.h>

#include "tests/thread_ranks.h"
namespace zerofp8 {
TEST(Smoke, Reduce) {
  test::run_ranks(4, [](Communicator& comm) {
    std::vector<double> x{1.0 * comm.rank()};
    comm.all_reduce(std::span<double>(x), ReduceOp::kSum);
    EXPECT_EQ(x[0], 6);
  });
}
}  // namespace zerofp8
