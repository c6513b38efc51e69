#include "src/comm/progress.h"

#include <algorithm>
#include <chrono>

namespace zerofp8 {
namespace {

// How to wait on a machine that may have fewer cores than ranks: poll a few times, since most
// answers are quick; then let others run, since the answer may need this very core; then sleep.
class Backoff {
 public:
  void reset() { rounds_ = 0; }
  void pause(Transport& transport) {
    constexpr int kSpins = 50, kYields = 50;
    if (rounds_ == 0) since_ = Clock::now();
    ++rounds_;
    if (rounds_ <= kSpins) return;
    if (rounds_ <= kSpins + kYields) {
      std::this_thread::yield();
      return;
    }
    transport.idle(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since_));
  }

 private:
  using Clock = std::chrono::steady_clock;
  int rounds_ = 0;
  Clock::time_point since_{};
};

}  // namespace

Progress::Progress(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {
  // One rank never waits for another (P2pCommunicator copies at once), so it needs no thread.
  if (transport_->size() > 1) thread_ = std::thread([this] { run(); });
}

Progress::~Progress() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Channel> Progress::open(const Group& group, int context) {
  auto channel = std::make_shared<Channel>(*transport_, group, context);
  std::lock_guard lock(mutex_);
  channels_.push_back(channel);
  return channel;
}

std::shared_ptr<WorkState> Progress::submit(Channel& channel, ExchangePlan plan) {
  std::shared_ptr<WorkState> state = channel.push(std::move(plan));
  wake();
  return state;
}

void Progress::close(const std::shared_ptr<Channel>& channel) noexcept {
  channel->request_close();
  if (thread_.joinable()) {
    wake();
    channel->wait_until_closed();
  } else {
    channel->advance();
  }
  std::lock_guard lock(mutex_);
  std::erase(channels_, channel);
}

void Progress::wake() {
  // Taking the lock orders this after the thread's look at the channels, else the wake-up could
  // fall between that look and its wait and be lost.
  { std::lock_guard lock(mutex_); }
  changed_.notify_one();
  transport_->wake();
}

// Fills `busy` with the channels that have something to do; false when it is time to end.
bool Progress::wait_for_work(std::vector<std::shared_ptr<Channel>>& busy) {
  busy.clear();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    for (const std::shared_ptr<Channel>& channel : channels_) {
      if (channel->has_work()) busy.push_back(channel);
    }
    return stopping_ || !busy.empty();
  });
  return !stopping_;
}

void Progress::run() {
  Backoff backoff;
  std::vector<std::shared_ptr<Channel>> busy;
  while (wait_for_work(busy)) {
    bool moved = false;
    for (const std::shared_ptr<Channel>& channel : busy) moved |= channel->advance();
    if (moved) {
      backoff.reset();
    } else {
      backoff.pause(*transport_);
    }
  }
}

}  // namespace zerofp8
