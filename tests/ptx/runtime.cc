// The part of the CUDA runtime that CudaDevice and its kernels use, for machines without a GPU:
// linked into a program, it takes the place of libcudart. One device, whose kernels are run by
// tests/ptx/machine.h from the PTX in the files that ZEROFP8_PTX_FILES lists. Work is done when it
// is queued. Device memory is the host's, of its own and with gaps between, full of nonsense at
// first; copies that are not of the kind that they say, and kernels that fault, are errors that say
// what was wrong.
//
// ZEROFP8_PTX_MET=FILE: at the end, FILE says which instructions of each kernel were met, for
// tests/check_ptx_met.py.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "tests/ptx/machine.h"

namespace {

using namespace zerofp8::test::ptx;

constexpr std::size_t kMemory = std::size_t{4} << 30, kGap = 256;
constexpr int kMultiprocessors = 2;

struct Runtime {
  std::mutex mutex;
  std::vector<Region> memory;  // sorted
  std::size_t used = 0;
  std::map<const void*, std::string> names;  // of kernels, by what stands for them on the host
  unsigned launches = 0;
  std::map<std::string, std::vector<bool>> met;  // by kernel

  bool contains(const void* data, std::size_t bytes) {
    std::lock_guard lock(mutex);
    return find(memory, reinterpret_cast<std::uintptr_t>(data), bytes) != nullptr;
  }
};
Runtime& runtime() {
  static auto* all = new Runtime;  // outlives static objects that free memory
  return *all;
}

struct Configuration {
  dim3 grid, threads;
  std::size_t shared;
  cudaStream_t stream;
};
thread_local Configuration configuration;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text;

cudaError_t failed(cudaError_t code, const std::string& text) {
  last_text = text;
  return last_error = code;
}

// A line per kernel, those without a launch included: its name, and 1 or 0 for each instruction.
void write_met() {
  std::ofstream file(std::getenv("ZEROFP8_PTX_MET"));
  for (const auto& [name, met] : runtime().met) {
    file << name << " ";
    for (const bool one : met) file << one;
    file << "\n";
  }
}

std::map<std::string, Kernel> read_kernels() {
  std::map<std::string, Kernel> all;
  std::istringstream list(ZEROFP8_PTX_FILES);
  for (std::string path; std::getline(list, path, ':');) {
    std::ifstream file(path);
    if (!file) throw Fault("PTX: cannot read " + path);
    std::stringstream text;
    text << file.rdbuf();
    all.merge(parse(text.str()));
  }
  std::lock_guard lock(runtime().mutex);
  for (const auto& [name, kernel] : all) runtime().met[name].resize(kernel.code.size());
  if (std::getenv("ZEROFP8_PTX_MET") != nullptr) std::atexit(write_met);
  return all;
}

void launch(const std::string& name, const Configuration& on, void** arguments) {
  static const std::map<std::string, Kernel> kernels = read_kernels();
  const auto kernel = kernels.find(name);
  if (kernel == kernels.end()) throw Fault("PTX: there is no kernel " + name);
  if (on.shared != 0 || on.threads.y != 1 || on.threads.z != 1 || on.grid.z != 1) {
    throw Fault("a launch of a shape that is not run here: " + name);
  }
  std::vector<Region> regions;
  unsigned seed = 0;
  {
    std::lock_guard lock(runtime().mutex);
    regions = runtime().memory;
    seed = ++runtime().launches;
  }
  const std::vector<bool> met = run(kernel->second, {.grid_x = on.grid.x,
                                                     .grid_y = on.grid.y,
                                                     .threads = on.threads.x,
                                                     .arguments = arguments,
                                                     .regions = regions,
                                                     .seed = seed});
  std::lock_guard lock(runtime().mutex);
  std::vector<bool>& all = runtime().met[name];
  for (std::size_t i = 0; i < met.size(); ++i) all[i] = all[i] || met[i];
}

}  // namespace

extern "C" {

// What nvcc's objects call.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  std::lock_guard lock(runtime().mutex);
  runtime().names[host] = common_name(name);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, std::size_t shared,
                                     cudaStream_t stream) {
  configuration = {grid, threads, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* threads, std::size_t* shared,
                                       void* stream) {
  *grid = configuration.grid;
  *threads = configuration.threads;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
  std::string name;
  {
    std::lock_guard lock(runtime().mutex);
    name = runtime().names.at(reinterpret_cast<const void*>(kernel));
  }
  try {
    launch(name, {grid, threads, shared, stream}, arguments);
  } catch (const Fault& fault) {
    return failed(cudaErrorIllegalAddress, fault.what());
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "an error of CUDA";
}
const char* cudaGetErrorString(cudaError_t) { return last_text.c_str(); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice, "there is device 0 only");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return failed(cudaErrorInvalidValue, "unknown");
  *value = kMultiprocessors;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  std::lock_guard lock(runtime().mutex);
  if (bytes > kMemory - runtime().used) return failed(cudaErrorMemoryAllocation, "out of memory");
  const std::size_t whole = (bytes + kGap - 1) / kGap * kGap + kGap;
  *data = std::aligned_alloc(kGap, whole);
  if (*data == nullptr) return failed(cudaErrorMemoryAllocation, "out of memory");
  std::memset(*data, 0xA5, whole);
  const auto begin = reinterpret_cast<std::uintptr_t>(*data);
  auto& memory = runtime().memory;
  memory.insert(std::ranges::upper_bound(memory, begin, {}, &Region::begin), {begin, bytes});
  runtime().used += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  std::lock_guard lock(runtime().mutex);
  auto& memory = runtime().memory;
  const auto found =
      std::ranges::find(memory, reinterpret_cast<std::uintptr_t>(data), &Region::begin);
  if (found == memory.end()) return failed(cudaErrorInvalidValue, "not from cudaMalloc");
  runtime().used -= found->bytes;
  memory.erase(found);
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  std::lock_guard lock(runtime().mutex);
  *free = kMemory - runtime().used;
  *total = kMemory;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  *data = std::aligned_alloc(kGap, (bytes + kGap) / kGap * kGap);
  return *data == nullptr ? failed(cudaErrorMemoryAllocation, "out of memory") : cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  *attributes = {};
  attributes->type =
      runtime().contains(data, 1) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t) {
  if (!runtime().contains(data, bytes)) {
    return failed(cudaErrorInvalidValue, fmt::format("{} bytes to set are not there", bytes));
  }
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (runtime().contains(to, bytes) != to_device ||
      runtime().contains(from, bytes) != from_device) {
    return failed(cudaErrorInvalidValue, fmt::format("a copy of {} bytes is not of its kind, {}",
                                                     bytes, static_cast<int>(kind)));
  }
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

}  // extern "C"
