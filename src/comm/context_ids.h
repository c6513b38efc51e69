// Numbers that keep the messages of communicators over one transport apart: a communicator's
// messages carry its context id in their tag. Ids are never used again, so that a late message of a
// communicator that is gone cannot reach a newer one.
#pragma once

#include <mutex>
#include <set>

namespace zerofp8 {

// The ids that this rank has handed out or agreed to. Thread-safe.
class ContextIds {
 public:
  // An id that is free on this rank, for the ranks to take the maximum of.
  int propose() {
    std::lock_guard lock(mutex_);
    while (taken_.count(next_) != 0) ++next_;
    return next_++;
  }
  // False if another communicator that is being made at the same time was faster on this rank; the
  // ranks then try again with new proposals.
  bool reserve(int id) {
    std::lock_guard lock(mutex_);
    return taken_.insert(id).second;
  }

 private:
  std::mutex mutex_;
  std::set<int> taken_ = {0};  // 0 is the root communicator
  int next_ = 1;
};

}  // namespace zerofp8
