// Communicator over point-to-point messages, for every Transport. Each collective is in the file of
// its name and only lays out memory; exchange.h moves it.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "src/comm/exchange.h"
#include "src/comm/group.h"
#include "src/comm/progress.h"
#include "src/comm/transport.h"
#include "zerofp8/communicator.h"

namespace zerofp8 {

class P2pCommunicator final : public Communicator {
 public:
  P2pCommunicator(std::shared_ptr<Progress> progress, Group group, int context,
                  std::chrono::milliseconds timeout);
  ~P2pCommunicator() override;

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size(); }
  std::string backend() const override { return progress_->transport().backend(); }

  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override;
  void all_reduce(std::span<float> data, ReduceOp op) override;
  void all_reduce(std::span<double> data, ReduceOp op) override;
  void all_reduce(std::span<std::int32_t> data, ReduceOp op) override;
  void all_reduce(std::span<std::int64_t> data, ReduceOp op) override;
  void gather_control(std::span<const std::byte> send, std::span<std::byte> recv) override;
  void barrier(std::chrono::milliseconds timeout) override;
  std::unique_ptr<Communicator> split(int color, int key) override;

  void set_timeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  WireBytes bytes_sent() const override { return channel_->bytes_sent(); }

 private:
  ExchangePlan new_plan(Collective kind, const CallOptions& options) const;
  ExchangePlan gather_plan(Collective kind, std::span<const std::byte> send,
                           std::span<std::byte> recv, const CallOptions& options) const;
  std::unique_ptr<Work> start(ExchangePlan plan);
  template <class T>
  void reduce_in_rank_order(std::span<T> data, ReduceOp op);
  int agree_on_context(int color, int key, std::vector<int>& colors, std::vector<int>& keys);

  std::shared_ptr<Progress> progress_;
  const Group group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::shared_ptr<Channel> channel_;
};

// The communicator of all ranks of a transport.
std::unique_ptr<Communicator> make_p2p_communicator(std::shared_ptr<Transport> transport);

}  // namespace zerofp8
