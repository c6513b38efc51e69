// Splits whole blocks over the threads of one rank. Blocks are independent, so the number of
// threads never changes bits. OpenMP, so that a program that already uses it has one pool of
// threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace zerofp8 {

// Runs f(begin, length) -> bits of a maximum over [0, n) and returns the maximum of them all.
template <class F>
std::uint32_t parallel_blocks(std::int64_t n, int block, int threads, F f) {
  constexpr std::int64_t kWorthAThread = 1 << 15;  // elements
  const std::int64_t wanted = std::min<std::int64_t>(threads, n / kWorthAThread);
  if (wanted <= 1) return n > 0 ? f(std::int64_t{0}, n) : 0u;
#if defined(_OPENMP)
  const std::int64_t blocks = (n + block - 1) / block;
  const std::int64_t piece = (blocks + wanted - 1) / wanted * block;
  std::uint32_t result = 0;
#pragma omp parallel for num_threads(static_cast <int>(wanted)) reduction(max : result)
  for (std::int64_t t = 0; t < wanted; ++t) {
    const std::int64_t begin = t * piece;
    if (begin < n) result = std::max(result, f(begin, std::min(piece, n - begin)));
  }
  return result;
#else
  static_cast<void>(block);
  return f(std::int64_t{0}, n);
#endif
}

}  // namespace zerofp8
