// What a CUDA graph does, on the host: between begin() and end() calls are kept instead of run,
// with the arguments that they had; replay() runs them, any number of times. Whatever needs an
// answer or new memory within a capture is a DeviceError, as on CUDA. Works on top of the emulated
// device, whose memory the host cannot touch.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/comm/forwarding_communicator.h"
#include "src/comm/staged_communicator.h"
#include "tests/emulated_device.h"
#include "zerofp8/error.h"

namespace zerofp8::test {

class RecordingDevice final : public Device {
 public:
  RecordingDevice() : inner_(make_emulated_device()), allocator_(*this) {}

  void begin() { recording_ = true; }
  void end() { recording_ = false; }
  void forget() { calls_.clear(); }
  void replay() {
    for (const auto& call : calls_) call();
  }
  void run(std::function<void()> call) { recording_ ? calls_.push_back(std::move(call)) : call(); }
  std::size_t calls() const { return calls_.size(); }
  Device& inner() { return *inner_; }

  std::string name() const override { return "recording"; }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return inner_->host_allocator(); }
  bool is_host() const override { return false; }
  void* stream() const override { return nullptr; }
  bool is_capturing() const override { return recording_; }
  std::optional<std::size_t> free_bytes() const override { return inner_->free_bytes(); }
  std::string fault_of(const void* data) const override { return inner_->fault_of(data); }

  void zero(void* data, std::size_t bytes) override {
    run([=, this] { inner_->zero(data, bytes); });
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    run([=, this] { inner_->copy(to, from, bytes); });
  }
  void copy_many(std::span<const Copy> copies) override {
    run([this, list = std::vector<Copy>(copies.begin(), copies.end())] {
      inner_->copy_many(list);
    });
  }
  void upload(void* to, const void* host, std::size_t bytes) override {
    refuse("an upload");  // of memory that may be gone at the replay
    inner_->upload(to, host, bytes);
  }
  void download(void* host, const void* from, std::size_t bytes) override {
    refuse("a download");
    inner_->download(host, from, bytes);
  }
  void synchronize() override { refuse("a wait for the device"); }

  void recode(const RecodeArgs& a) override { keep(&Device::recode, a); }
  void accumulate(const AccumulateArgs& a) override { keep(&Device::accumulate, a); }
  void decode_sum(const DecodeSumArgs& a) override { keep(&Device::decode_sum, a); }
  void sum_squares(const SquaresArgs& a) override { keep(&Device::sum_squares, a); }
  void adam(const AdamLaunch& a) override { keep(&Device::adam, a); }
  void split_master(const MasterArgs& a) override { keep(&Device::split_master, a); }
  void join_master(const MasterArgs& a) override { keep(&Device::join_master, a); }
  void follow_weights(const FollowArgs& a) override { keep(&Device::follow_weights, a); }
  void make_part(const MakePartArgs& a) override { keep(&Device::make_part, a); }
  void combine_parts(const CombinePartsArgs& a) override { keep(&Device::combine_parts, a); }
  void decide(const DecideArgs& a) override { keep(&Device::decide, a); }

  void refuse(const std::string& what) const {
    if (recording_) throw DeviceError("recording: " + what + " within a capture");
  }

 private:
  class RefusingAllocator final : public Allocator {
   public:
    explicit RefusingAllocator(RecordingDevice& device) : device_(device) {}

   protected:
    void* do_allocate(std::size_t bytes) override {
      device_.refuse("an allocation");
      return device_.inner_->allocator().allocate(Component::kTransient, bytes);
    }
    void do_release(void* data, std::size_t bytes) noexcept override {
      device_.inner_->allocator().release(Component::kTransient, data, bytes);
    }

   private:
    RecordingDevice& device_;
  };

  template <class Args>
  void keep(void (Device::*call)(const Args&), const Args& args) {
    run([=, this] { (inner_.get()->*call)(args); });
  }

  std::unique_ptr<Device> inner_;
  RefusingAllocator allocator_;
  bool recording_ = false;
  std::vector<std::function<void()>> calls_;
};

// Collectives of such a device's memory, which are recorded, too.
class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  RecordingCommunicator(Communicator& comm, RecordingDevice& device)
      : ForwardingCommunicator(&comm), staged_(comm, device.inner()), device_(device) {}
  RecordingCommunicator(std::unique_ptr<Communicator> comm, RecordingDevice& device)
      : ForwardingCommunicator(comm.get()),
        owned_(std::move(comm)),
        staged_(*owned_, device.inner()),
        device_(device) {}

  bool on_device() const override { return true; }
  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    count(options, send.size() - send.size() / static_cast<std::size_t>(size()));
    return start(options,
                 [=, this](const CallOptions& o) { staged_.all_to_all(send, recv, o)->wait(); });
  }
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    count(options, recv.size() - send.size());
    return start(options,
                 [=, this](const CallOptions& o) { staged_.all_gather(send, recv, o)->wait(); });
  }
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override {
    if (rank() == root) count(options, data.size() * static_cast<std::size_t>(size() - 1));
    return start(options,
                 [=, this](const CallOptions& o) { staged_.broadcast(data, root, o)->wait(); });
  }
  // Payloads when they are recorded, as NCCL's are counted when they are launched.
  WireBytes bytes_sent() const override {
    WireBytes bytes = inner_.bytes_sent();
    bytes.payload = sent_;
    return bytes;
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return std::make_unique<RecordingCommunicator>(inner_.split(color, key), device_);
  }

 private:
  class Done final : public Work {
    bool done() const override { return true; }
    void wait() override {}
  };
  template <class Call>
  std::unique_ptr<Work> start(const CallOptions& options, Call call) {
    device_.run([call, options = CallOptions(options), label = std::string(options.label)] {
      CallOptions own = options;
      own.label = label;
      call(own);
    });
    return std::make_unique<Done>();
  }

  void count(const CallOptions& options, std::size_t bytes) {
    sent_[static_cast<std::size_t>(options.dtype)] += bytes;
  }

  std::array<std::uint64_t, kDTypeCount> sent_{};
  std::unique_ptr<Communicator> owned_;
  StagedCommunicator staged_;
  RecordingDevice& device_;
};

}  // namespace zerofp8::test
