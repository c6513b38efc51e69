#include "bindings/process_group_comm.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "bindings/torch_group.h"
#include "src/comm/group.h"
#include "src/comm/rank_order.h"
#include "src/comm/work_state.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using std::chrono::milliseconds;

enum class Kind : std::uint8_t { kAllToAll, kAllGather, kBroadcast, kSum, kMax, kGather, kBarrier };
constexpr std::array<std::string_view, 7> kKindNames = {
    "all_to_all", "all_gather", "broadcast", "sum", "max", "gather", "barrier"};

constexpr std::size_t kInlineBytes = 160;

// What a rank is about to do; plain bytes on the wire.
struct Note {
  std::uint64_t bytes = 0;  // of the payload this rank contributes
  std::int32_t root = 0;
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kFp32;
  char label[50] = {};
  std::byte payload[kInlineBytes] = {};

  bool same_call(const Note& o) const {
    return bytes == o.bytes && root == o.root && kind == o.kind && dtype == o.dtype &&
           std::strcmp(label, o.label) == 0;
  }
  std::string text() const {
    const auto name = kKindNames[std::min<std::size_t>(static_cast<std::size_t>(kind), 6)];
    std::string text = fmt::format("{} '{}' of {} bytes", name, label, bytes);
    if (kind == Kind::kBroadcast) text += fmt::format(" from rank {}", root);
    return text + fmt::format(" ({})", to_string(dtype));
  }
};

struct Call {
  Note note;
  std::span<const std::byte> send;
  std::span<std::byte> recv;
  bool control = false;
  milliseconds timeout{0};
  std::shared_ptr<WorkState> state;
};

class ProcessGroupCommunicator final : public Communicator {
 public:
  ProcessGroupCommunicator(std::unique_ptr<TorchGroup> group, milliseconds timeout,
                           GroupFactory make_group)
      : group_(std::move(group)),
        make_group_(std::move(make_group)),
        timeout_(timeout),
        thread_([this] { serve(); }) {}

