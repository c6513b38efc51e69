// Memory and stream of one CUDA device; the kernels are in cuda_ops.cu.
#include <cuda_runtime_api.h>

#include <cstring>

#include "kernels/cuda_ops.h"
#include "zerofp8/device.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

void check(cudaError_t code, const std::string& what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would be blamed for it
  throw DeviceError(what + ": " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code));
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Said before CUDA says so: its own error would end the capture without naming a cause.
void refuse_capture(cudaStream_t stream, const std::string& what) {
  if (!is_capturing(stream)) return;
  throw DeviceError(what +
                    " while its stream is captured into a graph; make the optimizer capturable, "
                    "run one or more whole steps before the capture, and ask for results after it; "
                    "communicators of host memory (MPI, gloo) cannot be captured, NCCL can");
}

// Selects a device for this thread, and what was selected before when it ends. Threads that have
// selected it already, as programs with one device do at their start, are left alone: going back to
// another device would make a context there.
class Selected {
 public:
  explicit Selected(int index) : index_(index) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != index) check(cudaSetDevice(index), "cuda:" + std::to_string(index));
  }
  ~Selected() {
    if (before_ != index_) cudaSetDevice(before_);
  }
  Selected(const Selected&) = delete;
  Selected& operator=(const Selected&) = delete;

 private:
  int index_, before_ = 0;
};

class CudaAllocator final : public Allocator {
 public:
  CudaAllocator(int index, cudaStream_t stream) : index_(index), stream_(stream) {}

 protected:
  void* do_allocate(std::size_t bytes) override {
    const Selected selected(index_);
    refuse_capture(stream_, "cuda:" + std::to_string(index_) + ": " + std::to_string(bytes) +
                                " bytes would be allocated");
    void* data = nullptr;
    const cudaError_t code = cudaMalloc(&data, bytes);
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // not sticky: the next call may succeed
      std::size_t free = 0, total = 0;
      check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      throw DeviceError("cuda:" + std::to_string(index_) + ": " + std::to_string(bytes) +
                        " bytes asked for, " + std::to_string(free) + " of " +
                        std::to_string(total) + " are free; lower the memory that the plan needs");
    }
    check(code, "cudaMalloc of " + std::to_string(bytes) + " bytes");
    const cudaError_t cleared = cudaMemsetAsync(data, 0, bytes, stream_);
    if (cleared != cudaSuccess) cudaFree(data);
    check(cleared, "cudaMemset");
    return data;
  }
  void do_release(void* data, std::size_t) noexcept override {
    int before = index_;
    cudaGetDevice(&before);
    if (before != index_) cudaSetDevice(index_);  // waits for what is queued there
    cudaFree(data);
    if (before != index_) cudaSetDevice(before);
  }

 private:
  int index_;
  cudaStream_t stream_;
};

// Host memory that the device copies from and to by itself.
class PinnedAllocator final : public Allocator {
 public:
  explicit PinnedAllocator(int index) : index_(index) {}

