// The lane programs as CUDA kernels. Every launch is on the device's stream and checked.
#include <cuda_runtime.h>

#include "kernels/cuda_ops.h"
#include "kernels/lane_programs.h"

namespace zerofp8::cuda {
namespace {

using namespace zerofp8::lane;  // NOLINT: this file is its driver on devices

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ __forceinline__ std::uint32_t max_over(std::uint32_t x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    x = max_u32(x, __shfl_xor_sync(kFullWarp, x, step));
  }
  return x;
}

__device__ __forceinline__ void report(std::uint32_t* amax, std::uint32_t mine) {
  const std::uint32_t all = __reduce_max_sync(kFullWarp, mine);
  if (amax != nullptr && threadIdx.x % 32 == 0 && all != 0) atomicMax(amax, all);
}

template <class Program>
__global__ void __launch_bounds__(kThreads)
    run(const __grid_constant__ typename Program::Args args, const std::int64_t lanes) {
  if (is_idle(args)) return;
  const int block = block_of(args);
  const int width = block / kElements;
  const unsigned in_warp = threadIdx.x % 32;
  std::uint32_t amax = 0;
  // A whole warp takes part in each turn, so that lanes can ask each other.
  for (std::int64_t warp = first_lane(blockIdx.x, threadIdx.x); warp < lanes;
       warp += lane_stride(gridDim.x)) {
    const bool active = warp + in_warp < lanes;
    const Position at = position(warp + in_warp, block);
    Program program;
    if (active) {
      program.load(args, at);
      amax = max_u32(amax, program.amax);
    }
    ZEROFP8_UNROLL
    for (int round = 0; round < Program::kRounds; ++round) {
      Maxima m;
      if constexpr (Program::kShares) {
        if (active) m = program.maxima(round);
        m.first = max_over(m.first, width);
        m.second = max_over(m.second, width);
      }
      if (active) program.store(args, at, round, m);
    }
  }
  if constexpr (requires { args.amax; }) report(args.amax, amax);
}

// Limbs are summed in shared memory, carried, and added to the total: integers, so any order gives
// the same bits. Up to 2^31 thread blocks.
__global__ void __launch_bounds__(kThreads)
    squares(const __grid_constant__ SquaresArgs args, const std::int64_t lanes) {
  using Word = unsigned long long;
  __shared__ Word limbs[ExactLimbs::kWords];
  for (int i = threadIdx.x; i < ExactLimbs::kWords; i += kThreads) limbs[i] = 0;
  __syncthreads();
  const unsigned in_warp = threadIdx.x % 32;
  std::uint32_t amax = 0;
  for (std::int64_t warp = first_lane(blockIdx.x, threadIdx.x); warp < lanes;
       warp += lane_stride(gridDim.x)) {
    const std::int64_t lane = warp + in_warp;
    Column c;
    if (lane < lanes) c = column_squares(args, lane / kElements, lane % kElements);
    ZEROFP8_UNROLL
    for (int half = kElements / 2; half > 0; half /= 2) {
      c.sum += __shfl_down_sync(kFullWarp, c.sum, half, kElements);
    }
    amax = max_u32(amax, c.amax);
    if (max_over(c.amax, kElements) >= kInfBits || in_warp % kElements != 0) continue;
    const ExactTerm term = exact_term(c.sum);
    if (term.limb == ExactLimbs::kLimbs) atomicAdd(&limbs[ExactLimbs::kLimbs], Word{1});
    if (term.limb < 0 || term.limb == ExactLimbs::kLimbs) continue;
    ZEROFP8_UNROLL
    for (int i = 0; i < 3; ++i) atomicAdd(&limbs[term.limb + i], Word{term.words[i]});
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 1  // unrolled, it would spill
    for (int i = 0; i + 1 < ExactLimbs::kLimbs; ++i) {
      limbs[i + 1] += limbs[i] >> 32;
      limbs[i] &= 0xFFFFFFFFu;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ExactLimbs::kWords; i += kThreads) {
    if (limbs[i] != 0) atomicAdd(reinterpret_cast<Word*>(args.limbs) + i, limbs[i]);
  }
  report(args.amax, amax);
}

// A row of thread blocks per copy.
__global__ void __launch_bounds__(kThreads) copies(const __grid_constant__ CopyBatch batch) {
  const Copy& copy = batch.copies[blockIdx.y];
  const std::int64_t lanes = (copy.bytes + 15) / 16;
  for (std::int64_t lane = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; lane < lanes;
       lane += lane_stride(gridDim.x)) {
    copy_lane(copy, lane);
  }
}

template <class Program>
cudaError_t launch(const typename Program::Args& args, const LaunchOn& on) {
  const int block = block_of(args);
  const LaunchShape shape = launch_shape(elements_of(args), block, block / kElements, on.max_grid);
  if (shape.grid == 0) return cudaSuccess;
  run<Program>
      <<<shape.grid, kThreads, 0, static_cast<cudaStream_t>(on.stream)>>>(args, shape.lanes);
  return cudaGetLastError();
}

}  // namespace

int recode(const RecodeArgs& args, const LaunchOn& on) { return launch<RecodeProgram>(args, on); }
int accumulate(const AccumulateArgs& args, const LaunchOn& on) {
  return with_accumulate(args, [&]<class Program>(Program) { return launch<Program>(args, on); });
}
int decode_sum(const DecodeSumArgs& args, const LaunchOn& on) {
  return launch<DecodeSumProgram>(args, on);
}
int copy_many(std::span<const Copy> list, const LaunchOn& on) {
  while (!list.empty()) {
    std::int64_t most = 0;
    const CopyBatch batch = next_batch(list, most);
    if (batch.count == 0) continue;
    const LaunchShape shape = launch_shape(most, 16, 1, on.max_grid);
    copies<<<dim3(shape.grid, static_cast<unsigned>(batch.count)), kThreads, 0,
             static_cast<cudaStream_t>(on.stream)>>>(batch);
    if (const cudaError_t code = cudaGetLastError(); code != cudaSuccess) return code;
  }
  return cudaSuccess;
}
int adam(const AdamLaunch& args, const LaunchOn& on) {
  return with_formats(
      args.args, [&]<class Formats>(Formats) { return launch<AdamProgram<Formats>>(args, on); });
}
int split_master(const MasterArgs& args, const LaunchOn& on) {
  return launch<SplitMasterProgram>(args, on);
}
int join_master(const MasterArgs& args, const LaunchOn& on) {
  return launch<JoinMasterProgram>(args, on);
}
int follow_weights(const FollowArgs& args, const LaunchOn& on) {
  return launch<FollowProgram>(args, on);
}
int sum_squares(const SquaresArgs& args, const LaunchOn& on) {
  const LaunchShape shape = launch_shape(args.elements, args.block, kElements, on.max_grid);
  if (shape.grid == 0) return cudaSuccess;
  squares<<<shape.grid, kThreads, 0, static_cast<cudaStream_t>(on.stream)>>>(args, shape.lanes);
  return cudaGetLastError();
}

}  // namespace zerofp8::cuda
