// Runs a kernel's PTX on the host, thread by thread, as the PTX ISA says: between barriers and
// shuffles each thread of a block runs by itself, in an order that a seed shuffles. Stricter than a
// GPU: an access outside of the given memory or not aligned to its size, a shuffle that not all
// lanes of its mask reach, and a barrier that some threads never reach are faults.
//
// What it cannot show: what ptxas makes of the PTX, races between blocks, and time.
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <type_traits>

#include "tests/ptx/program.h"

namespace zerofp8::test::ptx {

struct Region {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  // Whether all of `size` bytes at `at` are in it, wherever in 64 bits that is.
  bool contains(std::uintptr_t at, std::size_t size) const {
    return at >= begin && size <= bytes && at - begin <= bytes - size;
  }
};
// The one of `regions`, which are sorted, that has these bytes; else null.
const Region* find(std::span<const Region> regions, std::uintptr_t at, std::size_t size);

struct Launch {
  unsigned grid_x = 1, grid_y = 1, threads = 1;
  void** arguments = nullptr;       // as cudaLaunchKernel takes them
  std::span<const Region> regions;  // device memory, sorted
  unsigned seed = 1;
};

// Returns which of the kernel's instructions were met, by index. Throws Fault.
std::vector<bool> run(const Kernel& kernel, const Launch& launch);

class Block;

class Thread {
 public:
  enum class State { kRunning, kWaiting, kExited };

  template <class T>
  T get(const Instruction& i, int k) const {
    T x;
    std::memcpy(&x, &slots[i.slots[static_cast<std::size_t>(k)]], sizeof x);
    return x;
  }
  template <class T>
  void set(const Instruction& i, int k, T x) {
    std::uint64_t& slot = slots[i.slots[static_cast<std::size_t>(k)]];
    if constexpr (std::is_integral_v<T>) {
      slot = static_cast<std::uint64_t>(std::int64_t{} + x);  // into a wider register: sign and all
    } else {
      slot = 0;
      std::memcpy(&slot, &x, sizeof x);
    }
  }
  // Of the address in operand k, checked.
  std::byte* memory(const Instruction& i, int k, std::size_t bytes) const;

  std::uint64_t* slots = nullptr;
  std::byte* local = nullptr;
  Block* block = nullptr;
  unsigned tid = 0;
  int pc = 0;
  State state = State::kRunning;
};

}  // namespace zerofp8::test::ptx