 protected:
  void* do_allocate(std::size_t bytes) override {
    const Selected selected(index_);
    void* data = nullptr;
    check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable),
          "cudaHostAlloc of " + std::to_string(bytes) + " bytes");
    std::memset(data, 0, bytes);
    return data;
  }
  void do_release(void* data, std::size_t) noexcept override { cudaFreeHost(data); }

 private:
  int index_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, void* stream)
      : index_(index),
        stream_(static_cast<cudaStream_t>(stream)),
        allocator_(index, static_cast<cudaStream_t>(stream)),
        pinned_(index) {
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index), name());
    constexpr unsigned kBlocksEach = 8;  // as many as fit at 256 threads of 32 registers
    on_ = {stream, static_cast<unsigned>(multiprocessors) * kBlocksEach};
  }
  std::string name() const override { return "cuda:" + std::to_string(index_); }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return pinned_; }
  bool is_host() const override { return false; }
  void* stream() const override { return stream_; }
  bool is_capturing() const override {
    const Selected selected(index_);
    return zerofp8::is_capturing(stream_);
  }
  std::optional<std::size_t> free_bytes() const override {
    const Selected selected(index_);
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), name() + ": cudaMemGetInfo");
    return free;
  }
  std::string fault_of(const void* data) const override {
    const Selected selected(index_);
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, data), name() + ": cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeManaged) return "";
    if (attributes.type != cudaMemoryTypeDevice) return "is in host memory";
    if (attributes.device == index_) return "";
    return "is on cuda:" + std::to_string(attributes.device);
  }

  void zero(void* data, std::size_t bytes) override {
    if (bytes == 0) return;
    const Selected selected(index_);
    check(cudaMemsetAsync(data, 0, bytes, stream_), name() + ": zero");
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    transfer(to, from, bytes, cudaMemcpyDeviceToDevice);
  }
  void copy_many(std::span<const Copy> copies) override {
    const Selected selected(index_);
    check(static_cast<cudaError_t>(cuda::copy_many(copies, on_)), name() + ": copies");
  }
  void upload(void* to, const void* host, std::size_t bytes) override {
    transfer(to, host, bytes, cudaMemcpyHostToDevice);
  }
  void download(void* host, const void* from, std::size_t bytes) override {
    const Selected selected(index_);
    refuse_capture(stream_, name() + ": a copy to the host");
    transfer(host, from, bytes, cudaMemcpyDeviceToHost);
    synchronize();
  }
  void synchronize() override {
    const Selected selected(index_);  // the default stream is the selected device's
    refuse_capture(stream_, name() + ": the host would wait for the device");
    check(cudaStreamSynchronize(stream_), name() + ": what was queued");
  }

  void recode(const RecodeArgs& a) override { launch("recode", cuda::recode, a); }
  void accumulate(const AccumulateArgs& a) override { launch("accumulate", cuda::accumulate, a); }
  void decode_sum(const DecodeSumArgs& a) override { launch("decode_sum", cuda::decode_sum, a); }
  void sum_squares(const SquaresArgs& a) override { launch("sum_squares", cuda::sum_squares, a); }
  void adam(const AdamLaunch& a) override { launch("adam", cuda::adam, a); }
  void split_master(const MasterArgs& a) override { launch("split_master", cuda::split_master, a); }
  void join_master(const MasterArgs& a) override { launch("join_master", cuda::join_master, a); }
  void follow_weights(const FollowArgs& a) override {
    launch("follow_weights", cuda::follow_weights, a);
  }
  void make_part(const MakePartArgs& a) override { launch("make_part", cuda::make_part, a); }
  void combine_parts(const CombinePartsArgs& a) override {
    launch("combine_parts", cuda::combine_parts, a);
  }
  void decide(const DecideArgs& a) override { launch("decide", cuda::decide, a); }

 private:
  void transfer(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return;
    const Selected selected(index_);
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_),
          name() + ": copy of " + std::to_string(bytes) + " bytes");
  }
  template <class Args>
  void launch(const char* kernel, int (*run)(const Args&, const cuda::LaunchOn&),
              const Args& args) {
    const Selected selected(index_);
    check(static_cast<cudaError_t>(run(args, on_)), name() + ": " + kernel);
  }

  int index_;
  cudaStream_t stream_;
  CudaAllocator allocator_;
  PinnedAllocator pinned_;
  cuda::LaunchOn on_;
};

}  // namespace

std::string why_no_cuda(int index) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) return std::string("CUDA cannot be used: ") + cudaGetErrorString(code);
  if (index < 0 || index >= count) {
    return "there is no cuda:" + std::to_string(index) +
           "; CUDA devices here: " + std::to_string(count);
  }
  return "";
}

std::unique_ptr<Device> make_cuda_device(int index, void* stream) {
  const std::string why = why_no_cuda(index);
  if (!why.empty()) throw DeviceError(why);
  return std::make_unique<CudaDevice>(index, stream);
}

}  // namespace zerofp8
