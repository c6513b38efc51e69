// Payloads in device memory by NCCL, everything else by a host communicator of the same ranks.
//
// Calls only queue: the communication stream waits for the caller's, the collective follows, and
// an event behind it lets the caller's stream go on (Work::wait). There is one communication stream
// for all communicators of a device and thread: kernels of two communicators that run at once
// may each hold what the other needs to start, on different ranks, so they run in one order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "src/comm/nccl_link.h"
#include "src/comm/nccl_watchdog.h"
#include "zerofp8/communicator.h"

namespace zerofp8 {

// What a communicator shares with those split from it.
struct NcclRoot {
  explicit NcclRoot(int index) : device(index), stream(index), events(index), watchdog(index) {}
  const int device;
  nccl::Stream stream;
  nccl::EventPool events;
  NcclWatchdog watchdog;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclRoot> root, std::unique_ptr<Communicator> control,
                   std::shared_ptr<NcclLink> link);
  ~NcclCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string backend() const override { return "nccl"; }
  bool on_device() const override { return true; }
  std::string failure() const override {
    return link_->failed() ? link_->failure().story : std::string();
  }
  void watch(StreamHandle stream) override;

  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override;
  void all_reduce(std::span<float> data, ReduceOp op) override;
  void all_reduce(std::span<double> data, ReduceOp op) override;
  void all_reduce(std::span<std::int32_t> data, ReduceOp op) override;
  void all_reduce(std::span<std::int64_t> data, ReduceOp op) override;
  void gather_control(std::span<const std::byte> send, std::span<std::byte> recv) override;
  void barrier(std::chrono::milliseconds timeout) override;
  std::unique_ptr<Communicator> split(int color, int key) override;

  void set_timeout(std::chrono::milliseconds timeout) override;
  std::chrono::milliseconds timeout() const override { return link_->timeout(); }
  WireBytes bytes_sent() const override;

 private:
  // What a call does: `copy` on the stream, beside the calls of NCCL.
  struct Plan {
    NcclCall call;
    std::span<const std::byte> copy_from;  // this rank's part for itself
    std::span<std::byte> copy_to;
    std::function<void(ncclComm_t, cudaStream_t)> collective;
  };
  NcclCall new_call(Collective kind, std::size_t part_bytes, std::uint64_t bytes_to_others,
                    const CallOptions& options) const;
  std::unique_ptr<Work> start(const Plan& plan, const CallOptions& options);
  void queue(const Plan& plan, cudaStream_t stream);
  void throw_if_failed(std::string_view kind, std::string_view label);
  template <class Call>
  void control_call(Collective kind, const Call& call);
  template <class T>
  void reduce(std::span<T> data, ReduceOp op);

  std::shared_ptr<NcclRoot> root_;
  std::unique_ptr<Communicator> control_;  // null once failed
  std::shared_ptr<NcclLink> link_;
  const int rank_, size_;
  std::uint64_t calls_ = 0;
  WireBytes sent_;
};

}  // namespace zerofp8
