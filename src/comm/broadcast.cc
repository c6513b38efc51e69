// The root sends to each rank. Used for initial weights and the like, not in the step, so that one
// hop and a plain error story are worth more than a tree.
#include "src/comm/layout.h"
#include "src/comm/p2p_communicator.h"

namespace zerofp8 {

std::unique_ptr<Work> P2pCommunicator::broadcast(std::span<std::byte> data, int root,
                                                 const CallOptions& options) {
  check_root(root, size(), options.label);
  ExchangePlan plan = new_plan(Collective::kBroadcast, options);
  plan.root = root;
  if (rank() != root) {
    plan.parts.push_back({root, {}, data});
  } else {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != root) plan.parts.push_back({peer, data, {}});
    }
  }
  return start(std::move(plan));
}

}  // namespace zerofp8
