// Bytes per second of each device kernel beside the device's own copy, which is what the memory
// can do. One call moves hundreds of megabytes, so that starting it does not count.
//
//   device_bench --benchmark_repetitions=5          on cuda:0; fails where there is none
//   ZEROFP8_BENCH_DEVICE=emulated device_bench      the emulation on the host: tests this program
//
// Names: operation/what. Bytes are those that have to be read and written, scales included.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/plain_adam.h"
#include "src/optim/adam_scalars.h"
#include "tests/emulated_device.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr int kBlock = 128;
constexpr int kRanks = 8;  // of the decode-add

bool emulated() {
  const char* wanted = std::getenv("ZEROFP8_BENCH_DEVICE");
  return wanted != nullptr && std::string(wanted) == "emulated";
}
std::int64_t elements() { return emulated() ? std::int64_t{1} << 14 : std::int64_t{1} << 28; }

Device& device() {
  static const std::unique_ptr<Device> instance =
      emulated() ? test::make_emulated_device({.protect = false}) : make_cuda_device();
  return *instance;
}

// Zeros in some storage; kernels take as long for any finite numbers.
class Memory {
 public:
  Memory(Storage storage, std::int64_t n, int parts = 1)
      : storage_(storage),
        part_bytes_(n * bytes_of(storage) + (is_block(storage) ? n / kBlock * 4 : 0)),
        n_(n),
        memory_(device().allocator(), Component::kTransient,
                static_cast<std::size_t>(part_bytes_ * parts)) {
    device().zero(memory_.data(), memory_.size());
  }
  View view() {
    char* scales = memory_.as<char>() + n_ * bytes_of(storage_);
    return {storage_, memory_.data(),
            is_block(storage_) ? reinterpret_cast<float*>(scales) : nullptr};
  }
  std::int64_t part_bytes() const { return part_bytes_; }

 private:
  Storage storage_;
  std::int64_t part_bytes_, n_;
  Buffer memory_;
};

// Runs `work` until the clock is sure; `bytes` move in one call.
template <class Work>
void measure(benchmark::State& state, std::int64_t n, double bytes, Work work) {
  work();
  device().synchronize();
  for (auto _ : state) {
    work();
    device().synchronize();
  }
  const auto calls = static_cast<double>(state.iterations());
  state.counters["bytes_per_second"] =
      benchmark::Counter(calls * bytes, benchmark::Counter::kIsRate);
  state.counters["elements_per_second"] =
      benchmark::Counter(calls * static_cast<double>(n), benchmark::Counter::kIsRate);
}

void copy(benchmark::State& state) {
  const std::int64_t n = elements();
  Memory from(Storage::kFp32, n), to(Storage::kFp32, n);
  measure(state, n, 2.0 * static_cast<double>(from.part_bytes()), [&] {
    device().copy(to.view().codes, from.view().codes, static_cast<std::size_t>(from.part_bytes()));
  });
}

void encode(benchmark::State& state, Storage storage, Rounding rounding) {
  const std::int64_t n = elements();
  Memory from(Storage::kFp32, n), to(storage, n);
  measure(state, n, static_cast<double>(from.part_bytes() + to.part_bytes()), [&] {
    device().recode({.in = {.part = from.view(), .residual = {}},
                     .out = to.view(),
                     .elements = n,
                     .rounding = rounding,
                     .stream = {}});
  });
}

void accumulate(benchmark::State& state, Storage storage) {
  const std::int64_t n = elements();
  Memory acc(storage, n), gradient(Storage::kBf16, n);
  measure(state, n, static_cast<double>(2 * acc.part_bytes() + gradient.part_bytes()), [&] {
    device().accumulate({.acc = acc.view(),
                         .residual = {},
                         .gradient = gradient.view(),
                         .sum = {},
                         .elements = n,
                         .rounding = Rounding::kNearest,
                         .stream = {}});
  });
}

void decode_add(benchmark::State& state, Storage storage) {
  const std::int64_t n = elements() / kRanks;
  Memory parts(storage, n, kRanks), sum(Storage::kFp32, n);
  measure(state, n, static_cast<double>(kRanks * parts.part_bytes() + sum.part_bytes()), [&] {
    device().decode_sum({.in = {.part = parts.view(),
                                .residual = {},
                                .count = kRanks,
                                .part_bytes = parts.part_bytes()},
                         .factor = 0.125f,
                         .out = static_cast<float*>(sum.view().codes),
                         .elements = n});
  });
}

void sum_squares(benchmark::State& state, Storage storage) {
  const std::int64_t n = elements();
  Memory x(storage, n), limbs(Storage::kFp32, kBlock);
  measure(state, n, static_cast<double>(x.part_bytes()), [&] {
    device().sum_squares({.x = x.view(),
                          .residual = {},
                          .elements = n,
                          .limbs = static_cast<std::int64_t*>(limbs.view().codes)});
  });
}

