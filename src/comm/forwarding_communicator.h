// A communicator that passes every call on, for those that change only some of them.
#pragma once

#include <memory>
#include <string>

#include "zerofp8/communicator.h"

namespace zerofp8 {

class ForwardingCommunicator : public Communicator {
 public:
  // `inner` outlives it. A pointer: a reference to one of these would be copied from.
  explicit ForwardingCommunicator(Communicator* inner) : inner_(*inner) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string backend() const override { return inner_.backend(); }
  bool on_device() const override { return inner_.on_device(); }
  std::string failure() const override { return inner_.failure(); }
  void watch(StreamHandle stream) override { inner_.watch(stream); }

  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    return inner_.all_to_all(send, recv, options);
  }
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    return inner_.all_gather(send, recv, options);
  }
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override {
    return inner_.broadcast(data, root, options);
  }
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
  std::unique_ptr<Communicator> split(int color, int key) override {
    return inner_.split(color, key);
  }

  void set_timeout(std::chrono::milliseconds timeout) override { inner_.set_timeout(timeout); }
  std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  WireBytes bytes_sent() const override { return inner_.bytes_sent(); }

 protected:
  Communicator& inner_;
};

}  // namespace zerofp8
