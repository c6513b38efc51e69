// What the NCCL communicator needs of CUDA and NCCL, with owners for what must be given back. The
// only place that sees their headers. Every code that these libraries return goes through check().
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zerofp8::nccl {

// Throw CommError. `comm` adds what NCCL wrote last about it; ncclInProgress is no error: it is
// waited for where the result is needed.
void check(cudaError_t code, const std::string& what);
void check(ncclResult_t code, const std::string& what, ncclComm_t comm = nullptr);

// Whether what is queued on the stream is captured into a graph.
bool is_captured(cudaStream_t stream);

// Selects a device for this thread, and what was selected before when it ends. Threads that have
// selected it already are left alone: selecting makes a context.
class Selected {
 public:
  explicit Selected(int device);
  ~Selected() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  Selected(const Selected&) = delete;
  Selected& operator=(const Selected&) = delete;

 private:
  int device_, before_ = 0;
};

// Not ordered with the legacy default stream, unless by events.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream);           // with the device selected, if it is nullptr
  void hold_back(cudaStream_t stream) const;  // until what was recorded has happened
  bool happened() const;

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

// Events are used again: making one takes a lock of the driver. An event may go back as soon as
// nobody asks about it: streams that wait for it keep to what was recorded when they were told to.
class EventPool {
 public:
  explicit EventPool(int device) : shelf_(std::make_shared<Shelf>()), device_(device) {}
  std::shared_ptr<Event> take();

 private:
  struct Shelf {
    std::mutex mutex;
    std::vector<std::unique_ptr<Event>> events;
  };
  std::shared_ptr<Shelf> shelf_;  // outlives the pool with the last event
  int device_;
};

// One ncclComm_t in non-blocking mode. For one caller and a watchdog beside it.
class Handle {
 public:
  using Calls = std::function<void(ncclComm_t)>;

  // Returns when all ranks have met. Throws CommError, also when they have not within `timeout`.
  Handle(int device, int ranks, const ncclUniqueId& id, int rank,
         std::chrono::milliseconds timeout);
  ~Handle() { abort(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Makes the calls and returns when NCCL has put all of them onto the stream: before that an event
  // would be recorded ahead of them. False if that has not happened within `timeout` or when
  // `given_up` was set.
  bool launch(const Calls& calls, std::chrono::milliseconds timeout,
              const std::atomic<bool>& given_up);
  // A graph has captured calls of it. NCCL frees a communicator when the last such graph is gone
  // and lets who asks for it wait so long: from now on abort() and finish() let a thread do that.
  void set_captured() { captured_ = true; }
  // What NCCL reports of its own accord; empty where it is well, or busy in launch().
  std::string async_error();
  // Ends its kernels, finished or not, and frees it. May be called again.
  void abort() noexcept;
  // Waits for its kernels and the other ranks and frees it; aborts where that takes longer.
  void finish(std::chrono::milliseconds timeout) noexcept;

 private:
  static bool await(ncclComm_t comm, std::chrono::milliseconds timeout,
                    const std::atomic<bool>* given_up);
  void finish_captured(std::chrono::milliseconds timeout) noexcept;

  const int device_;
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  std::atomic<bool> captured_{false};
};

// ncclGroupStart and ncclGroupEnd, the latter also when a call between them throws: the group is a
// state of the thread.
class GroupedCalls {
 public:
  GroupedCalls();
  ~GroupedCalls();
  GroupedCalls(const GroupedCalls&) = delete;
  GroupedCalls& operator=(const GroupedCalls&) = delete;
  void end(ncclComm_t comm);

 private:
  bool open_ = true;
};

}  // namespace zerofp8::nccl
