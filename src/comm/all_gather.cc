// all_gather and, with the same layout, gather_control. Every rank sends its part straight to every
// other: the same bytes per rank as a ring in one hop instead of size() - 1.
#include <fmt/format.h>

#include "src/comm/p2p_communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {

ExchangePlan P2pCommunicator::gather_plan(Collective kind, std::span<const std::byte> send,
                                          std::span<std::byte> recv,
                                          const CallOptions& options) const {
  const auto ranks = static_cast<std::size_t>(size());
  // Division, because ranks * send.size() could wrap.
  if (recv.size() % ranks != 0 || recv.size() / ranks != send.size()) {
    throw ArgumentError(fmt::format(
        "{} '{}': given {} bytes to send and {} to receive on {} ranks; recv must hold one part of "
        "send's size for each rank",
        to_string(kind), options.label, send.size(), recv.size(), size()));
  }
  const std::span<std::byte> own = equal_part(recv, rank(), size());
  if (send.data() != own.data() && overlap(send, recv)) {
    throw ArgumentError(
        fmt::format("{} '{}': send overlaps recv; give it a separate buffer or exactly this rank's "
                    "part of recv",
                    to_string(kind), options.label));
  }
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
