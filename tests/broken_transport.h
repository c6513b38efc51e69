// A transport that breaks in the chosen way on the rank that uses it, for tests of what others then
// see.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "src/comm/transport.h"
#include "zerofp8/error.h"

namespace zerofp8::test {

class BrokenTransport final : public Transport {
 public:
  enum class Way { kNotAtAll, kPostThrows, kTestThrows, kPayloadIsLost };
  BrokenTransport(std::shared_ptr<Transport> inner, Way way,
                  std::size_t chunk_bytes = kDefaultChunkBytes)
      : Transport(chunk_bytes), inner_(std::move(inner)), way_(way) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string backend() const override { return "broken"; }
  int max_tag() const override { return inner_->max_tag(); }
  std::unique_ptr<Request> post_send(int peer, int tag, std::span<const std::byte> bytes) override {
    const bool payload = tag % 2 == 1;
    if (payload && way_ == Way::kPostThrows) throw std::runtime_error("cable cut");
    if (payload && way_ == Way::kTestThrows) return std::make_unique<ThrowingRequest>();
    if (payload && way_ == Way::kPayloadIsLost) return std::make_unique<EndlessRequest>();
    return inner_->post_send(peer, tag, bytes);
  }
  std::unique_ptr<Request> post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    return inner_->post_recv(peer, tag, bytes);
  }
  void idle(std::chrono::microseconds waited) override { inner_->idle(waited); }
  void wake() override { inner_->wake(); }

 private:
  struct ThrowingRequest final : Request {
    bool test() override { throw CommError("link went down"); }
  };
  struct EndlessRequest final : Request {
    bool test() override { return false; }
  };
  std::shared_ptr<Transport> inner_;
  const Way way_;
};

}  // namespace zerofp8::test
