#include "bindings/torch_group.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Every message goes through memory of the group's own, of this size at most: gloo cannot be told
// to stop, and may read and write the buffers of a call that was given up until its peers are gone.
constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
// A rank that has waited so long says so in the store; afterwards it is not taken for absent.
constexpr milliseconds kPatience{1000};
// How long a failed rank lets the others say that they were there, too.
constexpr milliseconds kGrace{1500};

at::Tensor bytes_view(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte));
}

// c10's errors carry a C++ stack after the first line.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

using GivenUp = std::deque<std::pair<c10::intrusive_ptr<c10d::Work>, std::vector<at::Tensor>>>;

// Null where torch keeps it to itself (2.6): a time-out cannot name the absent ranks then.
template <class Group>
c10::intrusive_ptr<c10d::Store> store_of(Group& group) {
  if constexpr (requires { group.getStore(); }) return group.getStore();
  return {};
}

class C10dGroup final : public TorchGroup {
 public:
  explicit C10dGroup(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)),
        backend_(group_->getBackendName()),
        device_(backend_ == "nccl" ? at::Device(at::kCUDA, device_index()) : at::Device(at::kCPU)) {
    if (backend_ == "custom" || backend_ == "undefined") backend_ = "gloo";
    try {
      store_ = store_of(*group_);
    } catch (const std::exception&) {  // absent ranks cannot be named then
    }
  }

  // gloo's destructor waits for what is under way. A peer that never comes would hold it up until
  // gloo's own time-out: then the group is left to the end of the process.
  ~C10dGroup() override {
    for (const auto& [work, tensors] : given_up_) {
      if (work->isCompleted()) continue;
      static_cast<void>(group_.release());
      static_cast<void>(new GivenUp(std::move(given_up_)));
      return;
    }
  }

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  std::string backend() const override { return backend_; }

  void all_gather_note(const void* send, void* recv, std::size_t bytes,
                       const GroupCall& call) override {
    const auto ranks = static_cast<std::size_t>(size());
    const at::Tensor mine = to_device(bytes_view(send, bytes).clone());
    at::Tensor all = at::empty({static_cast<std::int64_t>(bytes * ranks)}, mine.options());
    c10d::AllgatherOptions options;
    options.timeout = call.timeout;
    run(
        [&, mine]() mutable {
          return group_->_allgather_base(all, const_cast<at::Tensor&>(mine), options);
        },
        {mine, all}, call);
    const at::Tensor host = all.cpu();
    std::memcpy(recv, host.data_ptr(), bytes * ranks);
  }

  void all_gather(const void* send, void* recv, std::size_t bytes, const GroupCall& call) override {
    const auto ranks = static_cast<std::size_t>(size());
    c10d::AllgatherOptions options;
    options.timeout = call.timeout;
    pieces(bytes, ranks, [&](std::size_t begin, std::size_t n) {
      at::Tensor mine =
          to_device(bytes_view(static_cast<const std::byte*>(send) + begin, n).clone());
      at::Tensor all = at::empty({static_cast<std::int64_t>(n * ranks)}, mine.options());
      run([&] { return group_->_allgather_base(all, mine, options); }, {mine, all}, call);
      unpack(all, recv, bytes, begin, n);
    });
  }

  void all_to_all(const void* send, void* recv, std::size_t bytes, const GroupCall& call) override {
    const auto ranks = static_cast<std::size_t>(size());
    c10d::AllToAllOptions options;
    options.timeout = call.timeout;
    std::vector<std::int64_t> equal;  // empty: equal parts
    pieces(bytes, ranks, [&](std::size_t begin, std::size_t n) {
      at::Tensor out = at::empty({static_cast<std::int64_t>(n * ranks)}, at::kByte);
      for (std::size_t r = 0; r < ranks; ++r) {
        std::memcpy(static_cast<std::byte*>(out.data_ptr()) + r * n,
                    static_cast<const std::byte*>(send) + r * bytes + begin, n);
      }
      out = to_device(out);
      at::Tensor in = at::empty_like(out);
      run([&] { return group_->alltoall_base(in, out, equal, equal, options); }, {in, out}, call);
      unpack(in, recv, bytes, begin, n);
    });
  }

  void broadcast(void* data, std::size_t bytes, int root, const GroupCall& call) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = call.timeout;
    for (std::size_t begin = 0; begin < bytes; begin += kChunkBytes) {
      const std::size_t n = std::min(kChunkBytes, bytes - begin);
      at::Tensor host = bytes_view(static_cast<std::byte*>(data) + begin, n);
      std::vector<at::Tensor> tensors{to_device(host.clone())};
      run([&] { return group_->broadcast(tensors, options); }, tensors, call);
      if (root != rank()) host.copy_(tensors[0]);
    }
  }

  bool find_absent(std::uint64_t index, std::vector<int>& absent) override {
    if (!store_) return false;
    try {
      note(index);
      std::this_thread::sleep_for(kGrace);
      for (int r = 0; r < size(); ++r) {
        const std::string key = key_of(r);
        if (!store_->check({key})) {
          absent.push_back(r);
          continue;
        }
        const std::vector<std::uint8_t> text = store_->get(key);
        if (std::stoull(std::string(text.begin(), text.end())) < index) absent.push_back(r);
      }
    } catch (const std::exception&) {
      absent.clear();
      return false;
    }
    return true;
  }

 private:
  // nccl's groups move device memory only: of the device that the group is bound to, else the
  // first.
  c10::DeviceIndex device_index() const {
    const std::optional<at::Device> bound = group_->getBoundDeviceId();
    return bound ? bound->index() : c10::DeviceIndex{0};
  }
  at::Tensor to_device(const at::Tensor& host) const {
    return device_.is_cpu() ? host : host.to(device_);
  }

  std::string key_of(int rank) const { return fmt::format("zerofp8/waiting/{}", rank); }
  void note(std::uint64_t index) {
    const std::string text = std::to_string(index);
    store_->set(key_of(rank()), std::vector<std::uint8_t>(text.begin(), text.end()));
  }

  // Calls f(begin, length) for slices of each rank's part, so that one message stays below the
  // limit.
  template <class F>
  static void pieces(std::size_t bytes, std::size_t ranks, F f) {
    const std::size_t step = std::max<std::size_t>(1, kChunkBytes / ranks);
    for (std::size_t begin = 0; begin < bytes; begin += step) {
      const std::size_t n = std::min(step, bytes - begin);
      f(begin, n);
    }
  }

  void unpack(const at::Tensor& received, void* recv, std::size_t bytes, std::size_t begin,
              std::size_t n) const {
    const at::Tensor host = received.cpu();
    for (std::size_t r = 0; r < static_cast<std::size_t>(size()); ++r) {
      std::memcpy(static_cast<std::byte*>(recv) + r * bytes + begin,
                  static_cast<const std::byte*>(host.data_ptr()) + r * n, n);
    }
  }

  // Starts a collective and waits for its end. What was given up stays alive with its tensors, all
  // of them the group's own.
  template <class Start>
  void run(Start start, std::vector<at::Tensor> tensors, const GroupCall& call) {
    c10::intrusive_ptr<c10d::Work> work;
    const Clock::time_point begin = Clock::now();
    try {
      work = start();
      bool noted = false;
      while (!wait_a_little(*work)) {
        const auto waited = Clock::now() - begin;
        if (call.interrupted != nullptr && *call.interrupted) {
          given_up_.push_back({work, std::move(tensors)});
          throw GroupInterrupted("interrupted");
        }
        if (!noted && waited > kPatience && store_) {
          note(call.index);
          noted = true;
        }
        if (waited > call.timeout) {
          given_up_.push_back({work, std::move(tensors)});
          throw GroupFailure(fmt::format("timed out after {} ms", call.timeout.count()));
        }
      }
      work->wait();
    } catch (const GroupFailure&) {
      throw;
    } catch (const std::exception& error) {
      throw GroupFailure(first_line(error));
    }
  }

  // gloo's works wake the waiter; a device's are asked.
  bool wait_a_little(c10d::Work& work) const {
    if (work.isCompleted()) return true;
    if (!device_.is_cpu()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      return work.isCompleted();
    }
    try {
      work.wait(milliseconds(200));
    } catch (const std::exception&) {
      if (work.isCompleted()) throw;
    }
    return work.isCompleted();
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string backend_;
  at::Device device_;
  c10::intrusive_ptr<c10d::Store> store_;
  GivenUp given_up_;
};

}  // namespace

std::unique_ptr<TorchGroup> TorchGroup::find(const std::string& name) {
  try {
    return std::make_unique<C10dGroup>(c10d::resolve_process_group(name));
  } catch (const std::exception& error) {
    throw ArgumentError(fmt::format("process group \"{}\": {}", name, first_line(error)));
  }
}

}  // namespace zerofp8
