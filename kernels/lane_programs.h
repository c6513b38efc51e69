// The device kernels as programs of one lane: load, then rounds in which the lanes of a block learn
// its maximum and store. What drives them (cuda_ops.cu, or a loop on the host in tests) knows
// nothing of formats:
//
//   program.load(args, position);
//   for each round: Maxima m = maximum over the block's lanes of program.maxima(round);
//                   program.store(args, position, round, m);   // kShares: m matters to it
//   *args.amax = max(*args.amax, program.amax);
#pragma once

#include "kernels/adam_element.h"
#include "kernels/exact_limbs.h"
#include "kernels/lane.h"
#include "zerofp8/device.h"

#if defined(__CUDACC__)
#define ZEROFP8_HD_MEMBER __host__ __device__ __forceinline__
#else
#define ZEROFP8_HD_MEMBER inline __attribute__((always_inline))
#endif

namespace zerofp8::lane {

// Bits of the maxima of up to two rows of numbers.
struct Maxima {
  std::uint32_t first = 0, second = 0;
};

// A program that needs no block's maximum: load() does it all.
template <class LaunchArgs>
struct OnePass {
  using Args = LaunchArgs;
  static constexpr int kRounds = 0;
  static constexpr bool kShares = false;
  std::uint32_t amax = 0;
  ZEROFP8_HD_MEMBER Maxima maxima(int) const { return {}; }
  ZEROFP8_HD_MEMBER void store(const Args&, const Position&, int, Maxima) {}
};

// x = the lane's elements of the sum; the first summand may be the caller's, of `count` elements.
template <Owner kOwner = Owner::kEngine>
ZEROFP8_HD void sum_lane(const Summands& in, const Position& at, int count, float* x) {
  decode_with_residual<kOwner>(in.part, in.residual, at, count, x);
  for (int k = 1; k < in.count; ++k) {
    float next[kElements] = {};
    decode_with_residual(moved(in.part, k * in.part_bytes), moved(in.residual, k * in.part_bytes),
                         at, kElements, next);
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) x[i] += next[i];
  }
}

struct RecodeProgram {
  using Args = RecodeArgs;
  static constexpr int kRounds = 1;
  static constexpr bool kShares = true;
  std::uint32_t amax = 0;
  float x[kElements];

  ZEROFP8_HD_MEMBER void load(const Args& a, const Position& at) {
    sum_lane<Owner::kCaller>(a.in, at, valid(at.first, a.elements), x);
    amax = max_abs(x);
  }
  ZEROFP8_HD_MEMBER Maxima maxima(int) const { return {amax, 0}; }
  ZEROFP8_HD_MEMBER void store(const Args& a, const Position& at, int, Maxima m) {
    encode_lane<Owner::kCaller>(x, m.first, a.out, at, valid(at.first, a.elements), a.rounding,
                                draws(a.stream.key, a.stream.offset, at.first));
  }
};

// Round 0 stores the sum; round 1, with error feedback, what its rounding lost.
template <bool kResidual, bool kSum>
struct AccumulateProgram {
  using Args = AccumulateArgs;
  static constexpr int kRounds = kResidual ? 2 : 1;
  static constexpr bool kShares = true;
  std::uint32_t amax = 0;
  float total[kElements];

  ZEROFP8_HD_MEMBER void load(const Args& a, const Position& at) {
    decode_with_residual(a.acc, kResidual ? a.residual : View{}, at, kElements, total);
    float gradient[kElements] = {};
    if (kSum) {
      sum_lane(a.sum, at, kElements, gradient);
    } else {
      decode_lane<Owner::kCaller, kPlain>(a.gradient, at, valid(at.first, a.elements), gradient);
    }
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) total[i] += gradient[i];
    amax = max_abs(total);
  }
  ZEROFP8_HD_MEMBER Maxima maxima(int round) const {
    return {round == 0 ? amax : max_abs(total), 0};
  }
  ZEROFP8_HD_MEMBER void store(const Args& a, const Position& at, int round, Maxima m) {
    const Draws random = draws(a.stream, at.first);
    if (round == 1) {
      encode_lane(total, m.first, a.residual, at, kElements, a.rounding, lower_half(random));
      return;
    }
    float back[kElements] = {};
    encode_lane(total, m.first, a.acc, at, kElements, a.rounding, random,
                kResidual ? back : nullptr);
    if (kResidual) {
      ZEROFP8_UNROLL
      for (int i = 0; i < kElements; ++i) total[i] -= back[i];
    }
  }
};

