// Messages through MPI; the only file of the library that includes mpi.h. It uses a duplicate of
// MPI_COMM_WORLD, so that it never meets messages of other MPI users in the program, and only
// point-to-point calls that return at once: MPI's own collectives cannot say which rank is missing.
#include "src/comm/mpi_transport.h"

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/comm/p2p_communicator.h"
#include "src/comm/transport.h"
#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError(fmt::format("{} failed: {}", call, std::string_view(text, length)));
}
#define ZEROFP8_MPI_CHECK(function, ...) check_mpi(function(__VA_ARGS__), #function)

// False before MPI_Init and after MPI_Finalize, when no other MPI call is allowed.
bool mpi_is_running() {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

// MPI as a whole can be started and ended once in a process. Starts it unless the program has, and
// ends it, if it was started here, with the last communicator.
class MpiRuntime {
 public:
  static std::shared_ptr<MpiRuntime> acquire() {
    static std::mutex mutex;
    static std::weak_ptr<MpiRuntime> shared;
    std::lock_guard lock(mutex);
    std::shared_ptr<MpiRuntime> runtime = shared.lock();
    if (runtime == nullptr) shared = runtime = std::shared_ptr<MpiRuntime>(new MpiRuntime);
    return runtime;
  }
  ~MpiRuntime() {
    if (started_here_ && mpi_is_running()) MPI_Finalize();
  }
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

 private:
  MpiRuntime() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) {
      throw CommError(
          "MPI has been finalised and cannot start again in this process; keep one communicator "
          "until "
          "the end, or call MPI_Init_thread and MPI_Finalize in the program");
    }
    int level = MPI_THREAD_SINGLE;
    if (mpi_is_running()) {
      ZEROFP8_MPI_CHECK(MPI_Query_thread, &level);
    } else {
      ZEROFP8_MPI_CHECK(MPI_Init_thread, nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
      started_here_ = true;
    }
    if (level >= MPI_THREAD_MULTIPLE) return;
    const std::string hint = started_here_
                                 ? "use an MPI library that was built with it"
                                 : "start MPI with MPI_Init_thread(..., MPI_THREAD_MULTIPLE, "
                                   "...), or let zerofp8 start it";
    if (started_here_) MPI_Finalize();
    throw CommError(
        fmt::format("MPI gives thread level {} and zerofp8 needs MPI_THREAD_MULTIPLE ({}), because "
                    "messages move in a thread of their own; {}",
                    level, MPI_THREAD_MULTIPLE, hint));
  }
  bool started_here_ = false;
};

// Calls test() until it is true or `limit` is over.
template <class Test>
bool poll_for(std::chrono::milliseconds limit, const Test& test) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!test()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

constexpr std::chrono::milliseconds kWithdrawLimit{200};
constexpr std::chrono::milliseconds kGoodbyeLimit{2000};

// Small messages are copied: MPI has no way to take a send back, so one that is still pending when
// its request goes must own its memory.
constexpr std::size_t kBufferedBytes = 4096;

struct PendingSend {
  MPI_Request request = MPI_REQUEST_NULL;
  std::vector<std::byte> bytes;
};

// Small sends whose Request is gone: they go on by themselves, in memory of their own.
class Orphans {
 public:
  void adopt(PendingSend&& send) {
    std::lock_guard lock(mutex_);
    sends_.push_back(std::move(send));
    sends_.remove_if([](PendingSend& pending) { return through(pending); });
  }
  bool all_through() {
    std::lock_guard lock(mutex_);
    sends_.remove_if([](PendingSend& pending) { return through(pending); });
    return sends_.empty();
  }
  // MPI may still read them: never freed.
  void leak() {
    std::lock_guard lock(mutex_);
    if (!sends_.empty()) new std::list<PendingSend>(std::move(sends_));
  }

