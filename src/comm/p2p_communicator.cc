#include "src/comm/p2p_communicator.h"

#include <fmt/format.h>

#include <numeric>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr std::chrono::minutes kDefaultTimeout{10};

// A collective that was complete when the call returned.
class FinishedWork final : public Work {
 public:
  bool done() const override { return true; }
  void wait() override {}
};

}  // namespace

P2pCommunicator::P2pCommunicator(std::shared_ptr<Progress> progress, Group group, int context,
                                 std::chrono::milliseconds timeout)
    : progress_(std::move(progress)),
      group_(std::move(group)),
      timeout_(timeout),
      channel_(progress_->open(group_, context)) {}

P2pCommunicator::~P2pCommunicator() { progress_->close(channel_); }

ExchangePlan P2pCommunicator::new_plan(Collective kind, const CallOptions& options) const {
  if (options.stream != nullptr) {
    throw ArgumentError(
        fmt::format("{} '{}': given a device stream; the {} backend moves host memory and takes "
                    "stream = nullptr",
                    to_string(kind), options.label, backend()));
  }
  ExchangePlan plan;
  plan.kind = kind;
  plan.label = options.label;
  plan.dtype = options.dtype;
  plan.timeout = timeout_;
  return plan;
}

std::unique_ptr<Work> P2pCommunicator::start(ExchangePlan plan) {
  if (size() == 1) {
    if (plan.copy_own) plan.copy_own();
    return std::make_unique<FinishedWork>();
  }
  return std::make_unique<P2pWork>(progress_->submit(*channel_, std::move(plan)));
}

std::unique_ptr<Communicator> make_p2p_communicator(std::shared_ptr<Transport> transport) {
  Group world{transport->rank(), std::vector<int>(static_cast<std::size_t>(transport->size()))};
  std::iota(world.members.begin(), world.members.end(), 0);
  auto progress = std::make_shared<Progress>(std::move(transport));
  return std::make_unique<P2pCommunicator>(std::move(progress), std::move(world), 0,
                                           kDefaultTimeout);
}

}  // namespace zerofp8
