#include "src/comm/nccl_communicator.h"

#include <fmt/format.h>

#include <cstdio>
#include <type_traits>

#include "src/comm/layout.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// wait() queues and returns, so that a signal has nothing to interrupt: set_interrupt_check() has
// no effect here.
class NcclWork final : public Work {
 public:
  // `captured`: into a graph. Nothing runs yet then, and CUDA takes no questions about its events.
  NcclWork(std::shared_ptr<NcclRoot> root, std::shared_ptr<NcclLink> link,
           std::shared_ptr<nccl::Event> finished, cudaStream_t stream, bool captured)
      : root_(std::move(root)),
        link_(std::move(link)),
        finished_(std::move(finished)),
        stream_(stream),
        captured_(captured) {}
  // The stream waits in any case: buffers are used again in its order.
  ~NcclWork() override {
    if (waited_ || link_->failed()) return;
    try {
      finished_->hold_back(stream_);
    } catch (const CommError& error) {
      std::fprintf(stderr, "zerofp8: %s\n", error.what());
    }
  }
  bool done() const override {
    if (link_->failed() || captured_) return true;
    try {
      return finished_->happened();
    } catch (const CommError& error) {
      link_->fail({error.what(), {}});
      return true;
    }
  }
  void wait() override {
    if (!link_->failed()) {
      try {
        if (!waited_) finished_->hold_back(stream_);
        waited_ = true;
      } catch (const CommError& error) {
        link_->fail({error.what(), {}});
      }
    }
    if (!link_->failed()) return;
    const Failure failure = link_->failure();
    throw CommError(failure.story, failure.absent_ranks);
  }

 private:
  std::shared_ptr<NcclRoot> root_;
  std::shared_ptr<NcclLink> link_;
  std::shared_ptr<nccl::Event> finished_;
  cudaStream_t stream_;
  bool captured_;
  bool waited_ = false;
};

// memory of the device, whose addresses are only passed on
void copy_on_device(std::span<const std::byte> from, std::span<std::byte> to, cudaStream_t stream) {
  if (from.empty() || from.data() == to.data()) return;
  nccl::check(
      cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyDeviceToDevice, stream),
      fmt::format("copy of {} bytes", from.size()));
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclRoot> root,
                                   std::unique_ptr<Communicator> control,
                                   std::shared_ptr<NcclLink> link)
    : root_(std::move(root)),
      control_(std::move(control)),
      link_(std::move(link)),
      rank_(control_->rank()),
      size_(control_->size()) {}

// A caller that has waited for its work may have it still on the device: so it gets some time.
NcclCommunicator::~NcclCommunicator() {
  const bool ended = root_->watchdog.wait_for(*link_, NcclLink::patience(timeout()));
  if (!ended && !link_->failed()) {
    link_->fail(
        {fmt::format("rank {} closed its communicator while a collective was under way", rank_),
         {rank_}});
  }
  root_->watchdog.release(*link_);
  link_->close();
}

NcclCall NcclCommunicator::new_call(Collective kind, std::size_t part_bytes,
                                    std::uint64_t bytes_to_others,
                                    const CallOptions& options) const {
  NcclCall call;
  call.note.collective = kind;
  call.note.dtype = options.dtype;
  call.note.call = calls_;
  call.note.send_bytes = call.note.recv_bytes = part_bytes;
  call.note.set_text(options.label);
  call.bytes_to_others = bytes_to_others;
  call.timeout = timeout();
  return call;
}

void NcclCommunicator::queue(const Plan& plan, cudaStream_t stream) {
  copy_on_device(plan.copy_from, plan.copy_to, stream);
  // Nothing to move: NCCL's calls would do nothing either.
  if (link_->handle() == nullptr || plan.call.note.send_bytes == 0) return;
  const auto calls = [&](ncclComm_t comm) { plan.collective(comm, stream); };
  if (link_->handle()->launch(calls, plan.call.timeout, link_->failed())) return;
  // First calls between two ranks connect them, which takes both.
  link_->fail_timed_out(plan.call);
}

