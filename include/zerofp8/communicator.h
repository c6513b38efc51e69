// Collectives between ranks. Backends move bytes and never see bf16 or fp8, so every dtype gives
// the same bits on every backend; sums are made in rank order.
//
//   std::unique_ptr<Communicator> world = make_mpi_communicator();
//   auto work = world->all_to_all(send, recv, {.dtype = DType::kE4m3});
//   work->wait();   // after a time-out throws a CommError that names the absent ranks
//
// Calls on one communicator are executed in the order in which they were made, which must be the
// same on every rank: kinds, sizes, dtypes and labels are compared, and a difference is a CommError
// on all ranks that tells both sides. Different communicators may be used at the same time, in any
// order. Buffers must stay alive and untouched until wait() returns. (With payloads on a device
// some of this is different: see make_nccl_communicator.)
//
// After a failure a communicator stays failed: what is pending and each later call throws with the
// first story, on all ranks. Wrong arguments are an ArgumentError of the calling rank and do no
// harm.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zerofp8/dtype.h"

namespace zerofp8 {

enum class ReduceOp : std::uint8_t { kSum, kMax };

// Opaque handle of the device stream that a call must follow; nullptr means host memory.
using StreamHandle = void*;

struct CallOptions {
  DType dtype = DType::kFp32;  // what the bytes stand for: selects the byte counter
  StreamHandle stream = nullptr;
  // Named in errors; the same on every rank, which is checked.
  std::string_view label = "collective";
};

// A collective under way. The destructor waits, too, but without throwing: buffers may be freed
// after it.
class Work {
 public:
  virtual ~Work() = default;
  virtual bool done() const = 0;
  // Blocks until the result is there. Throws CommError on failure or time-out. May be called once
  // or more.
  virtual void wait() = 0;
};

// Bytes that this rank sent to other ranks, per dtype of the payload. Control messages (scalars,
// agreement, start-up checks) are counted apart.
struct WireBytes {
  std::array<std::uint64_t, kDTypeCount> payload{};
  std::uint64_t control = 0;
  // Notes that ranks exchange before a payload (what it is, how long), where a backend has such.
  std::uint64_t envelopes = 0;
  std::uint64_t of(DType dtype) const { return payload[static_cast<std::size_t>(dtype)]; }
  std::uint64_t total_payload() const;
  WireBytes operator-(const WireBytes& other) const;
  WireBytes& operator+=(const WireBytes& other);
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "self", "threads", "mpi", "nccl", ...
  virtual std::string backend() const = 0;
  // Whether payloads (all_to_all, all_gather, broadcast) lie in device memory; control calls always
  // take host memory.
  virtual bool on_device() const { return false; }
  // Why it has failed, where Work::wait() may return before that is known (payloads on a device):
  // asked once the device is through with them. Empty: it has not.
  virtual std::string failure() const { return ""; }
  // For collectives that were captured into a CUDA graph: its replays run behind the communicator's
  // back. What is queued on `stream` at this call is watched as one collective from now on: its
  // time-out, who is absent, NCCL's errors; it ends rather than hangs. Does nothing on hosts.
  virtual void watch(StreamHandle) {}

  // Part i of `send` goes to rank i; part i of `recv` comes from rank i. Both hold size() equal
  // parts; sizes are 64-bit and messages are split below INT_MAX bytes.
  virtual std::unique_ptr<Work> all_to_all(std::span<const std::byte> send,
                                           std::span<std::byte> recv,
                                           const CallOptions& options) = 0;
  // recv = send of rank 0, send of rank 1, ...; recv.size() == size() * send.size().
  // send may be the caller's own part of recv (in place).
  virtual std::unique_ptr<Work> all_gather(std::span<const std::byte> send,
                                           std::span<std::byte> recv,
                                           const CallOptions& options) = 0;
  virtual std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                          const CallOptions& options) = 0;
  // In place, rank-order sum: the same bits on every rank. For scalars and small control data;
  // counted as control bytes. Blocking. kMax gives NaN if any rank has one; integer overflow is a
  // CommError.
  virtual void all_reduce(std::span<float> data, ReduceOp op) = 0;
  virtual void all_reduce(std::span<double> data, ReduceOp op) = 0;
  virtual void all_reduce(std::span<std::int32_t> data, ReduceOp op) = 0;
  virtual void all_reduce(std::span<std::int64_t> data, ReduceOp op) = 0;
  // all_gather of small control data, blocking, counted as control bytes.
  virtual void gather_control(std::span<const std::byte> send, std::span<std::byte> recv) = 0;
  // Returns when all ranks have called it. Throws CommError that names the absent ranks.
  virtual void barrier(std::chrono::milliseconds timeout) = 0;

  // Ranks that pass the same color form a new communicator, ordered by (key, rank). Collective.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  // How long a collective may take, from when it is the oldest one pending, before it becomes a
  // CommError. For later calls; children inherit it. Default 10 minutes.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual WireBytes bytes_sent() const = 0;
};

// One rank, no launcher.
std::unique_ptr<Communicator> make_self_communicator();

// `size` communicators of one process, one for each thread: for tests and for single-node
// experiments.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size);

// All ranks of MPI_COMM_WORLD, duplicated. Initialises MPI if the program has not and then
// finalises it when the last communicator is gone. Throws CommError where zerofp8 was built without
// MPI.
std::unique_ptr<Communicator> make_mpi_communicator();
bool built_with_mpi();

// Payloads in the memory of CUDA device `device`, by NCCL, with the ranks of `control`: a
// communicator of host memory (MPI, threads, a torch process group) that carries the control calls
// and NCCL's start-up, and is not used otherwise. Collective: a rank that does not come, or cannot,
// is a CommError on all. Throws CommError where zerofp8 was built without NCCL.
//
//   auto world = make_nccl_communicator(make_mpi_communicator(), local_rank);
//   fill<<<n, 256, 0, stream>>>(send);
//   auto work = world->all_to_all(send_span, recv_span, {.stream = stream});
//   work->wait();                            // the stream waits, the program does not
//   consume<<<n, 256, 0, stream>>>(recv);
//
// A call follows what is queued on CallOptions::stream (nullptr: the legacy default stream of the
// device). Work::wait() makes that stream wait, never the host, and so does the destructor of a
// Work that was not waited for: buffers may be used again in stream order behind it. Work::done()
// tells whether the device has got there.
// A failure is therefore thrown by wait() only if it is known by then, otherwise by the next call
// of any kind on the communicator, control calls, too; what the stream has consumed since is not
// valid, and buffers may be in use until the device is synchronised. The time-out counts from when
// a call is the oldest one queued, with what its stream has to do before it. A call may block the
// host while NCCL connects ranks that exchange for the first time. Sizes and labels are compared
// only when a call has timed out.
//
// All that a thread makes on one device share a stream, split from each other or not: calls on all
// of them must be made in one order that all ranks keep, from one thread at a time. Closing one
// waits for what it has queued, 10 seconds at most.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> control,
                                                     int device);
bool built_with_nccl();

// Compares `text` (config, names, shapes, order) over all ranks at the start. Where ranks differ,
// every rank throws the same CommError, which names the ranks and the first line that differs,
// before any other collective could hang.
void check_same_on_all_ranks(Communicator& comm, const std::string& what, const std::string& text);

}  // namespace zerofp8
