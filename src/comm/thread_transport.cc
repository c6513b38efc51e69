#include "src/comm/thread_transport.h"

#include <fmt/format.h>

#include <limits>

#include "src/comm/p2p_communicator.h"
#include "src/comm/thread_hub.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

class ThreadRequest final : public Request {
 public:
  ThreadRequest(std::shared_ptr<ThreadHub> hub, int from, int to,
                std::shared_ptr<ThreadMessage> message)
      : hub_(std::move(hub)), from_(from), to_(to), message_(std::move(message)) {}
  ~ThreadRequest() override { hub_->withdraw(from_, to_, message_); }
  bool test() override { return hub_->test(from_, to_, *message_); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  const int from_, to_;
  std::shared_ptr<ThreadMessage> message_;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadHub> hub, int rank, std::size_t chunk_bytes)
      : Transport(chunk_bytes), hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  std::string backend() const override { return "threads"; }
  int max_tag() const override { return std::numeric_limits<int>::max(); }

  std::unique_ptr<Request> post_send(int peer, int tag, std::span<const std::byte> bytes) override {
    return std::make_unique<ThreadRequest>(hub_, rank_, peer, hub_->send(rank_, peer, tag, bytes));
  }
  std::unique_ptr<Request> post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    return std::make_unique<ThreadRequest>(hub_, peer, rank_, hub_->recv(peer, rank_, tag, bytes));
  }
  // Each arrival rings, so the limit only serves the clock of time-outs.
  void idle(std::chrono::microseconds) override { hub_->wait(rank_, std::chrono::milliseconds(5)); }
  void wake() override { hub_->ring(rank_); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  const int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_thread_transports(int size, std::size_t chunk_bytes) {
  if (size < 1 || chunk_bytes < 1) {
    throw ArgumentError(fmt::format(
        "thread communicators: given {} ranks, messages of {} bytes; allowed: 1 or more of each",
        size, chunk_bytes));
  }
  auto hub = std::make_shared<ThreadHub>(size);
  std::vector<std::shared_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_shared<ThreadTransport>(hub, rank, chunk_bytes));
  }
  return transports;
}

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     std::size_t chunk_bytes) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (std::shared_ptr<Transport>& transport : make_thread_transports(size, chunk_bytes)) {
    communicators.push_back(make_p2p_communicator(std::move(transport)));
  }
  return communicators;
}

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size) {
  return make_thread_communicators(size, kDefaultChunkBytes);
}

}  // namespace zerofp8
