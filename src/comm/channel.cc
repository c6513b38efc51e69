#include "src/comm/channel.h"

#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// What an exception from the progress thread becomes.
Failure failure_of(const std::exception& error) {
  if (const auto* comm = dynamic_cast<const CommError*>(&error)) {
    return {comm->what(), comm->absent_ranks()};
  }
  return {error.what(), {}};
}

}  // namespace

Channel::Channel(Transport& transport, const Group& group, int context) {
  links_.emplace(transport, group, context);
}

std::shared_ptr<WorkState> Channel::push(ExchangePlan plan) {
  std::lock_guard lock(mutex_);
  if (failure_.has_value()) {
    throw CommError(fmt::format("{} '{}' cannot run: this communicator has failed before: {}",
                                to_string(plan.kind), plan.label, failure_->story),
                    failure_->absent_ranks);
  }
  auto state = std::make_shared<WorkState>(interrupted_);
  queue_.push_back(std::make_unique<Item>(Item{Exchange(std::move(plan), calls_++), state}));
  return state;
}

bool Channel::has_work() const {
  std::lock_guard lock(mutex_);
  return !queue_.empty() || (closing_ && !closed_);
}

WireBytes Channel::bytes_sent() const {
  std::lock_guard lock(mutex_);
  return sent_;
}

void Channel::request_close() {
  std::lock_guard lock(mutex_);
  closing_ = true;
}

void Channel::wait_until_closed() {
  std::unique_lock lock(mutex_);
  closed_changed_.wait(lock, [this] { return closed_; });
}

bool Channel::advance() {
  Item* head = nullptr;
  bool closing = false;
  {
    std::lock_guard lock(mutex_);
    closing = closing_;
    if (!queue_.empty()) head = queue_.front().get();
  }
  if (closing) {
    close();
    return true;
  }
  if (head == nullptr) return false;
  if (*interrupted_) {
    const Group& group = links_->group();
    fail({group.name(group.rank) + " was interrupted by a signal", {group.rank}});
    return true;
  }
  try {
    const bool moved = head->exchange.advance(*links_);
    if (head->exchange.done()) complete_head();
    return moved;
  } catch (const std::exception& error) {
    fail(failure_of(error));
    return true;
  }
}

void Channel::complete_head() {
  std::unique_ptr<Item> head;
  {
    std::lock_guard lock(mutex_);
    head = std::move(queue_.front());
    queue_.pop_front();
    const ExchangePlan& plan = head->exchange.plan();
    const std::uint64_t bytes = plan.bytes_to_others();
    std::uint64_t& counter =
        plan.control ? sent_.control : sent_.payload[static_cast<std::size_t>(plan.dtype)];
    counter += bytes;
    sent_.envelopes += plan.parts.size() * sizeof(Envelope);
  }
  head->state->finish();
}

void Channel::fail(const Failure& failure) {
  std::deque<std::unique_ptr<Item>> queue;
  {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    queue.swap(queue_);
  }
  // Peers hear of it before memory is withdrawn: one that is in the middle of reading it fails,
  // too, instead of taking a half-sent message for whole.
  tell_all(Envelope::Kind::kAbort, &failure);
  for (std::unique_ptr<Item>& item : queue) {
    const std::shared_ptr<WorkState> state = item->state;
    item.reset();  // withdraws its messages; only then may the caller free the buffers
    state->fail(failure);
  }
}

void Channel::close() {
  bool pending = false, failed = false;
  {
    std::lock_guard lock(mutex_);
    pending = !queue_.empty();
    failed = failure_.has_value();
  }
  if (pending) {
    const Group& group = links_->group();
    fail({group.name(group.rank) + " closed its communicator while a collective was under way",
          {group.rank}});
  } else if (!failed) {
    tell_all(Envelope::Kind::kBye, nullptr);
  }
  links_.reset();
  std::lock_guard lock(mutex_);
  closed_ = true;
  closed_changed_.notify_all();
}

void Channel::tell_all(Envelope::Kind kind, const Failure* failure) noexcept {
  Envelope envelope;
  envelope.kind = kind;
  if (failure != nullptr) {
    envelope.set_text(failure->story);
    envelope.set_absent(failure->absent_ranks);
  }
  const Group& group = links_->group();
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank) continue;
    try {
      links_->post(peer, envelope);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "zerofp8: cannot tell %s that this rank stops: %s\n",
                   group.name(peer).c_str(), error.what());
    }
  }
}

}  // namespace zerofp8
