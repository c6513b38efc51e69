// NCCL communicators on ranks that are threads, over the fakes, and what every test of them must
// leave behind: nothing.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/comm/forwarding_communicator.h"
#include "tests/comm_checks.h"
#include "tests/fake_nccl.h"
#include "tests/thread_ranks.h"
#include "zerofp8/communicator.h"

namespace zerofp8::test {

class NcclTest : public testing::Test {
 protected:
  void SetUp() override { alarm(60); }  // a hang ends the program
  void TearDown() override {
    mend();
    EXPECT_EQ(take_misuse(), "");
    EXPECT_EQ(mismatched_calls(), mismatched_ + expected_mismatches_);
    // Those that were captured are ended by threads of their own.
    for (int i = 0; i < 1000 && live_comms() != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(live_comms(), 0);
    EXPECT_EQ(live_streams(), 0);
    EXPECT_EQ(live_events(), 0);
    kept_.clear();
    alarm(0);
  }
  // Zeros that live as long as the test: after a failure streams may still be busy with buffers.
  Bytes& keep(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    return kept_.emplace_back(bytes);
  }
  void expect_mismatches(int kernels) { expected_mismatches_ = kernels; }

 private:
  const int mismatched_ = mismatched_calls();
  int expected_mismatches_ = 0;
  std::mutex mutex_;
  std::deque<Bytes> kept_;
};

// Rank r has device r. The communicators are made all at once, which is collective.
inline std::vector<std::unique_ptr<Communicator>> make_nccl_ranks(int size) {
  auto controls = make_thread_communicators(size);
  std::vector<std::unique_ptr<Communicator>> comms(controls.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < comms.size(); ++r) {
    threads.emplace_back(
        [&, r] { comms[r] = make_nccl_communicator(std::move(controls[r]), static_cast<int>(r)); });
  }
  for (std::thread& thread : threads) thread.join();
  return comms;
}

template <class Fn>
void run_nccl(int size, const Fn& fn) {
  throw_first(run_each(make_nccl_ranks(size), fn));
}

// A stream of the test on the device of a rank; waits for what is queued when it ends.
class CallersStream {
 public:
  explicit CallersStream(int device) {
    cudaSetDevice(device);
    cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    cudaSetDevice(0);
  }
  ~CallersStream() { cudaStreamDestroy(stream_); }
  CallersStream(const CallersStream&) = delete;
  CallersStream& operator=(const CallersStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Waits until the device has ended the work or the communicator has failed.
inline void wait_on_host(const Work& work) {
  while (!work.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Lets the checks for host memory judge a device communicator: its wait() waits for the default
// stream of the device, too.
class HostView final : public ForwardingCommunicator {
 public:
  HostView(Communicator& inner, int device) : ForwardingCommunicator(&inner), device_(device) {}
  HostView(std::unique_ptr<Communicator> inner, int device)
      : ForwardingCommunicator(inner.get()), owned_(std::move(inner)), device_(device) {}

  bool on_device() const override { return false; }
  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    return view(inner_.all_to_all(send, recv, options));
  }
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    return view(inner_.all_gather(send, recv, options));
  }
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override {
    return view(inner_.broadcast(data, root, options));
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return std::make_unique<HostView>(inner_.split(color, key), device_);
  }

 private:
  class HostWork final : public Work {
   public:
    HostWork(std::unique_ptr<Work> inner, int device) : inner_(std::move(inner)), device_(device) {}
    ~HostWork() override { wait_for_device(); }
    bool done() const override { return inner_->done(); }
    void wait() override {
      inner_->wait();
      wait_for_device();
    }

   private:
    void wait_for_device() {
      cudaSetDevice(device_);
      synchronize(nullptr);
      cudaSetDevice(0);
    }
    std::unique_ptr<Work> inner_;
    int device_;
  };
  std::unique_ptr<Work> view(std::unique_ptr<Work> work) {
    return std::make_unique<HostWork>(std::move(work), device_);
  }

  std::unique_ptr<Communicator> owned_;
  int device_;
};

}  // namespace zerofp8::test
