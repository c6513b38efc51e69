#include "src/comm/nccl_watchdog.h"

#include <algorithm>
#include <string>
#include <vector>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// A failure is noticed this much later; a device call per round and pending communicator.
constexpr std::chrono::milliseconds kBetweenLooks{20};

}  // namespace

// Selects the device, or its questions would make a context on the first one. And they are about
// events outside of any graph: without saying so, they would end a capture of another thread.
NcclWatchdog::NcclWatchdog(int device)
    : thread_([this, device] {
        cudaSetDevice(device);
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        run();
      }) {}

NcclWatchdog::~NcclWatchdog() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void NcclWatchdog::watch(std::shared_ptr<NcclLink> link, const NcclCall& call,
                         std::shared_ptr<nccl::Event> finished) {
  std::lock_guard lock(mutex_);
  pending_.push_back({std::move(link), call, std::move(finished)});
  if (pending_.size() == 1) {
    pending_.front().oldest_since = Clock::now();
    changed_.notify_all();
  }
}

bool NcclWatchdog::wait_for(const NcclLink& link, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::unique_lock lock(mutex_);
  for (;;) {
    try {
      drop_ended();
    } catch (const CommError&) {
      return false;  // run() tells of it
    }
    if (!has_calls(link)) return true;
    if (Clock::now() >= deadline) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
}

void NcclWatchdog::release(const NcclLink& link) {
  std::unique_lock lock(mutex_);
  std::erase_if(pending_, [&](const Pending& each) { return each.link.get() == &link; });
  changed_.wait(lock, [&] { return in_hand_ != &link; });
}

void NcclWatchdog::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (pending_.empty()) {
      changed_.wait(lock);
      continue;
    }
    look(lock);
    if (!pending_.empty() && !stopping_) changed_.wait_for(lock, kBetweenLooks);
  }
}

bool NcclWatchdog::has_calls(const NcclLink& link) const {
  return in_hand_ == &link || std::any_of(pending_.begin(), pending_.end(), [&](const auto& each) {
           return each.link.get() == &link;
         });
}

// Calls that the device is through with, and those of failed communicators: their kernels have been
// ended, and what comes behind them gets a time-out of its own.
void NcclWatchdog::drop_ended() {
  const auto failed = [](const Pending& each) { return each.link->failed().load(); };
  std::erase_if(pending_, failed);
  while (!pending_.empty() && pending_.front().finished->happened()) pending_.pop_front();
  if (pending_.empty() || pending_.front().oldest_since != Clock::time_point{}) return;
  pending_.front().oldest_since = Clock::now();
}

// The first pending call that is known to have failed, and why; null where none has.
NcclWatchdog::Pending* NcclWatchdog::find_failed(std::string& why) {
  try {
    drop_ended();
  } catch (const CommError& error) {
    why = error.what();
    return &pending_.front();
  }
  std::vector<const NcclLink*> asked;
  for (Pending& each : pending_) {
    if (each.link->handle() == nullptr) continue;
    if (std::find(asked.begin(), asked.end(), each.link.get()) != asked.end()) continue;
    asked.push_back(each.link.get());
    why = each.link->handle()->async_error();
    if (!why.empty()) return &each;
  }
  return nullptr;
}

// One round: at most one communicator fails in it.
void NcclWatchdog::look(std::unique_lock<std::mutex>& lock) {
  std::string why;
  const Pending* failed = find_failed(why);
  if (pending_.empty()) {
    changed_.notify_all();
    return;
  }
  if (failed == nullptr) {
    const Pending& oldest = pending_.front();
    if (Clock::now() - oldest.oldest_since < oldest.call.timeout) return;
    failed = &oldest;
  }
  const NcclCall call = failed->call;
  std::shared_ptr<NcclLink> link = failed->link;
  in_hand_ = link.get();
  lock.unlock();
  if (why.empty()) {
    link->fail_timed_out(call);
  } else {
    link->fail({describe(call) + ": " + why, {}});
  }
  link.reset();
  lock.lock();
  in_hand_ = nullptr;
  changed_.notify_all();
}

}  // namespace zerofp8
