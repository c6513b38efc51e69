#include "src/comm/nccl_api.h"

#include <fmt/format.h>

#include <cstdio>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "zerofp8/error.h"

namespace zerofp8::nccl {
namespace {

using Clock = std::chrono::steady_clock;

// In a thread of its own, whose calls do not end another thread's capture.
template <class Work>
void apart(int device, const Work& work) {
  try {
    std::thread([device, work] {
      cudaSetDevice(device);
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
      work();
    }).detach();
  } catch (const std::system_error&) {  // no more threads
    work();
  }
}

void log(const std::string& text) noexcept { std::fprintf(stderr, "zerofp8: %s\n", text.c_str()); }

}  // namespace

void check(cudaError_t code, const std::string& what) {
  if (code == cudaSuccess) return;
  throw CommError(
      fmt::format("{}: {}, {}", what, cudaGetErrorName(code), cudaGetErrorString(code)));
}

void check(ncclResult_t code, const std::string& what, ncclComm_t comm) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  std::string text = fmt::format("{}: {}", what, ncclGetErrorString(code));
  const char* last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text += fmt::format(" ({})", last);
  throw CommError(text);
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

Selected::Selected(int device) : device_(device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) check(cudaSetDevice(device), fmt::format("cuda:{}", device));
}

Stream::Stream(int device) : device_(device) {
  const Selected selected(device_);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

Stream::~Stream() {
  const cudaError_t code = cudaStreamDestroy(stream_);
  if (code != cudaSuccess) log(fmt::format("cudaStreamDestroy: {}", cudaGetErrorString(code)));
}

Event::Event(int device) : device_(device) {
  const Selected selected(device_);
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

Event::~Event() {
  const cudaError_t code = cudaEventDestroy(event_);
  if (code != cudaSuccess) log(fmt::format("cudaEventDestroy: {}", cudaGetErrorString(code)));
}

void Event::record(cudaStream_t stream) {
  check(cudaEventRecord(event_, stream), "cudaEventRecord");
}

// Each device has a default stream: nullptr is the one of the device that is selected.
void Event::hold_back(cudaStream_t stream) const {
  const Selected selected(device_);
  check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

bool Event::happened() const {
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) {
    cudaGetLastError();  // or the next caller of it would take this for an error of its own
    return false;
  }
  check(code, "what was queued on the device");
  return true;
}

std::shared_ptr<Event> EventPool::take() {
  std::unique_ptr<Event> event;
  {
    std::lock_guard lock(shelf_->mutex);
    if (!shelf_->events.empty()) {
      event = std::move(shelf_->events.back());
      shelf_->events.pop_back();
    }
  }
  if (event == nullptr) event = std::make_unique<Event>(device_);
  return {event.release(), [shelf = shelf_](Event* used) {
            std::lock_guard lock(shelf->mutex);
            shelf->events.emplace_back(used);
          }};
}

Handle::Handle(int device, int ranks, const ncclUniqueId& id, int rank,
               std::chrono::milliseconds timeout)
    : device_(device) {
  const Selected selected(device_);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    check(ncclCommInitRankConfig(&comm_, ranks, id, rank, &config), "ncclCommInitRankConfig");
    if (!await(comm_, timeout, nullptr)) {
      throw CommError(fmt::format("ncclCommInitRankConfig: the ranks have not met within {} s",
                                  std::chrono::duration<double>(timeout).count()));
    }
  } catch (const CommError&) {
    abort();
    throw;
  }
}

// Polls: a non-blocking communicator works in a thread of its own and says so in no other way.
bool Handle::await(ncclComm_t comm, std::chrono::milliseconds timeout,
                   const std::atomic<bool>* given_up) {
  const Clock::time_point deadline = Clock::now() + timeout;
  for (int round = 0;; ++round) {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError", comm);
    check(state, "NCCL", comm);
    if (state != ncclInProgress) return true;
    if (Clock::now() >= deadline || (given_up != nullptr && *given_up)) return false;
    if (round < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(round < 1000 ? 20 : 1000));
    }
  }
}

bool Handle::launch(const Calls& calls, std::chrono::milliseconds timeout,
                    const std::atomic<bool>& given_up) {
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return false;  // aborted since the caller has looked
  const Selected selected(device_);
  calls(comm_);
  return await(comm_, timeout, &given_up);
}

std::string Handle::async_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr) return "";  // launch() looks for itself
  try {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
    check(state, "NCCL", comm_);
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

void Handle::abort() noexcept {
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  const auto end = [comm = std::exchange(comm_, nullptr)] {
    const ncclResult_t code = ncclCommAbort(comm);
    if (code != ncclSuccess && code != ncclInProgress) {
      log(fmt::format("ncclCommAbort: {}", ncclGetErrorString(code)));
    }
  };
  captured_ ? apart(device_, end) : end();
}

// The thread flushes what is still under way, waits for the graphs and frees the communicator; the
// caller waits for it, but not for a graph that stays.
void Handle::finish_captured(std::chrono::milliseconds timeout) noexcept {
  const auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    apart(device_, [comm = std::exchange(comm_, nullptr), timeout, ended] {
      try {
        check(ncclCommFinalize(comm), "ncclCommFinalize", comm);
        if (await(comm, timeout, nullptr)) {
          check(ncclCommDestroy(comm), "ncclCommDestroy");
        } else {
          ncclCommAbort(comm);
        }
      } catch (const std::exception& error) {
        log(error.what());
      }
      ended->set_value();
    });
  }
  end.wait_for(timeout);
}

void Handle::finish(std::chrono::milliseconds timeout) noexcept {
  if (captured_) return finish_captured(timeout);
  try {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    const Selected selected(device_);
    check(ncclCommFinalize(comm_), "ncclCommFinalize", comm_);
    if (await(comm_, timeout, nullptr)) {
      check(ncclCommDestroy(std::exchange(comm_, nullptr)), "ncclCommDestroy");
      return;
    }
    log("ncclCommFinalize: other ranks keep it waiting; aborted");
  } catch (const std::exception& error) {
    log(error.what());
  }
  abort();
}

GroupedCalls::GroupedCalls() { check(ncclGroupStart(), "ncclGroupStart"); }

GroupedCalls::~GroupedCalls() {
  if (open_) ncclGroupEnd();
}

void GroupedCalls::end(ncclComm_t comm) {
  open_ = false;
  check(ncclGroupEnd(), "ncclGroupEnd", comm);
}

}  // namespace zerofp8::nccl
