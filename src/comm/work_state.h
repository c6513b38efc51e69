// The result of one collective, shared between the caller's Work and the progress thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zerofp8/communicator.h"

namespace zerofp8 {

// Why a collective failed. Kept as data, not as an exception_ptr: each wait() throws an object of
// its own, so that threads never share one.
struct Failure {
  std::string story;
  std::vector<int> absent_ranks;
};

// Asked several times a second while a thread waits for a collective: true to give up, as a signal
// does under Python. nullptr: never. For the whole process; set before there are communicators.
using InterruptCheck = bool (*)();
void set_interrupt_check(InterruptCheck check);
inline constexpr char kInterrupted[] = "interrupted by a signal on this rank";

// Set by a waiter that gives up: who moves the communicator's collectives then fails them all.
using InterruptFlag = std::shared_ptr<std::atomic<bool>>;

class WorkState {
 public:
  explicit WorkState(InterruptFlag interrupted) : interrupted_(std::move(interrupted)) {}
  void finish();
  void fail(const Failure& failure);
  bool done() const;
  void wait() const;            // until done, without throwing
  void wait_and_throw() const;  // throws CommError if it failed

 private:
  const InterruptFlag interrupted_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::optional<Failure> failure_;
};

class P2pWork final : public Work {
 public:
  explicit P2pWork(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  // Waits: the buffers of a collective may be freed once its Work is gone, also while an exception
  // unwinds. Bounded by the time-out. A failure shows in the next call.
  ~P2pWork() override { state_->wait(); }
  bool done() const override { return state_->done(); }
  void wait() override { state_->wait_and_throw(); }

 private:
  std::shared_ptr<WorkState> state_;
};

}  // namespace zerofp8
