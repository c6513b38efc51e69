#include "tests/emulated_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>

#include "kernels/ieee_mode.h"
#include "kernels/lane_programs.h"

namespace zerofp8::test {
namespace {

using namespace zerofp8::lane;  // NOLINT: this file is its driver on the host

constexpr int kWarp = 32;

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

class EmulatedAllocator final : public Allocator {
 public:
  explicit EmulatedAllocator(bool protect) : protect_(protect) {}
  void open() { set_protection(PROT_READ | PROT_WRITE); }
  void close() { set_protection(PROT_NONE); }

 protected:
  void* do_allocate(std::size_t bytes) override {
    const std::size_t size = whole_pages(bytes);
    if (!protect_) return std::calloc(1, size);
    void* data = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    regions_[data] = size;
    return data;
  }
  void do_release(void* data, std::size_t bytes) noexcept override {
    if (!protect_) return std::free(data);
    munmap(data, whole_pages(bytes));
    regions_.erase(data);
  }

 private:
  void set_protection(int how) {
    for (const auto& [data, size] : regions_) mprotect(data, size, how);
  }
  bool protect_;
  std::map<void*, std::size_t> regions_;
};

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(const EmulationOptions& options)
      : options_(options), allocator_(options.protect) {}
  std::string name() const override {
    return options_.backwards ? "emulated_backwards" : "emulated";
  }
  Allocator& allocator() override { return allocator_; }

  void zero(void* data, std::size_t bytes) override {
    const Open open(*this);
    if (bytes != 0) std::memset(data, 0, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    const Open open(*this);
    if (bytes != 0) std::memmove(to, from, bytes);
  }
  void upload(void* to, const void* host, std::size_t bytes) override { copy(to, host, bytes); }
  void download(void* host, const void* from, std::size_t bytes) override {
    copy(host, from, bytes);
  }
  void synchronize() override {}

  void recode(const RecodeArgs& a) override { run<RecodeProgram>(a); }
  void accumulate(const AccumulateArgs& a) override {
    a.residual ? run<AccumulateProgram<true>>(a) : run<AccumulateProgram<false>>(a);
  }
  void decode_sum(const DecodeSumArgs& a) override { run<DecodeSumProgram>(a); }
  void adam(const AdamLaunch& a) override {
    with_formats(a.args, [&]<class Formats>(Formats) { run<AdamProgram<Formats>>(a); });
  }
  void split_master(const MasterArgs& a) override { run<SplitMasterProgram>(a); }
  void join_master(const MasterArgs& a) override { run<JoinMasterProgram>(a); }

  void sum_squares(const SquaresArgs& a) override {
    const Open open(*this);
    const LaunchShape shape = launch_shape(a.elements, a.block, kElements, options_.max_grid);
    for_each_warp(shape, [&](std::int64_t warp) {
      for (int half_warp = 0; half_warp < kWarp; half_warp += kElements) {
        if (warp + half_warp >= shape.lanes) continue;
        Column columns[kElements];
        std::uint32_t amax = 0;
        for (int c = 0; c < kElements; ++c) {
          columns[c] = column_squares(a, (warp + half_warp) / kElements, c);
          amax = std::max(amax, columns[c].amax);
        }
        for (int half = kElements / 2; half > 0; half /= 2) {
          for (int c = 0; c < half; ++c) columns[c].sum += columns[c + half].sum;
        }
        report(a.amax, amax);
        if (not_finite(amax)) continue;
        const ExactTerm term = exact_term(columns[0].sum);
        if (term.limb == ExactLimbs::kLimbs) ++a.limbs[ExactLimbs::kLimbs];
        if (term.limb < 0 || term.limb == ExactLimbs::kLimbs) continue;
        for (int i = 0; i < 3; ++i) a.limbs[term.limb + i] += term.words[i];
      }
    });
  }

 private:
  // Within it the memory can be reached.
  class Open {
   public:
    explicit Open(EmulatedDevice& device) : device_(device) { device.allocator_.open(); }
    ~Open() { device_.allocator_.close(); }

   private:
    EmulatedDevice& device_;
    IeeeMode mode_;
  };

  static void report(std::uint32_t* amax, std::uint32_t mine) {
    if (amax != nullptr) *amax = std::max(*amax, mine);
  }

  template <class F>
  void for_each_warp(const LaunchShape& shape, F f) {
    for (unsigned thread_block = 0; thread_block < shape.grid; ++thread_block) {
      for (unsigned thread = 0; thread < unsigned{kThreads}; thread += kWarp) {
        for (std::int64_t warp = first_lane(thread_block, thread); warp < shape.lanes;
             warp += lane_stride(shape.grid)) {
          f(warp);
        }
      }
    }
  }

  template <class Program>
  void run(const typename Program::Args& args) {
    const Open open(*this);
    const int block = block_of(args);
    const int width = block / kElements;
    const LaunchShape shape = launch_shape(elements_of(args), block, width, options_.max_grid);
    for_each_warp(shape, [&](std::int64_t warp) {
      Program programs[kWarp];
      const auto lanes = static_cast<int>(std::min<std::int64_t>(kWarp, shape.lanes - warp));
      const auto each_lane = [&](auto f) {
        for (int i = 0; i < lanes; ++i) {
          const int lane = options_.backwards ? lanes - 1 - i : i;
          f(programs[lane], lane, position(warp + lane, block));
        }
      };
      each_lane([&](Program& p, int, const Position& at) {
        p.load(args, at);
        report(args.amax, p.amax);
      });
      for (int round = 0; round < Program::kRounds; ++round) {
        Maxima maxima[kWarp] = {};
        each_lane([&](Program& p, int lane, const Position&) {
          const Maxima m = p.maxima(round);
          Maxima& block_maxima = maxima[lane / width];
          block_maxima.first = std::max(block_maxima.first, m.first);
          block_maxima.second = std::max(block_maxima.second, m.second);
        });
        each_lane([&](Program& p, int lane, const Position& at) {
          p.store(args, at, round, maxima[lane / width]);
        });
      }
    });
  }

  EmulationOptions options_;
  EmulatedAllocator allocator_;
};

}  // namespace

std::unique_ptr<Device> make_emulated_device(const EmulationOptions& options) {
  return std::make_unique<EmulatedDevice>(options);
}

std::vector<std::unique_ptr<Device>> make_devices_under_test(bool protect) {
  std::vector<std::unique_ptr<Device>> list;
  list.push_back(make_emulated_device({.protect = protect}));
  list.push_back(make_emulated_device({.max_grid = 1000, .backwards = true, .protect = protect}));
  if (why_no_cuda().empty()) list.push_back(make_cuda_device());
  return list;
}

}  // namespace zerofp8::test