struct Level {
  const char* name;
  Storage grad, exp_avg, exp_avg_sq;
  int master_bits;
};
constexpr Level kLevels[] = {
    {"O0", Storage::kFp32, Storage::kFp32, Storage::kFp32, 16},
    {"O1", Storage::kE4m3Block, Storage::kFp32, Storage::kFp32, 16},
    {"O2", Storage::kFp32, Storage::kE4m3Block, Storage::kFp16Block, 8},
    {"O2_one_rank", Storage::kE4m3Block, Storage::kE4m3Block, Storage::kFp16Block, 8},
    {"O3", Storage::kFp32, Storage::kE4m3Block, Storage::kUe4m4Block, 8},
    {"O3_one_rank", Storage::kE4m3Block, Storage::kE4m3Block, Storage::kUe4m4Block, 8},
    {"O2_no_master", Storage::kFp32, Storage::kE4m3Block, Storage::kFp16Block, 0}};

void adam(benchmark::State& state, const Level& level) {
  const std::int64_t n = elements();
  Memory grad(level.grad, n), m(level.exp_avg, n), v(level.exp_avg_sq, n);
  Memory weight(Storage::kBf16, n), rest(Storage::kFp32, n / 4);  // up to 16 bits each
  AdamLaunch launch;
  launch.weight_elements = n;
  AdamArgs& a = launch.args;
  a.elements = n;
  a.grad = grad.view();
  a.exp_avg = m.view();
  a.exp_avg_sq = v.view();
  a.weight_dtype = DType::kBf16;
  a.weight = weight.view().codes;
  a.master_bits = level.master_bits;
  a.master = rest.view().codes;
  a.scalars = adam_scalars({}, 1, 0.0);
  a.exp_avg_rounding = level.exp_avg == Storage::kFp32 ? Rounding::kNearest : Rounding::kMixed;
  const std::int64_t twice =
      m.part_bytes() + v.part_bytes() + weight.part_bytes() + n * level.master_bits / 8;
  measure(state, n, static_cast<double>(grad.part_bytes() + 2 * twice),
          [&] { device().adam(launch); });
}

#if defined(ZEROFP8_BENCH_CUDA)
void plain_adam(benchmark::State& state) {
  const std::int64_t n = elements();
  Memory grad(Storage::kBf16, n), weight(Storage::kBf16, n);
  Memory m(Storage::kFp32, n), v(Storage::kFp32, n), master(Storage::kFp32, n);
  const auto floats = [](Memory& memory) { return static_cast<float*>(memory.view().codes); };
  const bench::PlainAdam args{.grad = static_cast<std::uint16_t*>(grad.view().codes),
                              .exp_avg = floats(m),
                              .exp_avg_sq = floats(v),
                              .master = floats(master),
                              .weight = static_cast<std::uint16_t*>(weight.view().codes),
                              .elements = n,
                              .lr = 1e-3f,
                              .beta1 = 0.9f,
                              .beta2 = 0.999f,
                              .eps = 1e-8f,
                              .weight_decay = 0.01f,
                              .correction1 = 0.1f,
                              .correction2 = 0.001f};
  measure(state, n, static_cast<double>(n) * (2 + 2 + 6 * 4), [&] {
    if (const int code = bench::plain_adam(args, device().stream()); code != 0) {
      throw DeviceError("plain_adam: CUDA error " + std::to_string(code));
    }
  });
}
#endif

void add(const std::string& name, const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->UseRealTime();
}

void add_all() {
  using S = Storage;
  add("copy/fp32", copy);
  add("encode/e4m3", [](auto& s) { encode(s, S::kE4m3Block, Rounding::kNearest); });
  add("encode/e4m3_stochastic", [](auto& s) { encode(s, S::kE4m3Block, Rounding::kStochastic); });
  add("encode/fp16block", [](auto& s) { encode(s, S::kFp16Block, Rounding::kNearest); });
  add("accumulate/e4m3", [](auto& s) { accumulate(s, S::kE4m3Block); });
  add("accumulate/fp32", [](auto& s) { accumulate(s, S::kFp32); });
  add("decode_add/e4m3", [](auto& s) { decode_add(s, S::kE4m3Block); });
  add("decode_add/bf16", [](auto& s) { decode_add(s, S::kBf16); });
  add("sum_squares/fp32", [](auto& s) { sum_squares(s, S::kFp32); });
  for (const Level& level : kLevels) {
    add(std::string("adam/") + level.name, [&level](auto& s) { adam(s, level); });
  }
#if defined(ZEROFP8_BENCH_CUDA)
  if (!emulated()) add("peer/adam_fp32_state", plain_adam);
#endif
}

}  // namespace
}  // namespace zerofp8

int main(int argc, char** argv) {
  try {
    zerofp8::device();
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    zerofp8::add_all();
    benchmark::RunSpecifiedBenchmarks();
  } catch (const zerofp8::Error& error) {
    std::fprintf(stderr, "device_bench: %s\n", error.what());
    return 1;
  }
}
