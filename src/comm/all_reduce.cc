// Gathers everything and reduces in rank order: size() times the memory and wire bytes of a ring,
// for the same bits on every rank. Meant for scalars and small control data.
#include <fmt/format.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "src/comm/p2p_communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    T sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) {
      // All ranks see the same numbers, so all of them throw.
      throw CommError(
          fmt::format("all_reduce: the sum {} + {} does not fit into {} bits; use a wider "
                      "type",
                      a, b, 8 * sizeof(T)));
    }
    return sum;
  } else {
    return a + b;
  }
}

template <class T>
T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    // A NaN on any rank is the result on all; plain comparisons would drop it or not by its rank.
    if (std::isnan(a)) return a;
    if (std::isnan(b)) return b;
  }
  return a < b ? b : a;
}

}  // namespace

template <class T>
void P2pCommunicator::reduce_in_rank_order(std::span<T> data, ReduceOp op) {
  if (size() == 1) return;
  std::vector<T> all(data.size() * static_cast<std::size_t>(size()));
  ExchangePlan plan = gather_plan(Collective::kAllReduce, std::as_bytes(data),
                                  std::as_writable_bytes(std::span(all)),
                                  {.label = op == ReduceOp::kSum ? "sum" : "max"});
  plan.control = true;
  start(std::move(plan))->wait();
  for (std::size_t i = 0; i < data.size(); ++i) {
    T result = all[i];
    for (std::size_t r = 1; r < static_cast<std::size_t>(size()); ++r) {
      const T next = all[r * data.size() + i];
      result = op == ReduceOp::kSum ? add(result, next) : larger(result, next);
    }
    data[i] = result;
  }
}

void P2pCommunicator::all_reduce(std::span<float> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}
void P2pCommunicator::all_reduce(std::span<double> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}
void P2pCommunicator::all_reduce(std::span<std::int32_t> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}
void P2pCommunicator::all_reduce(std::span<std::int64_t> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}

}  // namespace zerofp8
