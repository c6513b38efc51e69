// The kernels of zerofp8/device_step.h: a few scalars per step, and one thread per parameter. The
// only ones besides the norm that compute in double precision.
#include <cuda_runtime.h>

#include "kernels/cuda_ops.h"
#include "kernels/step_element.h"

namespace zerofp8::cuda {
namespace {

using namespace zerofp8::element;  // NOLINT: this file is its driver on devices

constexpr int kThreads = 128;

// One thread block; thread 0 writes the part.
__global__ void __launch_bounds__(kThreads) part_kernel(const __grid_constant__ MakePartArgs args) {
  __shared__ unsigned long long worst;
  if (threadIdx.x == 0) worst = kNoneBad;
  __syncthreads();
  std::uint64_t mine = kNoneBad;
  for (int i = static_cast<int>(threadIdx.x); i < args.parameters; i += kThreads) {
    const std::uint64_t next = badness(args, i);
    if (next < mine) mine = next;
  }
  if (mine != kNoneBad) atomicMin(&worst, static_cast<unsigned long long>(mine));
  __syncthreads();
  if (threadIdx.x == 0) element::make_part(args, worst);
}

__global__ void combine_kernel(const __grid_constant__ CombinePartsArgs args) {
  element::combine_parts(args);
}

// Every thread decides for itself from the same numbers; the first one writes the state.
__global__ void __launch_bounds__(kThreads) decide_kernel(const __grid_constant__ DecideArgs args) {
  const Decision decision = decision_of(*args.total, args.max_norm);
  const int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int stride = static_cast<int>(gridDim.x * kThreads);
  for (int i = first; i < args.parameters; i += stride) decide_parameter(args, decision, i);
  if (first == 0) decide_state(args, decision);
}

}  // namespace

int make_part(const MakePartArgs& args, const LaunchOn& on) {
  part_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(on.stream)>>>(args);
  return cudaGetLastError();
}
int combine_parts(const CombinePartsArgs& args, const LaunchOn& on) {
  combine_kernel<<<1, 1, 0, static_cast<cudaStream_t>(on.stream)>>>(args);
  return cudaGetLastError();
}
int decide(const DecideArgs& args, const LaunchOn& on) {
  const auto wanted = static_cast<unsigned>((args.parameters + kThreads - 1) / kThreads);
  const unsigned grid = wanted == 0 ? 1 : wanted < on.max_grid ? wanted : on.max_grid;
  decide_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(on.stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace zerofp8::cuda
