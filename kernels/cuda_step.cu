// The kernels of zerofp8/device_step.h: a few scalars per step, and one thread per parameter. The
// only ones besides the norm that compute in double precision.
#include <cuda_runtime.h>

#include "kernels/cuda_ops.h"
#include "kernels/step_element.h"

namespace zerofp8::cuda {
namespace {

using namespace zerofp8::element;  // NOLINT: this file is its driver on devices

// One thread block; thread 0 writes the part.
__global__ void __launch_bounds__(kStepThreads)
    part_kernel(const __grid_constant__ MakePartArgs args) {
  __shared__ unsigned long long worst;
  if (threadIdx.x == 0) worst = kNoneBad;
  __syncthreads();
  const std::uint64_t mine = worst_of(args, static_cast<int>(threadIdx.x), kStepThreads);
  if (mine != kNoneBad) atomicMin(&worst, static_cast<unsigned long long>(mine));
  __syncthreads();
  if (threadIdx.x == 0) element::make_part(args, worst);
}

__global__ void combine_kernel(const __grid_constant__ CombinePartsArgs args) {
  element::combine_parts(args);
}

__global__ void __launch_bounds__(kStepThreads)
    decide_kernel(const __grid_constant__ DecideArgs args) {
  element::decide(args, static_cast<int>(blockIdx.x * kStepThreads + threadIdx.x),
                  static_cast<int>(gridDim.x * kStepThreads));
}

}  // namespace

int make_part(const MakePartArgs& args, const LaunchOn& on) {
  part_kernel<<<1, kStepThreads, 0, static_cast<cudaStream_t>(on.stream)>>>(args);
  return cudaGetLastError();
}
int combine_parts(const CombinePartsArgs& args, const LaunchOn& on) {
  combine_kernel<<<1, 1, 0, static_cast<cudaStream_t>(on.stream)>>>(args);
  return cudaGetLastError();
}
int decide(const DecideArgs& args, const LaunchOn& on) {
  const unsigned grid = decide_grid(args.parameters, on.max_grid);
  decide_kernel<<<grid, kStepThreads, 0, static_cast<cudaStream_t>(on.stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace zerofp8::cuda
