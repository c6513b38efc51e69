// The memory through which thread ranks meet: a lane for each ordered pair of ranks, in which
// posted sends and receives wait for each other, and a bell for each rank.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace zerofp8 {

// One end of a message. All fields are guarded by the mutex of its lane.
struct ThreadMessage {
  int tag = 0;
  std::span<const std::byte> source;  // of a send
  std::span<std::byte> target;        // of a receive
  std::vector<std::byte> buffered;    // owned copy of a small send, which then need not wait
  bool done = false;
  std::string error;
};

class ThreadHub {
 public:
  explicit ThreadHub(int size);
  int size() const { return size_; }

  std::shared_ptr<ThreadMessage> send(int from, int to, int tag, std::span<const std::byte> bytes);
  std::shared_ptr<ThreadMessage> recv(int from, int to, int tag, std::span<std::byte> bytes);
  // True once the message is through. Throws CommError where the two sizes differ.
  bool test(int from, int to, const ThreadMessage& message);
  void withdraw(int from, int to, const std::shared_ptr<ThreadMessage>& message);

  // Rings the rank's bell; wait returns when it has rung since the last wait, or after `longest`.
  void ring(int rank);
  void wait(int rank, std::chrono::microseconds longest);

 private:
  struct Lane {
    std::mutex mutex;
    std::list<std::shared_ptr<ThreadMessage>> sends, recvs;
  };
  struct Bell {
    std::mutex mutex;
    std::condition_variable rung;
    std::uint64_t count = 0, seen = 0;
  };
  Lane& lane(int from, int to);
  static void deliver(ThreadMessage& sent, ThreadMessage& received);

  const int size_;
  std::vector<Lane> lanes_;
  std::vector<Bell> bells_;
};

}  // namespace zerofp8
