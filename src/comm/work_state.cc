#include "src/comm/work_state.h"

#include "zerofp8/error.h"

namespace zerofp8 {

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
  wait();
  std::lock_guard lock(mutex_);
  if (failure_.has_value()) throw CommError(failure_->story, failure_->absent_ranks);
}

}  // namespace zerofp8
