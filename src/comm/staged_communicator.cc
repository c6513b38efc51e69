#include "src/comm/staged_communicator.h"

#include <exception>
#include <utility>

namespace zerofp8 {
namespace {

// Its host buffers live until the collective inside has ended.
class StagedWork final : public Work {
 public:
  StagedWork(Device& device, PooledBuffer sent, PooledBuffer received, std::span<std::byte> result)
      : device_(device), sent_(std::move(sent)), received_(std::move(received)), result_(result) {}
  ~StagedWork() override {
    try {
      if (inner_ != nullptr && !copied_) wait();
    } catch (const std::exception&) {  // shows in the next call
    }
  }
  std::byte* sent() { return sent_.data(); }
  std::byte* received() { return received_ ? received_.data() : sent_.data(); }
  void start(std::unique_ptr<Work> inner) { inner_ = std::move(inner); }

  bool done() const override { return inner_->done(); }
  void wait() override {
    inner_->wait();
    if (std::exchange(copied_, true)) return;
    device_.upload(result_.data(), received(), result_.size());
    device_.synchronize();  // the buffer may be written to by the host after this
  }

 private:
  Device& device_;
  PooledBuffer sent_, received_;
  std::span<std::byte> result_;
  std::unique_ptr<Work> inner_;  // ends before the buffers do
  bool copied_ = false;
};

// On one rank nothing travels, and the host has nothing to wait for.
class CopiedWork final : public Work {
 public:
  CopiedWork(Device& device, std::span<const std::byte> from, std::span<std::byte> to) {
    if (from.data() != to.data()) device.copy(to.data(), from.data(), from.size());
  }
  bool done() const override { return true; }
  void wait() override {}
};

CallOptions without_stream(CallOptions options) {
  options.stream = nullptr;
  return options;
}

}  // namespace

StagedCommunicator::StagedCommunicator(Communicator& inner, Device& device)
    : ForwardingCommunicator(&inner), device_(device), pool_(device.host_allocator()) {}

PooledBuffer StagedCommunicator::on_host(std::span<const std::byte> data) {
  PooledBuffer memory = pool_.acquire(data.size());
  device_.download(memory.data(), data.data(), data.size());
  return memory;
}

std::unique_ptr<Work> StagedCommunicator::all_to_all(std::span<const std::byte> send,
                                                     std::span<std::byte> recv,
                                                     const CallOptions& options) {
  if (size() == 1) return std::make_unique<CopiedWork>(device_, send, recv);
  auto work =
      std::make_unique<StagedWork>(device_, on_host(send), pool_.acquire(recv.size()), recv);
  work->start(inner_.all_to_all({work->sent(), send.size()}, {work->received(), recv.size()},
                                without_stream(options)));
  return work;
}

std::unique_ptr<Work> StagedCommunicator::all_gather(std::span<const std::byte> send,
                                                     std::span<std::byte> recv,
                                                     const CallOptions& options) {
  if (size() == 1) return std::make_unique<CopiedWork>(device_, send, recv);
  auto work =
      std::make_unique<StagedWork>(device_, on_host(send), pool_.acquire(recv.size()), recv);
  work->start(inner_.all_gather({work->sent(), send.size()}, {work->received(), recv.size()},
                                without_stream(options)));
  return work;
}

std::unique_ptr<Work> StagedCommunicator::broadcast(std::span<std::byte> data, int root,
                                                    const CallOptions& options) {
  if (size() == 1) return std::make_unique<CopiedWork>(device_, data, data);
  auto work = std::make_unique<StagedWork>(device_, on_host(data), PooledBuffer{}, data);
  work->start(inner_.broadcast({work->sent(), data.size()}, root, without_stream(options)));
  return work;
}

}  // namespace zerofp8