 private:
  static bool through(PendingSend& pending) {
    int flag = 0;
    return MPI_Test(&pending.request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
  }
  std::mutex mutex_;
  std::list<PendingSend> sends_;
};

class MpiSend final : public Request {
 public:
  MpiSend(MPI_Comm comm, int peer, int tag, std::span<const std::byte> bytes, Orphans& orphans)
      : peer_(peer), orphans_(orphans) {
    const void* data = bytes.data();
    if (bytes.size() <= kBufferedBytes) {
      send_.bytes.assign(bytes.begin(), bytes.end());
      data = send_.bytes.data();
    }
    ZEROFP8_MPI_CHECK(MPI_Isend, data, static_cast<int>(bytes.size()), MPI_BYTE, peer, tag, comm,
                      &send_.request);
  }
  ~MpiSend() override {
    if (send_.request == MPI_REQUEST_NULL || !mpi_is_running()) return;
    if (!send_.bytes.empty()) {
      orphans_.adopt(std::move(send_));
      return;
    }
    int flag = 0;
    const bool through = poll_for(kWithdrawLimit, [&] {
      return MPI_Test(&send_.request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
    });
    if (through) return;
    std::fprintf(
        stderr,
        "zerofp8: gave up a message to rank %d in the middle; MPI may still read its buffer\n",
        peer_);
    MPI_Request_free(&send_.request);
  }
  bool test() override {
    int flag = 0;
    ZEROFP8_MPI_CHECK(MPI_Test, &send_.request, &flag, MPI_STATUS_IGNORE);
    return flag != 0;
  }

 private:
  const int peer_;
  Orphans& orphans_;
  PendingSend send_;
};

class MpiRecv final : public Request {
 public:
  MpiRecv(MPI_Comm comm, int peer, int tag, std::span<std::byte> bytes)
      : peer_(peer), bytes_(static_cast<int>(bytes.size())) {
    ZEROFP8_MPI_CHECK(MPI_Irecv, bytes.data(), bytes_, MPI_BYTE, peer, tag, comm, &request_);
  }
  ~MpiRecv() override {
    if (request_ == MPI_REQUEST_NULL || !mpi_is_running()) return;
    MPI_Cancel(&request_);
    int flag = 0;
    const bool through = poll_for(kWithdrawLimit, [&] {
      return MPI_Test(&request_, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
    });
    if (through) return;
    std::fprintf(
        stderr,
        "zerofp8: gave up a message from rank %d in the middle; MPI may still write its buffer\n",
        peer_);
    MPI_Request_free(&request_);
  }
  bool test() override {
    int flag = 0, count = 0;
    MPI_Status status;
    const int code = MPI_Test(&request_, &flag, &status);
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_TRUNCATE) {
      throw CommError(
          fmt::format("rank {} sent more than the {} bytes expected from it", peer_, bytes_));
    }
    check_mpi(code, "MPI_Test");
    if (flag == 0) return false;
    ZEROFP8_MPI_CHECK(MPI_Get_count, &status, MPI_BYTE, &count);
    if (count == bytes_) return true;
    throw CommError(
        fmt::format("rank {} sent {} bytes where {} are expected from it", peer_, count, bytes_));
  }

 private:
  const int peer_;
  const int bytes_;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(std::size_t chunk_bytes)
      : Transport(chunk_bytes), runtime_(MpiRuntime::acquire()) {
    ZEROFP8_MPI_CHECK(MPI_Comm_dup, MPI_COMM_WORLD, &comm_);
    ZEROFP8_MPI_CHECK(MPI_Comm_set_errhandler, comm_, MPI_ERRORS_RETURN);
    ZEROFP8_MPI_CHECK(MPI_Comm_rank, comm_, &rank_);
    ZEROFP8_MPI_CHECK(MPI_Comm_size, comm_, &size_);
    int* upper_bound = nullptr;
    int found = 0;
    ZEROFP8_MPI_CHECK(MPI_Comm_get_attr, comm_, MPI_TAG_UB, &upper_bound, &found);
    if (found != 0) tag_upper_bound_ = *upper_bound;
  }
  ~MpiTransport() override {
    if (!mpi_is_running()) return;
    // MPI gives the number of a freed communicator to the next one, which would then see messages
    // that come late. So it is freed only if every rank has said that it sends no more; else it is
    // kept.
    if (say_goodbye()) {
      MPI_Comm_free(&comm_);
    } else {
      orphans_.leak();
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string backend() const override { return "mpi"; }
  int max_tag() const override { return tag_upper_bound_ - 1; }

  std::unique_ptr<Request> post_send(int peer, int tag, std::span<const std::byte> bytes) override {
    return std::make_unique<MpiSend>(comm_, peer, tag, bytes, orphans_);
  }
  std::unique_ptr<Request> post_recv(int peer, int tag, std::span<std::byte> bytes) override {
    return std::make_unique<MpiRecv>(comm_, peer, tag, bytes);
  }
  // MPI has no bell to wait for. The longer nothing has come, the less a little more matters.
  void idle(std::chrono::microseconds waited) override {
    using std::chrono::microseconds;
    std::this_thread::sleep_for(std::clamp(waited / 64, microseconds(50), microseconds(1000)));
  }

 private:
  bool say_goodbye() noexcept {
    try {
      std::vector<std::byte> in(static_cast<std::size_t>(size_)), out(1);
      std::vector<std::unique_ptr<Request>> requests;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        requests.push_back(post_send(peer, tag_upper_bound_, out));
        requests.push_back(post_recv(peer, tag_upper_bound_,
                                     std::span(in).subspan(static_cast<std::size_t>(peer), 1)));
      }
      return poll_for(kGoodbyeLimit, [&] {
        std::erase_if(requests, [](const auto& request) { return request->test(); });
        return requests.empty() && orphans_.all_through();
      });
    } catch (const std::exception& error) {
      std::fprintf(stderr, "zerofp8: closing MPI: %s\n", error.what());
      return false;
    }
  }

  std::shared_ptr<MpiRuntime> runtime_;  // declared first: MPI ends after the communicator
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int tag_upper_bound_ = 32767;  // what the MPI standard promises
  Orphans orphans_;
};

}  // namespace

std::shared_ptr<Transport> make_mpi_transport(std::size_t chunk_bytes) {
  return std::make_shared<MpiTransport>(chunk_bytes);
}

std::unique_ptr<Communicator> make_mpi_communicator(std::size_t chunk_bytes) {
  return make_p2p_communicator(make_mpi_transport(chunk_bytes));
}

std::unique_ptr<Communicator> make_mpi_communicator() {
  return make_mpi_communicator(kDefaultChunkBytes);
}

bool built_with_mpi() { return true; }

}  // namespace zerofp8
