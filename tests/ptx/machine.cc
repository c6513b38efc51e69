#include "tests/ptx/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "kernels/ieee_mode.h"

namespace zerofp8::test::ptx {

constexpr unsigned kWarp = 32;

namespace {

// Registers of the kernels that this host thread runs, one after the other: asking the system for
// them each time would take most of the time. As on a GPU, they hold at first what was left there.
std::uint64_t* register_file(std::size_t slots) {
  thread_local std::size_t size = 0;
  thread_local std::unique_ptr<std::uint64_t[]> file;
  if (slots > size) file.reset(new std::uint64_t[size = slots]);
  return file.get();
}

}  // namespace

class Block {
 public:
  Block(const Kernel& kernel, const Launch& launch)
      : kernel_(kernel),
        launch_(launch),
        width_(kernel.constants.size() + static_cast<std::size_t>(kernel.registers)),
        slots_(register_file(width_ * launch.threads)),
        parameters_(new std::uint64_t[kernel.parameter_bytes / 8 + 1]),
        shared_((kernel.shared_bytes + 15) / 8),
        local_(kernel.local_bytes / 8 * launch.threads + 2),
        threads_(launch.threads),
        met_(kernel.code.size()),
        random_(launch.seed) {
    for (std::size_t k = 0; k < kernel.parameters.size(); ++k) {
      const auto& [offset, bytes] = kernel.parameters[k];
      std::memcpy(reinterpret_cast<std::byte*>(parameters_.get()) + offset, launch.arguments[k],
                  bytes);
    }
  }

  const std::vector<bool>& met() const { return met_; }
  void run(unsigned x, unsigned y) {
    start(x, y);
    std::vector<unsigned> warps((launch_.threads + kWarp - 1) / kWarp);
    for (unsigned w = 0; w < warps.size(); ++w) warps[w] = w;
    for (bool left = true; left;) {
      std::shuffle(warps.begin(), warps.end(), random_);
      for (const unsigned w : warps) run_warp(w);
      left = pass_barrier();
    }
  }

  std::byte* memory(const Thread& t, const Instruction& i, std::uint64_t address,
                    std::size_t bytes) {
    const std::uint64_t at = address + static_cast<std::uint64_t>(i.offset);
    if (at % bytes != 0) fail(i, t, fmt::format("address {:#x} is not aligned to {}", at, bytes));
    if (i.space == Space::kShared) {
      const Region shared{0, kernel_.shared_bytes};
      if (!shared.contains(at, bytes)) fail(i, t, "outside of shared memory");
      return reinterpret_cast<std::byte*>(shared_.data()) + at;
    }
    const bool any = i.space == Space::kGeneric;
    const auto within = [&](const void* begin, std::size_t size) {
      return Region{reinterpret_cast<std::uintptr_t>(begin), size}.contains(at, bytes);
    };
    const bool fine =
        ((any || i.space == Space::kParam) && within(parameters_.get(), kernel_.parameter_bytes)) ||
        ((any || i.space == Space::kLocal) && within(t.local, kernel_.local_bytes)) ||
        ((any || i.space == Space::kGlobal) && is_global(at, bytes));
    if (!fine) fail(i, t, fmt::format("{} bytes at {:#x} are not the kernel's", bytes, at));
    return reinterpret_cast<std::byte*>(at);
  }

  [[noreturn]] void fail(const Instruction& i, const Thread& t, const std::string& what) const {
    throw Fault(fmt::format("kernel {}, block {},{}, thread {}: {}; PTX, line {}: {}", kernel_.name,
                            x_, y_, t.tid, what, i.line, i.text));
  }

 private:
  void start(unsigned x, unsigned y) {
    x_ = x, y_ = y;
    std::ranges::fill(shared_, 0xA5A5A5A5A5A5A5A5u);
    for (unsigned tid = 0; tid < launch_.threads; ++tid) {
      Thread& t = threads_[tid];
      t = {};
      t.slots = slots_ + width_ * tid;
      t.local = reinterpret_cast<std::byte*>(local_.data() + kernel_.local_bytes / 8 * tid);
      t.block = this;
      t.tid = tid;
      for (std::size_t k = 0; k < kernel_.constants.size(); ++k) {
        t.slots[k] = value_of(kernel_.constants[k], t);
      }
    }
  }

  std::uint64_t value_of(const Constant& c, const Thread& t) const {
    using Kind = Constant::Kind;
    switch (c.kind) {
      case Kind::kLiteral:
      case Kind::kShared:
        return c.value;
      case Kind::kParam:
        return reinterpret_cast<std::uintptr_t>(parameters_.get()) + c.value;
      case Kind::kLocal:
        return reinterpret_cast<std::uintptr_t>(t.local) + c.value;
      case Kind::kTid:
        return t.tid;
      case Kind::kNtid:
        return launch_.threads;
      case Kind::kCtaidX:
        return x_;
      case Kind::kCtaidY:
        return y_;
      case Kind::kNctaidX:
        return launch_.grid_x;
    }
    return 0;
  }

  bool is_global(std::uint64_t at, std::size_t bytes) {
    if (last_.contains(at, bytes)) return true;
    const Region* found = find(launch_.regions, at, bytes);
    if (found != nullptr) last_ = *found;
    return found != nullptr;
  }

