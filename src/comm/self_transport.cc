// One rank without a launcher. It has no peers, so no message is ever posted.
#include <memory>

#include "src/comm/p2p_communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

class SelfTransport final : public Transport {
 public:
  SelfTransport() : Transport(kDefaultChunkBytes) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string backend() const override { return "self"; }
  int max_tag() const override { return 1 << 30; }
  std::unique_ptr<Request> post_send(int, int, std::span<const std::byte>) override {
    throw ArgumentError("the self communicator has no other rank to send to");
  }
  std::unique_ptr<Request> post_recv(int, int, std::span<std::byte>) override {
    throw ArgumentError("the self communicator has no other rank to receive from");
  }
  void idle(std::chrono::microseconds) override {}
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator() {
  return make_p2p_communicator(std::make_shared<SelfTransport>());
}

}  // namespace zerofp8