  ~ProcessGroupCommunicator() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::string backend() const override { return "torch " + group_->backend(); }

  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    if (send.size() != recv.size() || send.size() % ranks() != 0) {
      throw ArgumentError(
          fmt::format("all_to_all '{}': given {} and {} bytes; allowed: equal "
                      "sizes, a multiple of {} ranks",
                      options.label, send.size(), recv.size(), size()));
    }
    return start(make(Kind::kAllToAll, send, recv, options));
  }

  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    check_gather("all_gather", options.label, send.size(), recv.size());
    return start(make(Kind::kAllGather, send, recv, options));
  }

  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override {
    if (root < 0 || root >= size()) {
      throw ArgumentError(fmt::format("broadcast '{}': given root {}; allowed: 0 to {}",
                                      options.label, root, size() - 1));
    }
    Call call = make(Kind::kBroadcast, data, data, options);
    call.note.root = root;
    return start(std::move(call));
  }

  void all_reduce(std::span<float> data, ReduceOp op) override { reduce(data, op); }
  void all_reduce(std::span<double> data, ReduceOp op) override { reduce(data, op); }
  void all_reduce(std::span<std::int32_t> data, ReduceOp op) override { reduce(data, op); }
  void all_reduce(std::span<std::int64_t> data, ReduceOp op) override { reduce(data, op); }

  void gather_control(std::span<const std::byte> send, std::span<std::byte> recv) override {
    check_gather("gather_control", "gather", send.size(), recv.size());
    gather(Kind::kGather, send, recv, "gather");
  }

  void barrier(milliseconds timeout) override {
    Call call = make(Kind::kBarrier, {}, {}, {.label = "barrier"});
    call.control = true;
    call.timeout = timeout;
    start(std::move(call))->wait();
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    const std::pair<int, int> mine{color, key};
    std::vector<std::pair<int, int>> all(ranks());
    gather_control(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    std::vector<int> members;
    for (int r = 0; r < size(); ++r) {
      if (all[static_cast<std::size_t>(r)].first == color) members.push_back(r);
    }
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
      return all[static_cast<std::size_t>(a)].second < all[static_cast<std::size_t>(b)].second;
    });
    if (members.size() == 1) return make_self_communicator();
    const GroupFactory factory = [parent = make_group_, members](const std::vector<int>& chosen) {
      std::vector<int> of_parent;
      for (const int r : chosen) of_parent.push_back(members[static_cast<std::size_t>(r)]);
      return parent(of_parent);
    };
    return make_process_group_communicator(make_group_(members), timeout_, factory);
  }

  void set_timeout(milliseconds timeout) override { timeout_ = timeout; }
  milliseconds timeout() const override { return timeout_; }
  WireBytes bytes_sent() const override {
    std::lock_guard lock(mutex_);
    return sent_;
  }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(size()); }

  void check_gather(std::string_view what, std::string_view label, std::size_t send,
                    std::size_t recv) const {
    if (recv == send * ranks()) return;
    throw ArgumentError(fmt::format("{} '{}': given {} bytes for {} of each of {} ranks", what,
                                    label, recv, send, size()));
  }

  Call make(Kind kind, std::span<const std::byte> send, std::span<std::byte> recv,
            const CallOptions& options) const {
    Call call;
    call.note.kind = kind;
    call.note.bytes = send.size();
    call.note.dtype = options.dtype;
    std::memcpy(call.note.label, options.label.data(),
                std::min(options.label.size(), sizeof(call.note.label) - 1));
    call.send = send;
    call.recv = recv;
    call.timeout = timeout_;
    call.state = std::make_shared<WorkState>(interrupted_);
    return call;
  }

  void gather(Kind kind, std::span<const std::byte> send, std::span<std::byte> recv,
              std::string_view label) {
    Call call = make(kind, send, recv, {.label = label});
    call.control = true;
    if (send.size() <= kInlineBytes && !send.empty()) {
      std::memcpy(call.note.payload, send.data(), send.size());
    }
    start(std::move(call))->wait();
  }

  template <class T>
  void reduce(std::span<T> data, ReduceOp op) {
    std::vector<T> all(data.size() * ranks());
    gather(op == ReduceOp::kSum ? Kind::kSum : Kind::kMax, std::as_bytes(data),
           std::as_writable_bytes(std::span(all)), op == ReduceOp::kSum ? "sum" : "max");
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = reduce_strided(all.data() + i, data.size(), size(), op);
    }
  }

  std::unique_ptr<Work> start(Call call) {
    if (::getpid() != pid_) {
      throw CommError(call.note.text() +
                      ": this process was forked from the one that made the communicator, and has "
                      "no part in it; call initialize where you train");
    }
    auto work = std::make_unique<P2pWork>(call.state);
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(call));
    }
    changed_.notify_all();
    return work;
  }

  // The thread: one call after the other; after a failure every call ends with the first story.
  void serve() {
    for (;;) {
      Call call;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        call = std::move(queue_.front());
        queue_.pop_front();
      }
      ++index_;
      if (!failure_) {
        try {
          execute(call);
        } catch (const GroupInterrupted&) {
          failure_ = Failure{call.note.text() + " on " + backend() + ": " + kInterrupted, {}};
        } catch (const GroupFailure& error) {
          failure_ = story(call, error.what());
        } catch (const std::exception& error) {
          failure_ = Failure{error.what(), {}};
        }
      }
      failure_ ? call.state->fail(*failure_) : call.state->finish();
    }
  }

  void execute(const Call& call) {
    if (*interrupted_) throw GroupInterrupted(kInterrupted);
    std::vector<Note> notes(ranks());
    const GroupCall limits{call.timeout, index_, interrupted_.get()};
    group_->all_gather_note(&call.note, notes.data(), sizeof(Note), limits);
    for (int r = 1; r < size(); ++r) {
      const Note& other = notes[static_cast<std::size_t>(r)];
      if (!other.same_call(notes[0])) {
        throw std::runtime_error(fmt::format(
            "ranks make different calls: rank 0 {}, rank {} {}; every rank must call zerofp8 in "
            "the same order",
            notes[0].text(), r, other.text()));
      }
    }
    move_payload(call, notes, limits);
    count(call);
  }

  void move_payload(const Call& call, const std::vector<Note>& notes, const GroupCall& limits) {
    const std::size_t bytes = call.send.size();
    if (bytes == 0) return;
    switch (call.note.kind) {
      case Kind::kAllToAll:
        return group_->all_to_all(call.send.data(), call.recv.data(), bytes / ranks(), limits);
      case Kind::kBroadcast:
        return group_->broadcast(call.recv.data(), bytes, call.note.root, limits);
      default:
        break;
    }
    if (!call.control || bytes > kInlineBytes) {
      return group_->all_gather(call.send.data(), call.recv.data(), bytes, limits);
    }
    for (std::size_t r = 0; r < ranks(); ++r) {
      std::memcpy(call.recv.data() + r * bytes, notes[r].payload, bytes);
    }
  }

  void count(const Call& call) {
    const std::uint64_t others = ranks() - 1;
    std::uint64_t bytes = call.send.size() * others;
    if (call.note.kind == Kind::kAllToAll) bytes /= ranks();
    if (call.note.kind == Kind::kBroadcast && call.note.root != rank()) bytes = 0;
    std::lock_guard lock(mutex_);
    (call.control ? sent_.control : sent_.payload[static_cast<std::size_t>(call.note.dtype)]) +=
        bytes;
    sent_.envelopes += sizeof(Note) * others;
  }

  Failure story(const Call& call, const std::string& why) {
    Failure failure;
    const bool known = group_->find_absent(index_, failure.absent_ranks);
    failure.story = fmt::format("{} on {}: {}", call.note.text(), backend(), why);
    if (!failure.absent_ranks.empty()) {
      failure.story += fmt::format("; absent: {}", list_ranks(failure.absent_ranks));
    } else if (!known) {
      failure.story +=
          "; which ranks are absent could not be found out, as the process that holds "
          "the group's store has gone";
    }
    return failure;
  }

  std::unique_ptr<TorchGroup> group_;
  GroupFactory make_group_;
  std::atomic<milliseconds> timeout_;
  const pid_t pid_ = ::getpid();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> queue_;
  const InterruptFlag interrupted_ = std::make_shared<std::atomic<bool>>(false);
  bool closing_ = false;
  WireBytes sent_;
  std::uint64_t index_ = 0;         // of the call being executed; the thread's
  std::optional<Failure> failure_;  // the thread's
  std::thread thread_;              // last: begins when the rest is there
};

}  // namespace

std::unique_ptr<Communicator> make_process_group_communicator(const std::string& name,
                                                              milliseconds timeout,
                                                              GroupFactory make_group) {
  return std::make_unique<ProcessGroupCommunicator>(TorchGroup::find(name), timeout,
                                                    std::move(make_group));
}

}  // namespace zerofp8