// Calls f with the program that these arguments need.
template <class F>
auto with_accumulate(const AccumulateArgs& a, F f) {
  if (a.sum)
    return a.residual ? f(AccumulateProgram<true, true>{}) : f(AccumulateProgram<false, true>{});
  return a.residual ? f(AccumulateProgram<true, false>{}) : f(AccumulateProgram<false, false>{});
}

struct DecodeSumProgram : OnePass<DecodeSumArgs> {
  ZEROFP8_HD_MEMBER void load(const Args& a, const Position& at) {
    float sum[kElements] = {};
    sum_lane(a.in, at, kElements, sum);
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) sum[i] *= a.factor;
    amax = max_abs(sum);
    store_codes<Owner::kEngine>(a.out + at.first, kElements, sum);
  }
};

// What moments are stored in: a second moment is FP32, or its root is one of the others.
inline constexpr Storages kExpAvg =
    set_of(Storage::kFp32, Storage::kBf16, Storage::kFp16Block, Storage::kE4m3Block);
inline constexpr Storages kRoots =
    set_of(Storage::kBf16, Storage::kFp16Block, Storage::kUe4m4Block);

// Formats that are known when a kernel is compiled: its loads come before its arithmetic then, and
// each choice between storages is gone.
template <Storage kGrad, Storage kFirst, Storage kSecond, DType kWeight, int kMasterBits>
struct StaticFormats {
  static constexpr bool kRoot = kSecond != Storage::kFp32;
  static constexpr bool kShares = is_block(kFirst) || is_block(kSecond);
  static constexpr Storages kExpAvgSq = set_of(kSecond);
  static bool fit(const AdamArgs& a) {
    return a.grad.storage == kGrad && !a.grad_residual && a.exp_avg.storage == kFirst &&
           a.exp_avg_sq.storage == kSecond && a.weight_dtype == kWeight &&
           a.master_bits == kMasterBits && a.commit;
  }
  ZEROFP8_HD AdamArgs fix(AdamArgs a) {
    a.grad.storage = kGrad;
    a.grad_residual = View{};
    a.exp_avg.storage = kFirst;
    a.exp_avg_sq.storage = kSecond;
    a.weight_dtype = kWeight;
    a.master_bits = kMasterBits;
    a.commit = true;
    return a;
  }
};
// Whatever the arguments say.
template <bool kRootStored>
struct AnyFormats {
  static constexpr bool kRoot = kRootStored;
  static constexpr bool kShares = true;
  static constexpr Storages kExpAvgSq = kRootStored ? kRoots : set_of(Storage::kFp32);
  ZEROFP8_HD AdamArgs fix(const AdamArgs& a) { return a; }
};

template <class Formats>
struct AdamProgram {
  using Args = AdamLaunch;
  static constexpr int kRounds = 1;
  static constexpr bool kShares = Formats::kShares;
  std::uint32_t amax = 0;
  float m[kElements], v[kElements], p[kElements];

  ZEROFP8_HD_MEMBER void load(const Args& launch, const Position& at) {
    const AdamArgs a = Formats::fix(launch.args);
    const AdamScalars scalars = scalars_of(launch);
    float g[kElements] = {};
    load_master_lane<Owner::kEngine>(a.weight_dtype, a.weight, a.master_bits, a.master, at,
                                     valid(at.first, launch.weight_elements), p);
    decode_with_residual(a.grad, a.grad_residual, at, kElements, g);
    decode_lane<Owner::kEngine, kExpAvg>(a.exp_avg, at, kElements, m);
    decode_lane<Owner::kEngine, Formats::kExpAvgSq>(a.exp_avg_sq, at, kElements, v);
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) {
      const AdamElement next = adam_element<Formats::kRoot>(g[i], m[i], v[i], p[i], scalars);
      m[i] = next.m;
      v[i] = next.v;
      p[i] = next.p;
    }
    amax = max_abs(p);
  }
  ZEROFP8_HD_MEMBER Maxima maxima(int) const { return {max_abs(m), max_abs(v)}; }
  ZEROFP8_HD_MEMBER void store(const Args& launch, const Position& at, int, Maxima maxima) {
    const AdamArgs a = Formats::fix(launch.args);
    if (!a.commit) return;
    const Draws random = draws(a.moments, at.first);
    encode_lane<Owner::kEngine, kExpAvg>(m, maxima.first, a.exp_avg, at, kElements,
                                         a.exp_avg_rounding, random);
    encode_lane<Owner::kEngine, Formats::kExpAvgSq>(
        v, maxima.second, a.exp_avg_sq, at, kElements,
        Formats::kRoot ? Rounding::kStochastic : Rounding::kNearest, lower_half(random));
    const bool dither = a.master_bits == 0 && a.weight_dtype != DType::kFp32;
    store_master_lane<Owner::kEngine>(p, a.weight_dtype, a.weight, a.master_bits, a.master, at,
                                      valid(at.first, launch.weight_elements),
                                      dither ? Rounding::kStochastic : Rounding::kNearest,
                                      draws(a.weights, at.first));
  }
};

