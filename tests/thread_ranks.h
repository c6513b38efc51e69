// Runs a function on N ranks that are threads of the test.
//
//   run_ranks(4, [](Communicator& comm) { EXPECT_EQ(comm.size(), 4); });
//
// All threads are joined before it returns. A rank whose function throws closes its communicator,
// so the others get a CommError instead of waiting for it; the exception that came first in time,
// the cause, is what run_ranks reports.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zerofp8/communicator.h"

namespace zerofp8::test {

// Thrown by run_ranks with the exception of the rank nested inside.
class RankError : public std::runtime_error {
 public:
  RankError(int rank, const std::string& what)
      : std::runtime_error("rank " + std::to_string(rank) + ": " + what), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

struct RankOutcome {
  std::exception_ptr error;  // null where the function returned
  std::string what;          // its text
};

struct Outcomes {
  std::vector<RankOutcome> ranks;
  int first_failed = -1;  // the first in time, or -1
};

inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "not a std::exception";
  }
}

// Calls fn(communicator) on a thread for each of `communicators`. Each communicator is closed as
// soon as its function has ended.
template <class Fn>
Outcomes run_each(std::vector<std::unique_ptr<Communicator>> communicators, const Fn& fn) {
  Outcomes outcomes;
  outcomes.ranks.resize(communicators.size());
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move(communicators[rank])]() mutable {
      try {
        fn(*comm);
      } catch (...) {
        std::lock_guard lock(mutex);
        outcomes.ranks[rank].error = std::current_exception();
        outcomes.ranks[rank].what = text_of(std::current_exception());
        if (outcomes.first_failed < 0) outcomes.first_failed = static_cast<int>(rank);
      }
      comm.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

// Throws RankError, with the original nested, if a rank failed.
inline void throw_first(const Outcomes& outcomes) {
  if (outcomes.first_failed < 0) return;
  const RankOutcome& first = outcomes.ranks[static_cast<std::size_t>(outcomes.first_failed)];
  try {
    std::rethrow_exception(first.error);
  } catch (...) {
    std::throw_with_nested(RankError(outcomes.first_failed, first.what));
  }
}

template <class Fn>
void run_ranks(int size, const Fn& fn) {
  throw_first(run_each(make_thread_communicators(size), fn));
}

// For tests in which ranks are meant to fail: what each of them threw.
template <class Fn>
Outcomes run_ranks_to_the_end(int size, const Fn& fn) {
  return run_each(make_thread_communicators(size), fn);
}

}  // namespace zerofp8::test
