// Nanoseconds per element and bytes per second of each kernel on each instruction set, one thread.
//
//   kernels_bench --benchmark_filter='adam.*v4' --benchmark_repetitions=5
//
// Names: operation/what/instruction set/elements. The small size stays in cache, the large one does
// not.
#include <benchmark/benchmark.h>

#include <cmath>
#include <string>
#include <vector>

#include "src/optim/adam_scalars.h"
#include "zerofp8/ops.h"

namespace zerofp8 {
namespace {

constexpr int kBlock = 128;
constexpr std::int64_t kSizes[] = {1 << 14, 1 << 23};

struct Row {
  const char* name;
  Storage storage;
  Rounding rounding;
};
constexpr Row kStored[] = {{"bf16", Storage::kBf16, Rounding::kNearest},
                           {"bf16_stochastic", Storage::kBf16, Rounding::kStochastic},
                           {"fp16", Storage::kFp16, Rounding::kNearest},
                           {"fp16block", Storage::kFp16Block, Rounding::kNearest},
                           {"fp16block_stochastic", Storage::kFp16Block, Rounding::kStochastic},
                           {"e4m3", Storage::kE4m3Block, Rounding::kNearest},
                           {"e4m3_stochastic", Storage::kE4m3Block, Rounding::kStochastic},
                           {"e4m3_mixed", Storage::kE4m3Block, Rounding::kMixed},
                           {"e5m2", Storage::kE5m2Block, Rounding::kNearest},
                           {"ue4m4_stochastic", Storage::kUe4m4Block, Rounding::kStochastic}};

// The opt levels' storages beside a bf16 weight.
struct Level {
  const char* name;
  Storage grad, exp_avg, exp_avg_sq;
  int master_bits;
};
constexpr Level kLevels[] = {
    {"O0", Storage::kFp32, Storage::kFp32, Storage::kFp32, 16},
    {"O1", Storage::kE4m3Block, Storage::kFp32, Storage::kFp32, 16},
    {"O2", Storage::kE4m3Block, Storage::kE4m3Block, Storage::kFp16Block, 8},
    {"O3", Storage::kE4m3Block, Storage::kE4m3Block, Storage::kUe4m4Block, 8},
    {"O2_no_master", Storage::kE4m3Block, Storage::kE4m3Block, Storage::kFp16Block, 0}};

class Memory {
 public:
  Memory(Storage storage, std::int64_t n)
      : storage_(storage),
        codes_(std::size_t(n * bytes_of(storage))),
        scales_(std::size_t(n / kBlock)) {}
  View view() { return {storage_, codes_.data(), is_block(storage_) ? scales_.data() : nullptr}; }
  // Bytes read or written per element, scales included.
  double bytes() const { return bytes_of(storage_) + (is_block(storage_) ? 4.0 / kBlock : 0.0); }

