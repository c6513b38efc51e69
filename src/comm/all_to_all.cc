#include "src/comm/layout.h"
#include "src/comm/p2p_communicator.h"

namespace zerofp8 {

std::unique_ptr<Work> P2pCommunicator::all_to_all(std::span<const std::byte> send,
                                                  std::span<std::byte> recv,
                                                  const CallOptions& options) {
  check_all_to_all(send, recv, size(), options.label);
  ExchangePlan plan = new_plan(Collective::kAllToAll, options);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    plan.parts.push_back({peer, equal_part(send, peer, size()), equal_part(recv, peer, size())});
  }
  plan.copy_own = [own_send = equal_part(send, rank(), size()),
                   own_recv = equal_part(recv, rank(), size())] { copy_bytes(own_send, own_recv); };
  return start(std::move(plan));
}

}  // namespace zerofp8
