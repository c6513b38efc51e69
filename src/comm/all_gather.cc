// all_gather and, with the same layout, gather_control. Every rank sends its part straight to every
// other: the same bytes per rank as a ring in one hop instead of size() - 1.
#include "src/comm/layout.h"
#include "src/comm/p2p_communicator.h"

namespace zerofp8 {

ExchangePlan P2pCommunicator::gather_plan(Collective kind, std::span<const std::byte> send,
                                          std::span<std::byte> recv,
                                          const CallOptions& options) const {
  check_gather(kind, send, recv, rank(), size(), options.label);
  const std::span<std::byte> own = equal_part(recv, rank(), size());
  ExchangePlan plan = new_plan(kind, options);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) plan.parts.push_back({peer, send, equal_part(recv, peer, size())});
  }
  plan.copy_own = [send, own] { copy_bytes(send, own); };
  return plan;
}

std::unique_ptr<Work> P2pCommunicator::all_gather(std::span<const std::byte> send,
                                                  std::span<std::byte> recv,
                                                  const CallOptions& options) {
  return start(gather_plan(Collective::kAllGather, send, recv, options));
}

void P2pCommunicator::gather_control(std::span<const std::byte> send, std::span<std::byte> recv) {
  ExchangePlan plan = gather_plan(Collective::kGatherControl, send, recv, {.label = "control"});
  plan.control = true;
  start(std::move(plan))->wait();
}

}  // namespace zerofp8