 private:
  Storage storage_;
  std::vector<std::uint8_t> codes_;
  std::vector<float> scales_;
};

std::vector<float> values(std::int64_t n) {
  std::vector<float> x(static_cast<std::size_t>(n));
  std::uint32_t h = 1;
  for (float& value : x) {
    h = h * 1664525u + 1013904223u;
    value = std::ldexp(float(h >> 8) * 0x1p-24f - 0.5f, -int(h % 7));
  }
  return x;
}

void report(benchmark::State& state, std::int64_t n, double bytes_per_element) {
  const auto elements = static_cast<double>(state.iterations()) * static_cast<double>(n);
  state.SetBytesProcessed(static_cast<std::int64_t>(elements * bytes_per_element));
  state.counters["per_element"] =
      benchmark::Counter(elements, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void encode(benchmark::State& state, const Ops* ops, Row row, std::int64_t n) {
  const std::vector<float> x = values(n);
  Memory out(row.storage, n);
  std::uint64_t key = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        ops->encode(x.data(), out.view(), n, kBlock, row.rounding, {.key = ++key}));
  }
  report(state, n, 4 + out.bytes());
}

void decode(benchmark::State& state, const Ops* ops, Row row, std::int64_t n) {
  std::vector<float> x = values(n);
  Memory in(row.storage, n);
  ops->encode(x.data(), in.view(), n, kBlock, Rounding::kNearest, {});
  for (auto _ : state) {
    ops->decode(in.view(), x.data(), n, kBlock);
    benchmark::ClobberMemory();
  }
  report(state, n, 4 + in.bytes());
}

void accumulate(benchmark::State& state, const Ops* ops, Row row, std::int64_t n, bool feedback) {
  Memory acc(row.storage, n), residual(row.storage, n), gradient(Storage::kBf16, n);
  ops->encode(values(n).data(), gradient.view(), n, kBlock, Rounding::kNearest, {});
  std::uint64_t key = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(ops->accumulate(acc.view(), feedback ? residual.view() : View{},
                                             gradient.view(), n, kBlock, row.rounding,
                                             {.key = ++key}));
  }
  report(state, n, 2 + 2 * acc.bytes() * (feedback ? 2 : 1));
}

void decode_sum(benchmark::State& state, const Ops* ops, Row row, std::int64_t n) {
  constexpr int kParts = 4;
  Memory part(row.storage, n);
  std::vector<float> out = values(n);
  ops->encode(out.data(), part.view(), n, kBlock, Rounding::kNearest, {});
  const View views[kParts] = {part.view(), part.view(), part.view(), part.view()};
  for (auto _ : state) {
    benchmark::DoNotOptimize(ops->decode_sum(views, nullptr, kParts, 0.25f, out.data(), n, kBlock));
  }
  report(state, n, 4 + kParts * part.bytes());
}

void sum_squares(benchmark::State& state, const Ops* ops, Row row, std::int64_t n) {
  Memory in(row.storage, n);
  ops->encode(values(n).data(), in.view(), n, kBlock, Rounding::kNearest, {});
  std::vector<double> out(static_cast<std::size_t>(n / kBlock));
  for (auto _ : state) {
    benchmark::DoNotOptimize(ops->sum_squares(in.view(), {}, 0.5f, out.data(), n, kBlock));
  }
  report(state, n, in.bytes() + 8.0 / kBlock);
}

void adam(benchmark::State& state, const Ops* ops, Level level, std::int64_t n) {
  Memory grad(level.grad, n), m(level.exp_avg, n), v(level.exp_avg_sq, n),
      weight(Storage::kBf16, n);
  std::vector<std::uint8_t> master(static_cast<std::size_t>(n * level.master_bits / 8));
  ops->encode(values(n).data(), grad.view(), n, kBlock, Rounding::kNearest, {});
  AdamArgs args;
  args.elements = n;
  args.block = kBlock;
  args.grad = grad.view();
  args.exp_avg = m.view();
  args.exp_avg_sq = v.view();
  args.weight_dtype = DType::kBf16;
  args.weight = weight.view().codes;
  args.master_bits = level.master_bits;
  args.master = master.data();
  args.exp_avg_rounding = level.exp_avg == Storage::kFp32 ? Rounding::kNearest : Rounding::kMixed;
  std::int64_t step = 0;
  double c = 0;
  for (auto _ : state) {
    advance({}, step, c);
    args.scalars = adam_scalars({}, step, level.exp_avg == Storage::kFp32 ? 0 : c);
    args.moments.key = args.weights.key = static_cast<std::uint64_t>(step);
    benchmark::DoNotOptimize(ops->adam(args));
  }
  report(state, n, grad.bytes() + 2 * (m.bytes() + v.bytes() + 2 + level.master_bits / 8.0));
}

template <class F, class... Args>
void add(const std::string& name, F f, const Ops* ops, Args... args) {
  for (const std::int64_t n : kSizes) {
    benchmark::RegisterBenchmark(
        (name + "/" + std::string(ops->name) + "/" + std::to_string(n)).c_str(),
        [=](benchmark::State& state) { f(state, ops, args..., n); });
  }
}

void register_all() {
  for (const Ops* ops : runnable_cpu_ops()) {
    for (const Level& level : kLevels) add(std::string("adam/") + level.name, adam, ops, level);
    for (const Row& row : kStored) {
      add(std::string("encode/") + row.name, encode, ops, row);
      if (row.rounding != Rounding::kNearest) continue;
      add(std::string("decode/") + row.name, decode, ops, row);
      add(std::string("decode_sum4/") + row.name, decode_sum, ops, row);
      add(std::string("sum_squares/") + row.name, sum_squares, ops, row);
    }
    for (const Row& row : kStored) {
      if (row.storage != Storage::kE4m3Block || row.rounding == Rounding::kMixed) continue;
      for (const bool feedback : {false, true}) {
        add(
            std::string("accumulate/") + row.name + (feedback ? "_feedback" : ""),
            [=](benchmark::State& state, const Ops* table, std::int64_t n) {
              accumulate(state, table, row, n, feedback);
            },
            ops);
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8

int main(int argc, char** argv) {
  zerofp8::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