// Calls f with the formats of one of the levels, of an FP32 or a bf16 model, if they are these;
// else with formats that are looked up as the kernel runs. Levels on one rank read the accumulator
// itself: E4M3 gradients.
template <class F>
auto with_formats(const AdamArgs& a, F f) {
  constexpr Storage kFp32 = Storage::kFp32, kE4m3 = Storage::kE4m3Block;
  constexpr Storage kFp16 = Storage::kFp16Block, kUe4m4 = Storage::kUe4m4Block;
  using O0Fp32 = StaticFormats<kFp32, kFp32, kFp32, DType::kFp32, 0>;
  using O0Bf16 = StaticFormats<kFp32, kFp32, kFp32, DType::kBf16, 16>;
  using O1Bf16 = StaticFormats<kE4m3, kFp32, kFp32, DType::kBf16, 16>;
  using O2Bf16 = StaticFormats<kFp32, kE4m3, kFp16, DType::kBf16, 8>;
  using O2OneRank = StaticFormats<kE4m3, kE4m3, kFp16, DType::kBf16, 8>;
  using O3Bf16 = StaticFormats<kFp32, kE4m3, kUe4m4, DType::kBf16, 8>;
  using O3OneRank = StaticFormats<kE4m3, kE4m3, kUe4m4, DType::kBf16, 8>;
  if (O0Fp32::fit(a)) return f(O0Fp32{});
  if (O0Bf16::fit(a)) return f(O0Bf16{});
  if (O1Bf16::fit(a)) return f(O1Bf16{});
  if (O2Bf16::fit(a)) return f(O2Bf16{});
  if (O2OneRank::fit(a)) return f(O2OneRank{});
  if (O3Bf16::fit(a)) return f(O3Bf16{});
  if (O3OneRank::fit(a)) return f(O3OneRank{});
  if (a.exp_avg_sq.storage == kFp32) return f(AnyFormats<false>{});
  return f(AnyFormats<true>{});
}

struct SplitMasterProgram : OnePass<MasterArgs> {
  ZEROFP8_HD_MEMBER void load(const Args& a, const Position& at) {
    const int count = valid(at.first, a.elements);
    float p[kElements] = {};
    load_codes<Owner::kCaller>(a.values + at.first, count, p);
    amax = max_abs(p);
    store_master_lane<Owner::kCaller>(p, a.dtype, a.weight, a.master_bits, a.rest, at, count,
                                      Rounding::kNearest, {});
  }
};

struct JoinMasterProgram : OnePass<MasterArgs> {
  ZEROFP8_HD_MEMBER void load(const Args& a, const Position& at) {
    const int count = valid(at.first, a.elements);
    float p[kElements] = {};
    load_master_lane<Owner::kCaller>(a.dtype, a.weight, a.master_bits, a.rest, at, count, p);
    amax = max_abs(p);
    if (a.values != nullptr) store_codes<Owner::kCaller>(a.values + at.first, count, p);
  }
};

struct FollowProgram : OnePass<FollowArgs> {
  ZEROFP8_HD_MEMBER void load(const Args& a, const Position& at) {
    const int count = valid(at.first, a.elements);
    float p[kElements] = {};
    decode_lane<Owner::kCaller, kPlain>(weight_view(a.dtype, a.weight), at, count, p);
    ZEROFP8_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i >= count) continue;
      const std::int64_t k = at.first + i;
      const std::uint16_t now = static_cast<const std::uint16_t*>(a.weight)[k];
      std::uint16_t& kept = static_cast<std::uint16_t*>(a.kept)[k];
      if (now == kept) continue;
      kept = now;
      if (a.master_bits == 32) static_cast<float*>(a.master)[k] = p[i];
      if (a.master_bits == 16) static_cast<std::uint16_t*>(a.master)[k] = 0;
      if (a.master_bits == 8) static_cast<std::uint8_t*>(a.master)[k] = 0;
    }
  }
};

