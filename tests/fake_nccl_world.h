// How the kernels of fake NCCL ranks meet and move bytes, on the threads of their streams.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace zerofp8::test {

enum class Kind { kSend, kRecv, kAllGather, kBroadcast };

struct Op {
  Kind kind;
  int peer;  // or root
  const void* from;
  void* to;
  std::size_t bytes;
};
using Ops = std::vector<Op>;

// The ranks of one unique id.
struct World {
  explicit World(int size) : came(static_cast<std::size_t>(size)), launches(came.size()) {}
  int size() const { return static_cast<int>(came.size()); }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> came;
  std::vector<std::uint64_t> launches;  // asked for by each rank
  struct Meeting {
    explicit Meeting(std::size_t ranks) : ops(ranks) {}
    std::vector<std::shared_ptr<const Ops>> ops;
    int present = 0, left = 0;
  };
  std::map<std::uint64_t, std::shared_ptr<Meeting>> meetings;
};

// What kernels know of their communicator; it may be freed before they are through.
struct Life {
  std::atomic<bool> aborted{false};
  std::atomic<int> kernels{0};
};

inline int count(const Ops& ops, Kind kind, int peer, std::size_t bytes) {
  int found = 0;
  for (const Op& op : ops) found += op.kind == kind && op.peer == peer && op.bytes == bytes;
  return found;
}

inline bool fit(const World::Meeting& meeting) {
  const Ops& first = *meeting.ops[0];
  for (std::size_t r = 0; r < meeting.ops.size(); ++r) {
    const Ops& ops = *meeting.ops[r];
    if (ops.size() != first.size()) return false;
    for (const Op& op : ops) {
      if (op.kind == Kind::kAllGather || op.kind == Kind::kBroadcast) {
        if (op.kind != first[0].kind || op.bytes != first[0].bytes || op.peer != first[0].peer) {
          return false;
        }
        continue;
      }
      const Kind other = op.kind == Kind::kSend ? Kind::kRecv : Kind::kSend;
      const Ops& theirs = *meeting.ops[static_cast<std::size_t>(op.peer)];
      if (count(theirs, other, static_cast<int>(r), op.bytes) != 1) return false;
    }
  }
  return true;
}

inline void move(const World::Meeting& meeting, int rank) {
  for (const Op& op : *meeting.ops[static_cast<std::size_t>(rank)]) {
    if (op.kind == Kind::kRecv) {
      for (const Op& theirs : *meeting.ops[static_cast<std::size_t>(op.peer)]) {
        if (theirs.kind == Kind::kSend && theirs.peer == rank) {
          std::memcpy(op.to, theirs.from, op.bytes);
        }
      }
    } else if (op.kind == Kind::kAllGather) {
      for (std::size_t r = 0; r < meeting.ops.size(); ++r) {
        std::byte* to = static_cast<std::byte*>(op.to) + r * op.bytes;
        const void* from = (*meeting.ops[r])[0].from;
        if (from != to) std::memcpy(to, from, op.bytes);
      }
    } else if (op.kind == Kind::kBroadcast && op.peer != rank) {
      std::memcpy(op.to, (*meeting.ops[static_cast<std::size_t>(op.peer)])[0].from, op.bytes);
    }
  }
}

// On the stream's thread. Ends when all ranks are through, or when it is aborted before all have
// come; where ranks do not fit, only then,
// and returns false.
inline bool run_kernel(World& world, int rank, std::uint64_t call,
                       const std::shared_ptr<const Ops>& ops, const Life& life,
                       const std::atomic<bool>& stalled) {
  std::unique_lock lock(world.mutex);
  const auto wait = [&](const auto& condition) {
    world.changed.wait(lock, [&] { return condition() || life.aborted; });
    return condition();
  };
  while (stalled && !life.aborted) world.changed.wait_for(lock, std::chrono::milliseconds(2));
  if (life.aborted) return true;
  auto& meeting = world.meetings[call];
  if (meeting == nullptr) meeting = std::make_shared<World::Meeting>(world.came.size());
  const std::shared_ptr<World::Meeting> here = meeting;
  here->ops[static_cast<std::size_t>(rank)] = ops;
  ++here->present;
  world.changed.notify_all();
  if (!wait([&] { return here->present == world.size(); })) {
    --here->present;
    here->ops[static_cast<std::size_t>(rank)] = nullptr;
    return true;
  }
  if (!fit(*here)) {
    wait([] { return false; });
    return false;
  }
  lock.unlock();
  move(*here, rank);
  lock.lock();
  ++here->left;
  world.changed.notify_all();
  world.changed.wait(lock, [&] { return here->left == world.size(); });
  world.meetings.erase(call);
  return true;
}

}  // namespace zerofp8::test
