#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "benchmarks/plain_adam.h"

namespace zerofp8::bench {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void update(float g, float& m, float& v, float& p, const PlainAdam& a) {
  m = a.beta1 * m + (1 - a.beta1) * g;
  v = a.beta2 * v + (1 - a.beta2) * g * g;
  const float step = (m / a.correction1) / (sqrtf(v / a.correction2) + a.eps);
  p -= a.lr * (step + a.weight_decay * p);
}

__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ PlainAdam a) {
  const std::int64_t fours = a.elements / 4;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < fours;
       i += stride) {
    const uint2 packed = reinterpret_cast<const uint2*>(a.grad)[i];
    const auto* g = reinterpret_cast<const __nv_bfloat16*>(&packed);
    float4 m = reinterpret_cast<float4*>(a.exp_avg)[i];
    float4 v = reinterpret_cast<float4*>(a.exp_avg_sq)[i];
    float4 p = reinterpret_cast<float4*>(a.master)[i];
    update(__bfloat162float(g[0]), m.x, v.x, p.x, a);
    update(__bfloat162float(g[1]), m.y, v.y, p.y, a);
    update(__bfloat162float(g[2]), m.z, v.z, p.z, a);
    update(__bfloat162float(g[3]), m.w, v.w, p.w, a);
    reinterpret_cast<float4*>(a.exp_avg)[i] = m;
    reinterpret_cast<float4*>(a.exp_avg_sq)[i] = v;
    reinterpret_cast<float4*>(a.master)[i] = p;
    const __nv_bfloat16 w[4] = {__float2bfloat16(p.x), __float2bfloat16(p.y), __float2bfloat16(p.z),
                                __float2bfloat16(p.w)};
    uint2 out;
    memcpy(&out, w, sizeof out);
    reinterpret_cast<uint2*>(a.weight)[i] = out;
  }
}

}  // namespace

int plain_adam(const PlainAdam& args, void* stream) {
  int device = 0, processors = 1;
  if (const cudaError_t code = cudaGetDevice(&device); code != cudaSuccess) return code;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const std::int64_t wanted = (args.elements / 4 + kThreads - 1) / kThreads;
  const std::int64_t most = static_cast<std::int64_t>(processors) * 8;
  kernel<<<static_cast<unsigned>(wanted < most ? wanted : most), kThreads, 0,
           static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace zerofp8::bench
