#include "src/comm/work_state.h"

#include <chrono>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr std::chrono::milliseconds kBetweenChecks{100};
std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) { interrupt_check = check; }

void WorkState::finish() {
  std::lock_guard lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

void WorkState::fail(const Failure& failure) {
  std::lock_guard lock(mutex_);
  done_ = true;
  failure_ = failure;
  changed_.notify_all();
}

bool WorkState::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

void WorkState::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

void WorkState::wait_and_throw() const {
  const InterruptCheck check = interrupt_check;
  if (check == nullptr) wait();
  std::unique_lock lock(mutex_);
  bool given_up = false;
  while (!changed_.wait_for(lock, kBetweenChecks, [this] { return done_; })) {
    if (given_up) continue;  // until the buffers are free
    lock.unlock();
    given_up = check();
    if (given_up) *interrupted_ = true;
    lock.lock();
  }
  if (failure_.has_value()) throw CommError(failure_->story, failure_->absent_ranks);
  if (given_up) throw CommError(kInterrupted);  // it ended in this moment
}

}  // namespace zerofp8