  void run_thread(Thread& t) {
    while (t.state == Thread::State::kRunning) {
      const auto at = static_cast<std::size_t>(t.pc++);
      const Instruction& i = kernel_.code[at];
      met_[at] = true;
      if (i.guard >= 0 && (t.slots[i.guard] != 0) == i.negated) continue;
      i.run(t, i);
    }
  }

  std::vector<Thread*> waiting(unsigned warp) {
    std::vector<Thread*> list;
    const unsigned end = std::min((warp + 1) * kWarp, launch_.threads);
    for (unsigned tid = warp * kWarp; tid < end; ++tid) {
      if (threads_[tid].state == Thread::State::kWaiting) list.push_back(&threads_[tid]);
    }
    return list;
  }
  const Instruction& at(const Thread& t) const {
    return kernel_.code[static_cast<std::size_t>(t.pc - 1)];
  }

  // Until all of its threads have ended or wait at a barrier of the block.
  void run_warp(unsigned warp) {
    std::vector<unsigned> order(std::min(kWarp, launch_.threads - warp * kWarp));
    for (unsigned k = 0; k < order.size(); ++k) order[k] = warp * kWarp + k;
    for (;;) {
      std::shuffle(order.begin(), order.end(), random_);
      for (const unsigned tid : order) run_thread(threads_[tid]);
      const std::vector<Thread*> lanes = waiting(warp);
      const auto together = std::ranges::find_if(
          lanes, [&](const Thread* t) { return at(*t).meeting != Meeting::kBarrier; });
      if (together == lanes.end()) return;
      const Instruction& i = at(**together);
      for (const Thread* t : lanes) {
        if (&at(*t) != &i) fail(i, *t, "not all lanes are here; this one is at " + at(*t).text);
      }
      run_together(i, lanes);
    }
  }

  // Shuffles and reductions of whole warps: each lane's operands before any lane's result.
  void run_together(const Instruction& i, const std::vector<Thread*>& lanes) {
    const bool reduces = i.meeting == Meeting::kReduceMax;
    std::uint32_t present = 0, largest = 0;
    std::array<std::uint32_t, kWarp> given{};
    for (const Thread* t : lanes) {
      present |= 1u << t->tid % kWarp;
      given[t->tid % kWarp] = t->get<std::uint32_t>(i, reduces ? 1 : 2);
      largest = std::max(largest, given[t->tid % kWarp]);
    }
    for (Thread* t : lanes) {
      const auto mask = t->get<std::uint32_t>(i, reduces ? 2 : 5);
      if ((mask & present) != present) fail(i, *t, "lanes outside of the mask");
      t->state = Thread::State::kRunning;
      if (reduces) {
        t->set(i, 0, largest);
        continue;
      }
      // PTX ISA, "shfl.sync"
      const auto lane = t->tid % kWarp;
      const auto b = t->get<std::uint32_t>(i, 3) & 31, c = t->get<std::uint32_t>(i, 4);
      const std::uint32_t clamp = c & 31, segment = c >> 8 & 31;
      const std::uint32_t last = (lane & segment) | (clamp & ~segment);
      std::uint32_t source = i.meeting == Meeting::kShuffleDown ? lane + b : lane ^ b;
      const bool valid = source <= last;
      if (!valid) source = lane;
      if ((present >> source & 1) == 0) fail(i, *t, "the lane that is asked has ended");
      t->set(i, 0, given[source]);
      t->set(i, 1, static_cast<std::uint64_t>(valid));
    }
  }

  // Whether there is anything left to run. Threads that have ended do not count.
  bool pass_barrier() {
    std::vector<Thread*> all;
    for (Thread& t : threads_) {
      if (t.state == Thread::State::kExited) continue;
      all.push_back(&t);
      if (&at(t) != &at(*all.front())) fail(at(t), t, "not all threads are at one barrier");
    }
    for (Thread* t : all) t->state = Thread::State::kRunning;
    return !all.empty();
  }

  const Kernel& kernel_;
  const Launch& launch_;
  const std::size_t width_;
  std::uint64_t* const slots_;
  const std::unique_ptr<std::uint64_t[]> parameters_;
  std::vector<std::uint64_t> shared_, local_;
  std::vector<Thread> threads_;
  std::vector<bool> met_;
  std::minstd_rand random_;
  unsigned x_ = 0, y_ = 0;
  Region last_{};
};

std::byte* Thread::memory(const Instruction& i, int k, std::size_t bytes) const {
  return block->memory(
      *this, i, i.space == Space::kShared ? get<std::uint32_t>(i, k) : get<std::uint64_t>(i, k),
      bytes);
}

const Region* find(std::span<const Region> regions, std::uintptr_t at, std::size_t size) {
  const auto next = std::ranges::upper_bound(regions, at, {}, &Region::begin);
  if (next == regions.begin() || !std::prev(next)->contains(at, size)) return nullptr;
  return &*std::prev(next);
}

std::vector<bool> run(const Kernel& kernel, const Launch& launch) {
  if (launch.threads > kernel.max_threads) {
    throw Fault(fmt::format("kernel {}: {} threads, {} at most", kernel.name, launch.threads,
                            kernel.max_threads));
  }
  [[maybe_unused]] const IeeeMode mode;  // a GPU does not know the calling thread's
  Block block(kernel, launch);
  for (unsigned y = 0; y < launch.grid_y; ++y) {
    for (unsigned x = 0; x < launch.grid_x; ++x) block.run(x, y);
  }
  return block.met();
}

}  // namespace zerofp8::test::ptx
