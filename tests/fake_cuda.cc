#include "tests/fake_cuda.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>

namespace zerofp8::test {
namespace {

constexpr int kDevices = 8;
thread_local int current_device = 0;
thread_local bool relaxed = false;  // cudaStreamCaptureModeRelaxed

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, happened = 0;  // how often
};

void await(EventState& event, std::uint64_t version) {
  std::unique_lock lock(event.mutex);
  event.changed.wait(lock, [&] { return event.happened >= version; });
}

class FakeStream {
 public:
  explicit FakeStream(int device) : device_(device), thread_([this] { run(); }) {}
  ~FakeStream() {  // like CUDA's, after what is queued
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  int device() const { return device_; }
  void push(Task task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

 private:
  void run() {
    std::minstd_rand random(static_cast<unsigned>(17 + device_));
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 150));
      task();
      lock.lock();
    }
  }

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

struct FakeEvent {
  int device;
  bool captured = false;  // what was recorded last
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

// What exists, by handle, so that a handle that is gone is recognised.
struct Registry {
  std::mutex mutex;
  std::set<FakeStream*> streams;
  std::set<FakeEvent*> events;
  std::array<std::unique_ptr<FakeStream>, kDevices> default_streams;
  std::array<int, kDevices> records_until_failure{};
  std::array<bool, kDevices> capturing{};
  std::string misuse;
};
Registry& registry() {
  static Registry all;
  return all;
}

FakeStream* find(cudaStream_t handle) {
  std::lock_guard lock(registry().mutex);
  if (handle == nullptr) {
    auto& stream = registry().default_streams[static_cast<std::size_t>(current_device)];
    if (stream == nullptr) stream = std::make_unique<FakeStream>(current_device);
    return stream.get();
  }
  auto* stream = reinterpret_cast<FakeStream*>(handle);
  return registry().streams.contains(stream) ? stream : nullptr;
}

FakeEvent* find(cudaEvent_t handle) {
  std::lock_guard lock(registry().mutex);
  auto* event = reinterpret_cast<FakeEvent*>(handle);
  return registry().events.contains(event) ? event : nullptr;
}

cudaError_t misused(const std::string& what) {
  report_misuse(what);
  return cudaErrorInvalidResourceHandle;
}

}  // namespace

void enqueue(cudaStream_t stream, Task task) {
  FakeStream* found = find(stream);
  if (found == nullptr) return report_misuse("work for a stream that does not exist");
  found->push(std::move(task));
}

void set_capturing(int device, bool capturing) {
  std::lock_guard lock(registry().mutex);
  registry().capturing[static_cast<std::size_t>(device)] = capturing;
}

void synchronize(cudaStream_t stream) {
  const auto reached = std::make_shared<EventState>();
  enqueue(stream, [reached] {
    std::lock_guard lock(reached->mutex);
    reached->happened = 1;
    reached->changed.notify_all();
  });
  await(*reached, 1);
}

int device_of(cudaStream_t stream) {
  const FakeStream* found = find(stream);
  return found == nullptr ? -1 : found->device();
}

void report_misuse(const std::string& what) {
  std::lock_guard lock(registry().mutex);
  registry().misuse += what + "\n";
}

std::string take_misuse() {
  std::lock_guard lock(registry().mutex);
  return std::exchange(registry().misuse, "");
}

void break_event_record(int device, int nth) {
  std::lock_guard lock(registry().mutex);
  registry().records_until_failure[static_cast<std::size_t>(device)] = nth;
}

int live_streams() {
  std::lock_guard lock(registry().mutex);
  return static_cast<int>(registry().streams.size());
}

int live_events() {
  std::lock_guard lock(registry().mutex);
  return static_cast<int>(registry().events.size());
}

}  // namespace zerofp8::test

using namespace zerofp8::test;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "cudaErrorOther";
}
const char* cudaGetErrorString(cudaError_t) { return "fake CUDA error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) report_misuse("a stream that waits for the default one");
  auto* made = new FakeStream(current_device);
  std::lock_guard lock(registry().mutex);
  registry().streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  FakeStream* found = stream == nullptr ? nullptr : find(stream);
  if (found == nullptr) return misused("cudaStreamDestroy of a stream that does not exist");
  {
    std::lock_guard lock(registry().mutex);
    registry().streams.erase(found);
  }
  delete found;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  auto* made = new FakeEvent{current_device};
  std::lock_guard lock(registry().mutex);
  registry().events.insert(made);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  FakeEvent* found = find(event);
  if (found == nullptr) return misused("cudaEventDestroy of an event that does not exist");
  {
    std::lock_guard lock(registry().mutex);
    registry().events.erase(found);
  }
  delete found;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FakeEvent* found = find(event);
  FakeStream* on = find(stream);
  if (found == nullptr || on == nullptr) return misused("cudaEventRecord of what does not exist");
  if (found->device != on->device()) return misused("cudaEventRecord on another device's stream");
  {
    std::lock_guard lock(registry().mutex);
    int& left = registry().records_until_failure[static_cast<std::size_t>(on->device())];
    if (left > 0 && --left == 0) return cudaErrorIllegalAddress;
    found->captured = registry().capturing[static_cast<std::size_t>(on->device())];
  }
  std::uint64_t version = 0;
  {
    std::lock_guard lock(found->state->mutex);
    version = ++found->state->recorded;
  }
  on->push([state = found->state, version] {
    std::lock_guard lock(state->mutex);
    state->happened = version;
    state->changed.notify_all();
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  FakeEvent* found = find(event);
  if (found == nullptr) return misused("cudaEventQuery of an event that does not exist");
  {
    std::lock_guard lock(registry().mutex);
    if (found->captured) {
      registry().misuse += "cudaEventQuery of a captured event\n";
      return cudaErrorCapturedEvent;
    }
    const auto& capturing = registry().capturing;
    if (!relaxed && std::find(capturing.begin(), capturing.end(), true) != capturing.end()) {
      registry().misuse += "cudaEventQuery ends a capture of another thread\n";
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  std::lock_guard lock(found->state->mutex);
  return found->state->happened >= found->state->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  FakeEvent* found = find(event);
  FakeStream* on = find(stream);
  if (found == nullptr || on == nullptr) return misused("cudaStreamWaitEvent: no such thing");
  std::uint64_t version = 0;
  {
    std::lock_guard lock(found->state->mutex);
    version = found->state->recorded;
  }
  if (version == 0) report_misuse("a stream waits for an event that was never recorded");
  on->push([state = found->state, version] { await(*state, version); });
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FakeStream* on = find(stream);
  if (on == nullptr) return misused("cudaStreamIsCapturing: no such stream");
  std::lock_guard lock(registry().mutex);
  *status = registry().capturing[static_cast<std::size_t>(on->device())]
                ? cudaStreamCaptureStatusActive
                : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const bool before = std::exchange(relaxed, *mode == cudaStreamCaptureModeRelaxed);
  *mode = before ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  FakeStream* on = find(stream);
  if (on == nullptr) return misused("cudaMemcpyAsync on a stream that does not exist");
  if (kind != cudaMemcpyDeviceToDevice) report_misuse("cudaMemcpyAsync of another kind");
  on->push([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

}  // extern "C"
