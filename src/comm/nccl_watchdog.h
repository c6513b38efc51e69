// The thread that looks after the collectives of a root communicator and of all that are split from
// it: callers never block, so that nobody else would notice that one of them hangs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "src/comm/nccl_link.h"

namespace zerofp8 {

class NcclWatchdog {
 public:
  explicit NcclWatchdog(int device);
  ~NcclWatchdog();  // all links have been released by then
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  // In the order of the stream that all calls share. `finished` follows the call there.
  void watch(std::shared_ptr<NcclLink> link, const NcclCall& call,
             std::shared_ptr<nccl::Event> finished);
  // Returns true when the link's calls have ended, one way or the other; false if not in time.
  bool wait_for(const NcclLink& link, std::chrono::milliseconds timeout);
  // Forgets the link's calls and returns when the thread does not use it.
  void release(const NcclLink& link);

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    std::shared_ptr<NcclLink> link;
    NcclCall call;
    std::shared_ptr<nccl::Event> finished;
    Clock::time_point oldest_since{};  // not set before it is the oldest
  };
  void run();
  void look(std::unique_lock<std::mutex>& lock);
  void drop_ended();
  Pending* find_failed(std::string& why);
  bool has_calls(const NcclLink& link) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Pending> pending_;
  const NcclLink* in_hand_ = nullptr;  // used without the lock
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace zerofp8
