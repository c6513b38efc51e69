// Gathers everything and reduces in rank order: size() times the memory and wire bytes of a ring,
// for the same bits on every rank. Meant for scalars and small control data.
#include <vector>

#include "src/comm/p2p_communicator.h"
#include "src/comm/rank_order.h"

namespace zerofp8 {
template <class T>
void P2pCommunicator::reduce_in_rank_order(std::span<T> data, ReduceOp op) {
  if (size() == 1) return;
  std::vector<T> all(data.size() * static_cast<std::size_t>(size()));
  ExchangePlan plan = gather_plan(Collective::kAllReduce, std::as_bytes(data),
                                  std::as_writable_bytes(std::span(all)),
                                  {.label = op == ReduceOp::kSum ? "sum" : "max"});
  plan.control = true;
  start(std::move(plan))->wait();
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = reduce_strided(all.data() + i, data.size(), size(), op);
  }
}

void P2pCommunicator::all_reduce(std::span<float> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}
void P2pCommunicator::all_reduce(std::span<double> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}
void P2pCommunicator::all_reduce(std::span<std::int32_t> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}
void P2pCommunicator::all_reduce(std::span<std::int64_t> data, ReduceOp op) {
  reduce_in_rank_order(data, op);
}

}  // namespace zerofp8
