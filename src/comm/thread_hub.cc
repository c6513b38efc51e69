#include "src/comm/thread_hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// Up to here a send is copied and done at once, as MPI libraries do: a rank can say goodbye and go.
constexpr std::size_t kBufferedBytes = 4096;

std::shared_ptr<ThreadMessage> take(std::list<std::shared_ptr<ThreadMessage>>& waiting, int tag) {
  const auto found = std::find_if(waiting.begin(), waiting.end(),
                                  [&](const auto& message) { return message->tag == tag; });
  if (found == waiting.end()) return nullptr;
  std::shared_ptr<ThreadMessage> message = *found;
  waiting.erase(found);
  return message;
}

}  // namespace

ThreadHub::ThreadHub(int size)
    : size_(size),
      lanes_(static_cast<std::size_t>(size) * static_cast<std::size_t>(size)),
      bells_(static_cast<std::size_t>(size)) {}

ThreadHub::Lane& ThreadHub::lane(int from, int to) {
  return lanes_[static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) +
                static_cast<std::size_t>(to)];
}

void ThreadHub::deliver(ThreadMessage& sent, ThreadMessage& received) {
  if (sent.source.size() != received.target.size()) {
    const std::string error = fmt::format("message sizes differ: {} bytes sent, {} expected",
                                          sent.source.size(), received.target.size());
    received.error = error;
    if (!sent.done) sent.error = error;
  } else {
    std::memcpy(received.target.data(), sent.source.data(), sent.source.size());
  }
  sent.done = true;
  received.done = true;
}

std::shared_ptr<ThreadMessage> ThreadHub::send(int from, int to, int tag,
                                               std::span<const std::byte> bytes) {
  auto message = std::make_shared<ThreadMessage>();
  message->tag = tag;
  message->source = bytes;
  Lane& between = lane(from, to);
  {
    std::lock_guard lock(between.mutex);
    if (const auto receiver = take(between.recvs, tag)) {
      deliver(*message, *receiver);
    } else {
      if (bytes.size() <= kBufferedBytes) {
        message->buffered.assign(bytes.begin(), bytes.end());
        message->source = message->buffered;
        message->done = true;
      }
      between.sends.push_back(message);
    }
  }
  ring(to);
  return message;
}

std::shared_ptr<ThreadMessage> ThreadHub::recv(int from, int to, int tag,
                                               std::span<std::byte> bytes) {
  auto message = std::make_shared<ThreadMessage>();
  message->tag = tag;
  message->target = bytes;
  Lane& between = lane(from, to);
  bool delivered = false;
  {
    std::lock_guard lock(between.mutex);
    if (const auto sender = take(between.sends, tag)) {
      deliver(*sender, *message);
      delivered = true;
    } else {
      between.recvs.push_back(message);
    }
  }
  if (delivered) ring(from);
  return message;
}

bool ThreadHub::test(int from, int to, const ThreadMessage& message) {
  std::lock_guard lock(lane(from, to).mutex);
  if (!message.error.empty()) {
    throw CommError(fmt::format("from rank {} to rank {}: {}", from, to, message.error));
  }
  return message.done;
}

void ThreadHub::withdraw(int from, int to, const std::shared_ptr<ThreadMessage>& message) {
  Lane& between = lane(from, to);
  std::lock_guard lock(between.mutex);
  if (message->done) return;
  between.sends.remove(message);
  between.recvs.remove(message);
}

void ThreadHub::ring(int rank) {
  Bell& bell = bells_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(bell.mutex);
  ++bell.count;
  bell.rung.notify_one();
}

void ThreadHub::wait(int rank, std::chrono::microseconds longest) {
  Bell& bell = bells_[static_cast<std::size_t>(rank)];
  std::unique_lock lock(bell.mutex);
  // Compared with the last wait, not with now: what rang in between has not been looked at.
  bell.rung.wait_for(lock, longest, [&] { return bell.count != bell.seen; });
  bell.seen = bell.count;
}

}  // namespace zerofp8
