// How control numbers of several ranks become one: in rank order, so that every rank has the same
// bits. Used by every communicator that gathers before it reduces.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    T sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) {
      // All ranks see the same numbers, so all of them throw.
      throw CommError(
          fmt::format("all_reduce: the sum {} + {} does not fit into {} bits; use a wider type", a,
                      b, 8 * sizeof(T)));
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

// Of values[0], values[stride], ... values[(ranks - 1) * stride].
template <class T>
T reduce_strided(const T* values, std::size_t stride, int ranks, ReduceOp op) {
  T result = values[0];
  for (std::size_t r = 1; r < static_cast<std::size_t>(ranks); ++r) {
    const T next = values[r * stride];
    result = op == ReduceOp::kSum ? add(result, next) : larger(result, next);
  }
  return result;
}

}  // namespace zerofp8
