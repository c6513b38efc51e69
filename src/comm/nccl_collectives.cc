// The collectives as NCCL has them. Payloads are bytes: NCCL never sees what they stand for.
#include "src/comm/layout.h"
#include "src/comm/nccl_communicator.h"

namespace zerofp8 {

std::unique_ptr<Work> NcclCommunicator::all_to_all(std::span<const std::byte> send,
                                                   std::span<std::byte> recv,
                                                   const CallOptions& options) {
  check_all_to_all(send, recv, size_, options.label);
  const std::size_t part = send.size() / static_cast<std::size_t>(size_);
  const auto exchange = [=, this](ncclComm_t comm, cudaStream_t stream) {
    nccl::GroupedCalls group;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      nccl::check(
          ncclSend(equal_part(send, peer, size_).data(), part, ncclUint8, peer, comm, stream),
          "ncclSend", comm);
      nccl::check(
          ncclRecv(equal_part(recv, peer, size_).data(), part, ncclUint8, peer, comm, stream),
          "ncclRecv", comm);
    }
    group.end(comm);
  };
  const NcclCall call = new_call(Collective::kAllToAll, part, send.size() - part, options);
  return start({call, equal_part(send, rank_, size_), equal_part(recv, rank_, size_), exchange},
               options);
}

std::unique_ptr<Work> NcclCommunicator::all_gather(std::span<const std::byte> send,
                                                   std::span<std::byte> recv,
                                                   const CallOptions& options) {
  check_gather(Collective::kAllGather, send, recv, rank_, size_, options.label);
  const auto gather = [=](ncclComm_t comm, cudaStream_t stream) {
    nccl::check(ncclAllGather(send.data(), recv.data(), send.size(), ncclUint8, comm, stream),
                "ncclAllGather", comm);
  };
  const NcclCall call =
      new_call(Collective::kAllGather, send.size(), recv.size() - send.size(), options);
  if (size_ == 1) return start({call, send, recv, {}}, options);
  return start({call, {}, {}, gather}, options);  // NCCL copies this rank's part, too
}

std::unique_ptr<Work> NcclCommunicator::broadcast(std::span<std::byte> data, int root,
                                                  const CallOptions& options) {
  check_root(root, size_, options.label);
  const auto send = [=](ncclComm_t comm, cudaStream_t stream) {
    nccl::check(ncclBroadcast(data.data(), data.data(), data.size(), ncclUint8, root, comm, stream),
                "ncclBroadcast", comm);
  };
  // As the other backends count: the root sends to each rank, however NCCL has it passed on.
  const std::uint64_t others = rank_ == root ? static_cast<std::uint64_t>(size_ - 1) : 0;
  NcclCall call = new_call(Collective::kBroadcast, data.size(), others * data.size(), options);
  call.note.root = root;
  return start({call, {}, {}, send}, options);
}

}  // namespace zerofp8