// The sum of squares takes columns instead: 16 threads per block, thread c adds elements c, c + 16,
// ... in that order, then the columns are added in halves. So does the CPU.
struct Column {
  double sum = 0;
  std::uint32_t amax = 0;
};
ZEROFP8_HD Column column_squares(const SquaresArgs& a, std::int64_t block_index, int column) {
  Column c;
  for (int row = 0; row < a.block / kElements; ++row) {
    const std::int64_t i = block_index * a.block + row * kElements + column;
    float x = decode_one(a.x, i, block_index);
    if (a.residual.codes != nullptr) x += decode_one(a.residual, i, block_index);
    x *= a.factor;
    const double value = static_cast<double>(x);
#if defined(__CUDA_ARCH__)
    c.sum = __fma_rn(value, value, c.sum);
#else
    c.sum = __builtin_fma(value, value, c.sum);
#endif
    c.amax = max_u32(c.amax, bits_of(x) & kAbsMask);
  }
  return c;
}

// Copies that travel in the arguments of one launch, which hold 4 KiB: lane k copies the bytes from
// 16 k on.
inline constexpr int kCopiesAtOnce = 128;
struct CopyBatch {
  Copy copies[kCopiesAtOnce];
  int count = 0;
};
ZEROFP8_HD void copy_lane(const Copy& c, std::int64_t lane) {
  const std::int64_t at = lane * 16, left = c.bytes - at;
  char* to = static_cast<char*>(c.to) + at;
  const char* from = static_cast<const char*>(c.from) + at;
  if (left >= 16 && aligned16(to) && aligned16(from)) return store16_of(to, from);
  const int count = left < 16 ? static_cast<int>(left) : 16;
  const bool pairs =
      ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) |
        static_cast<std::uintptr_t>(count)) &
       1u) == 0;
  if (pairs) {  // all 16- and 32-bit weights
    for (int i = 0; i < count; i += 2) memcpy(to + i, from + i, 2);
  } else {
    for (int i = 0; i < count; ++i) to[i] = from[i];
  }
}
// The next copies of a list, which becomes shorter; `most`: bytes of the largest one.
inline CopyBatch next_batch(std::span<const Copy>& copies, std::int64_t& most) {
  CopyBatch batch;
  most = 0;
  while (!copies.empty() && batch.count < kCopiesAtOnce) {
    const Copy& c = copies.front();
    if (c.bytes > 0) batch.copies[batch.count++] = c;
    if (c.bytes > most) most = c.bytes;
    copies = copies.subspan(1);
  }
  return batch;
}

// How many threads of a launch have something to do, and how large it is. A grid of limited size
// walks over the rest; offsets are 64-bit.
inline constexpr int kThreads = 256;
struct LaunchShape {
  std::int64_t lanes = 0;  // threads with work, in units that fill whole blocks
  unsigned grid = 0;       // thread blocks; 0: nothing to launch
};
inline LaunchShape launch_shape(std::int64_t elements, int block, int lanes_per_block,
                                unsigned max_grid) {
  const std::int64_t lanes = (elements + block - 1) / block * lanes_per_block;
  const std::int64_t wanted = (lanes + kThreads - 1) / kThreads;
  return {lanes, static_cast<unsigned>(wanted < max_grid ? wanted : max_grid)};
}
// The first lane of a thread's warp, and the step to its next one.
ZEROFP8_HD std::int64_t first_lane(unsigned thread_block, unsigned thread) {
  return static_cast<std::int64_t>(thread_block) * kThreads + (thread & ~31u);
}
ZEROFP8_HD std::int64_t lane_stride(unsigned grid) { return std::int64_t{grid} * kThreads; }

ZEROFP8_HD std::int64_t elements_of(const AdamLaunch& a) { return a.args.elements; }
ZEROFP8_HD int block_of(const AdamLaunch& a) { return a.args.block; }
template <class Args>
ZEROFP8_HD std::int64_t elements_of(const Args& a) {
  return a.elements;
}
template <class Args>
ZEROFP8_HD int block_of(const Args& a) {
  return a.block;
}
// Masters come in any number and have no blocks.
ZEROFP8_HD int block_of(const MasterArgs&) { return 32; }
ZEROFP8_HD int block_of(const FollowArgs&) { return 32; }

}  // namespace zerofp8::lane