std::unique_ptr<Work> NcclCommunicator::start(const Plan& plan, const CallOptions& options) {
  const std::string_view kind = to_string(plan.call.note.collective);
  throw_if_failed(kind, options.label);
  ++calls_;
  const cudaStream_t stream = root_->stream.get();
  const auto callers = static_cast<cudaStream_t>(options.stream);
  std::shared_ptr<nccl::Event> finished;
  bool captured = false;
  try {
    const nccl::Selected selected(root_->device);
    const std::shared_ptr<nccl::Event> ready = root_->events.take();
    ready->record(callers);
    ready->hold_back(stream);
    captured = nccl::is_captured(stream);
    if (captured && link_->handle() != nullptr) link_->handle()->set_captured();
    queue(plan, stream);
    finished = root_->events.take();
    finished->record(stream);
  } catch (const CommError& error) {
    link_->fail({describe(plan.call) + " on this rank: " + error.what(), {}});
  }
  if (link_->failed()) {
    const Failure failure = link_->failure();
    throw CommError(failure.story, failure.absent_ranks);
  }
  if (!captured) root_->watchdog.watch(link_, plan.call, finished);
  sent_.payload[static_cast<std::size_t>(options.dtype)] += plan.call.bytes_to_others;
  return std::make_unique<NcclWork>(root_, link_, std::move(finished), callers, captured);
}

void NcclCommunicator::watch(StreamHandle stream) {
  if (link_->handle() == nullptr) return;
  constexpr char kReplays[] = "replays of captured collectives";
  throw_if_failed("watching", kReplays);
  const NcclCall call = new_call(Collective::kAllGather, 0, 0, {.label = kReplays});
  try {
    const nccl::Selected selected(root_->device);
    if (nccl::is_captured(static_cast<cudaStream_t>(stream))) return;  // nothing runs
    const std::shared_ptr<nccl::Event> ended = root_->events.take();
    ended->record(static_cast<cudaStream_t>(stream));
    root_->watchdog.watch(link_, call, ended);
  } catch (const CommError& error) {
    link_->fail({describe(call) + " on this rank: " + error.what(), {}});
  }
}

// Other ranks may be in a control call with this one: closing it tells them.
void NcclCommunicator::throw_if_failed(std::string_view kind, std::string_view label) {
  if (!link_->failed()) return;
  if (control_ != nullptr) {
    sent_ += control_->bytes_sent();
    control_.reset();
  }
  const Failure failure = link_->failure();
  throw CommError(fmt::format("{} '{}' cannot run: this communicator has failed before: {}", kind,
                              label, failure.story),
                  failure.absent_ranks);
}

template <class Call>
void NcclCommunicator::control_call(Collective kind, const Call& call) {
  throw_if_failed(to_string(kind), "control");
  try {
    call(*control_);
  } catch (const CommError& error) {
    link_->fail({error.what(), error.absent_ranks()});
    const Failure failure = link_->failure();  // of the device, if that came first
    throw CommError(failure.story, failure.absent_ranks);
  }
}

void NcclCommunicator::gather_control(std::span<const std::byte> send, std::span<std::byte> recv) {
  control_call(Collective::kGatherControl,
               [&](Communicator& control) { control.gather_control(send, recv); });
}

void NcclCommunicator::barrier(std::chrono::milliseconds timeout) {
  control_call(Collective::kBarrier, [&](Communicator& control) { control.barrier(timeout); });
}

template <class T>
void NcclCommunicator::reduce(std::span<T> data, ReduceOp op) {
  if constexpr (std::is_integral_v<T>) {
    // Overflow is a CommError that leaves communicators as they are.
    throw_if_failed(to_string(Collective::kAllReduce), "control");
    control_->all_reduce(data, op);
  } else {
    control_call(Collective::kAllReduce,
                 [&](Communicator& control) { control.all_reduce(data, op); });
  }
}

void NcclCommunicator::all_reduce(std::span<float> data, ReduceOp op) { reduce(data, op); }
void NcclCommunicator::all_reduce(std::span<double> data, ReduceOp op) { reduce(data, op); }
void NcclCommunicator::all_reduce(std::span<std::int32_t> data, ReduceOp op) { reduce(data, op); }
void NcclCommunicator::all_reduce(std::span<std::int64_t> data, ReduceOp op) { reduce(data, op); }

void NcclCommunicator::set_timeout(std::chrono::milliseconds timeout) {
  link_->set_timeout(timeout);
  if (control_ != nullptr) control_->set_timeout(timeout);
}

WireBytes NcclCommunicator::bytes_sent() const {
  WireBytes sent = sent_;
  if (control_ != nullptr) sent += control_->bytes_sent();
  return sent;
}

}  // namespace zerofp8
