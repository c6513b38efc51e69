#include "tests/emulated_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>

#include "kernels/ieee_mode.h"
#include "kernels/lane_programs.h"
#include "kernels/step_element.h"
#include "zerofp8/error.h"

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
  explicit EmulatedAllocator(const EmulationOptions& options) : options_(options) {}
  void open() { set_protection(PROT_READ | PROT_WRITE); }
  void close() { set_protection(PROT_NONE); }
  // Of the one allocation that holds the address, if there is one.
  void open(const void* data) { set_protection_of(data, PROT_READ | PROT_WRITE); }
  void close(const void* data) { set_protection_of(data, PROT_NONE); }
  bool holds(const void* data) const { return find(data) != regions_.end(); }
  std::size_t free() const { return options_.capacity - used_; }

 protected:
  void* do_allocate(std::size_t bytes) override {
    const std::size_t size = whole_pages(bytes);
    if (size > free()) {
      throw DeviceError("emulated: " + std::to_string(bytes) + " bytes asked for, " +
                        std::to_string(free()) + " are free");
    }
    void* data = options_.protect
                     ? mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                     : std::calloc(1, size);
    if (data == MAP_FAILED) throw std::bad_alloc();
    regions_[data] = size;
    used_ += size;
    return data;
  }
  void do_release(void* data, std::size_t bytes) noexcept override {
    regions_.erase(data);
    used_ -= whole_pages(bytes);
    options_.protect ? static_cast<void>(munmap(data, whole_pages(bytes))) : std::free(data);
  }

 private:
  using Regions = std::map<const void*, std::size_t>;

  Regions::const_iterator find(const void* data) const {
    auto at = regions_.upper_bound(data);
    if (at == regions_.begin()) return regions_.end();
    --at;
    const auto* begin = static_cast<const std::byte*>(at->first);
    return static_cast<const std::byte*>(data) < begin + at->second ? at : regions_.end();
  }
  void set_protection(int how) {
    if (!options_.protect) return;
    for (const auto& [data, size] : regions_) mprotect(const_cast<void*>(data), size, how);
  }
  void set_protection_of(const void* data, int how) {
    const auto at = find(data);
    if (!options_.protect || at == regions_.end()) return;
    mprotect(const_cast<void*>(at->first), at->second, how);
  }

  EmulationOptions options_;
  Regions regions_;
  std::size_t used_ = 0;
};

class EmulatedDevice final : public Device {
 public:
  explicit EmulatedDevice(const EmulationOptions& options)
      : options_(options), allocator_(options) {}
  std::string name() const override {
    return options_.backwards ? "emulated_backwards" : "emulated";
  }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return host_; }
  bool is_host() const override { return false; }
  void* stream() const override { return nullptr; }
  bool is_capturing() const override { return false; }
  std::optional<std::size_t> free_bytes() const override { return allocator_.free(); }
  std::string fault_of(const void* data) const override {
    return allocator_.holds(data) ? "" : "is in host memory";
  }

  void zero(void* data, std::size_t bytes) override {
    if (bytes == 0) return;
    allocator_.open(data);
    std::memset(data, 0, bytes);
    allocator_.close(data);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    allocator_.open(to);
    allocator_.open(from);
    std::memmove(to, from, bytes);
    allocator_.close(from);
    allocator_.close(to);
  }
  void copy_many(std::span<const Copy> copies) override {
    const Open open(*this);
    while (!copies.empty()) {
      std::int64_t most = 0;
      const CopyBatch batch = next_batch(copies, most);
      const LaunchShape shape = launch_shape(most, 16, 1, options_.max_grid);
      for (int y = 0; y < batch.count; ++y) {
        const Copy& copy = batch.copies[y];
        for (unsigned x = 0; x < shape.grid * kThreads; ++x) {
          for (std::int64_t lane = x; lane < (copy.bytes + 15) / 16;
               lane += lane_stride(shape.grid)) {
            copy_lane(copy, lane);
          }
        }
      }
    }
  }
  void upload(void* to, const void* host, std::size_t bytes) override { copy(to, host, bytes); }
  void download(void* host, const void* from, std::size_t bytes) override {
    copy(host, from, bytes);
  }
  void synchronize() override {}

  void recode(const RecodeArgs& a) override { run<RecodeProgram>(a); }
  void accumulate(const AccumulateArgs& a) override {
    with_accumulate(a, [&]<class Program>(Program) { run<Program>(a); });
  }
  void decode_sum(const DecodeSumArgs& a) override { run<DecodeSumProgram>(a); }
  void adam(const AdamLaunch& a) override {
    with_formats(a.args, [&]<class Formats>(Formats) { run<AdamProgram<Formats>>(a); });
  }
  void split_master(const MasterArgs& a) override { run<SplitMasterProgram>(a); }
  void join_master(const MasterArgs& a) override { run<JoinMasterProgram>(a); }
  void follow_weights(const FollowArgs& a) override { run<FollowProgram>(a); }

  void make_part(const MakePartArgs& a) override {
    const Open open(*this);
    std::uint64_t worst = kNoneBad;
    for (int thread = 0; thread < kStepThreads; ++thread) {
      worst = std::min(worst, worst_of(a, thread, kStepThreads));
    }
    element::make_part(a, worst);
  }
  void combine_parts(const CombinePartsArgs& a) override {
    const Open open(*this);
    element::combine_parts(a);
  }
  void decide(const DecideArgs& a) override {
    const Open open(*this);
    const auto threads =
        static_cast<std::int32_t>(decide_grid(a.parameters, options_.max_grid)) * kStepThreads;
    for (std::int32_t i = 0; i < threads; ++i) {
      element::decide(a, options_.backwards ? threads - 1 - i : i, threads);
    }
  }

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
        add_exactly(a.limbs, columns[0].sum);
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
    if (is_idle(args)) return;
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
        if constexpr (requires { args.amax; }) report(args.amax, p.amax);
      });
      for (int round = 0; round < Program::kRounds; ++round) {
        Maxima maxima[kWarp] = {};
        each_lane([&](Program& p, int lane, const Position&) {
          if constexpr (!Program::kShares) return;
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
  CpuAllocator host_;
};

}  // namespace

std::unique_ptr<Device> make_emulated_device(const EmulationOptions& options) {
  return std::make_unique<EmulatedDevice>(options);
}

std::vector<std::unique_ptr<Device>> make_devices_under_test(bool protect) {
  std::vector<std::unique_ptr<Device>> list;
  list.push_back(make_emulated_device({.protect = protect}));
  list.push_back(make_emulated_device({.max_grid = 1000, .backwards = true, .protect = protect}));
  if (std::getenv("ZEROFP8_ISA") == nullptr) list.push_back(make_cpu_device());
  if (why_no_cuda().empty()) list.push_back(make_cuda_device());
  return list;
}

std::shared_ptr<Device> device_under_test() {
  const auto make = []() -> std::shared_ptr<Device> {
    const char* wanted = std::getenv("ZEROFP8_TEST_DEVICE");
    const std::string name = wanted == nullptr || *wanted == '\0' ? "cpu" : wanted;
    if (name == "cpu") return nullptr;
    if (name == "emulated") return make_emulated_device();
    if (name == "cuda") return make_cuda_device();
    throw std::runtime_error("ZEROFP8_TEST_DEVICE: given " + name +
                             "; allowed: cpu, emulated, cuda");
  };
  thread_local const std::shared_ptr<Device> device = make();
  return device;
}

}  // namespace zerofp8::test
