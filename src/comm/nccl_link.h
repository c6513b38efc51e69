// One NCCL communicator as the caller and the watchdog share it: its first failure, and how ranks
// tell each other why. NCCL itself only says that something is amiss, or hangs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/comm/envelope.h"
#include "src/comm/nccl_api.h"
#include "src/comm/work_state.h"
#include "zerofp8/communicator.h"

namespace zerofp8 {

// A collective that has been launched or is being launched.
struct NcclCall {
  Envelope note;  // what the other ranks must be in, too
  std::uint64_t bytes_to_others = 0;
  std::chrono::milliseconds timeout{0};
};

// "all_to_all 'grads' (call 3, 8 bytes to other ranks)"
std::string describe(const NcclCall& call);

class NcclLink {
 public:
  // `watch` is a host communicator of the same ranks that nobody else uses, so that asking never
  // gets in between the caller's control calls. Both are null where there is one rank.
  NcclLink(std::unique_ptr<Communicator> watch, std::unique_ptr<nccl::Handle> handle,
           std::chrono::milliseconds timeout)
      : watch_(std::move(watch)), handle_(std::move(handle)), timeout_(timeout) {}
  ~NcclLink() { close(); }
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  nccl::Handle* handle() { return handle_.get(); }
  const std::atomic<bool>& failed() const { return failed_; }
  Failure failure() const;
  // The communicator's: for calls to come, and for how long a note is kept.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Records the failure, then aborts the NCCL communicator: who sees its kernels end finds the
  // reason. Then leaves a note for ranks that ask later. The first failure counts.
  void fail(const Failure& failure);
  // Asks the other ranks what they wait for and fails with what has come out.
  void fail_timed_out(const NcclCall& call);

  // Waits for the other ranks, unless it has failed. What is left of it then only knows its
  // failure.
  void close() noexcept;

  // How long ranks are given to answer, or to end a communicator together: not the whole time-out
  // once more where that is long.
  static std::chrono::milliseconds patience(std::chrono::milliseconds timeout);

 private:
  bool record(const Failure& failure);
  Failure find_reason(const NcclCall& call);
  void leave_note(const Failure& failure) noexcept;

  std::unique_ptr<Communicator> watch_;
  std::unique_ptr<nccl::Handle> handle_;
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;
  std::atomic<bool> failed_{false};
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex asking_;   // guards watch_ and what follows
  bool asked_ = false;  // once in its life
  Envelope own_note_;   // sent by note_
  std::vector<Envelope> other_notes_;
  std::unique_ptr<Work> note_;
};

}  // namespace zerofp8
