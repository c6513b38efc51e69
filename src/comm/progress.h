// The thread that moves the collectives of a root communicator and of all communicators split from
// it. Each channel's collectives run one after the other, different channels side by side: so ranks
// may call a parent and its children from different threads in any order without a deadlock.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/comm/channel.h"
#include "src/comm/transport.h"

namespace zerofp8 {

class Progress {
 public:
  explicit Progress(std::shared_ptr<Transport> transport);
  ~Progress();  // all channels are closed by then
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  Transport& transport() { return *transport_; }
  std::shared_ptr<Channel> open(const Group& group, int context);
  std::shared_ptr<WorkState> submit(Channel& channel, ExchangePlan plan);
  // Tells the peers, fails what is pending and returns when the channel's memory is no longer used.
  void close(const std::shared_ptr<Channel>& channel) noexcept;

 private:
  void run();
  bool wait_for_work(std::vector<std::shared_ptr<Channel>>& busy);
  void wake();

  std::shared_ptr<Transport> transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Channel>> channels_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace zerofp8
