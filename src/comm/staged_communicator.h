// A communicator that moves host memory, for a device whose memory the host cannot read: payloads
// are copied to the host before they travel and to the device afterwards. Bits and byte counters
// are those of the communicator inside.
#pragma once

#include <memory>

#include "src/comm/buffer_pool.h"
#include "zerofp8/communicator.h"
#include "zerofp8/device.h"

namespace zerofp8 {

class StagedCommunicator final : public Communicator {
 public:
  // Both outlive it.
  StagedCommunicator(Communicator& inner, Device& device);

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string backend() const override { return inner_.backend(); }
  bool on_device() const override { return true; }

  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override;
  void all_reduce(std::span<float> data, ReduceOp op) override { inner_.all_reduce(data, op); }
  void all_reduce(std::span<double> data, ReduceOp op) override { inner_.all_reduce(data, op); }
  void all_reduce(std::span<std::int32_t> data, ReduceOp op) override {
    inner_.all_reduce(data, op);
  }
  void all_reduce(std::span<std::int64_t> data, ReduceOp op) override {
    inner_.all_reduce(data, op);
  }
  void gather_control(std::span<const std::byte> send, std::span<std::byte> recv) override {
    inner_.gather_control(send, recv);
  }
  void barrier(std::chrono::milliseconds timeout) override { inner_.barrier(timeout); }
  // Of host memory, as the one inside.
  std::unique_ptr<Communicator> split(int color, int key) override;

  void set_timeout(std::chrono::milliseconds timeout) override { inner_.set_timeout(timeout); }
  std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  WireBytes bytes_sent() const override { return inner_.bytes_sent(); }

 private:
  PooledBuffer on_host(std::span<const std::byte> data);

  Communicator& inner_;
  Device& device_;
  BufferPool pool_;
};

}  // namespace zerofp8
