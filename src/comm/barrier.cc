#include "src/comm/p2p_communicator.h"

namespace zerofp8 {

// An exchange of nothing: it ends when the hello of every rank has come.
void P2pCommunicator::barrier(std::chrono::milliseconds timeout) {
  ExchangePlan plan = new_plan(Collective::kBarrier, {.label = "barrier"});
  plan.control = true;
  plan.timeout = timeout;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) plan.parts.push_back({peer, {}, {}});
  }
  start(std::move(plan))->wait();
}

}  // namespace zerofp8
