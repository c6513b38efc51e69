#include "tests/fake_nccl.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/fake_nccl_world.h"

namespace zerofp8::test {
namespace {

struct FakeComm {
  std::shared_ptr<World> world;
  int rank = 0, device = 0;
  std::shared_ptr<Life> life = std::make_shared<Life>();
  bool met = false, finalized = false;
  struct Launch {
    Ops ops;
    cudaStream_t stream = nullptr;
    int polls = 0;
  };
  std::optional<Launch> launch;  // asked for, not yet on the stream
  std::uint64_t launched = 0;
};

constexpr std::size_t kDevices = 8;
struct Faults {
  std::array<ncclResult_t, kDevices> async{}, next_launch{};
  std::array<std::atomic<bool>, kDevices> stalled{};
  bool unique_id = false, lazy = false;
};

struct State {
  std::mutex mutex;  // of all but what worlds have of their own
  std::set<FakeComm*> comms;
  std::map<std::string, std::shared_ptr<World>> worlds;
  Faults faults;
  int next_id = 0, aborted = 0;
  std::atomic<int> mismatched{0};
};
State& state() {
  static State all;
  return all;
}

struct Group {
  int depth = 0;
  FakeComm* comm = nullptr;
  cudaStream_t stream = nullptr;
  Ops ops;
};
thread_local Group group;

ncclResult_t misused(const std::string& what) {
  report_misuse(what);
  return ncclInvalidUsage;
}

// With state().mutex held. Null, and reported, where it is gone or was never there.
FakeComm* find(ncclComm_t handle, const char* who) {
  auto* comm = reinterpret_cast<FakeComm*>(handle);
  if (state().comms.contains(comm)) return comm;
  report_misuse(std::string(who) + " of a communicator that does not exist");
  return nullptr;
}

// With state().mutex held: a launch comes about a few questions after it was asked for.
bool come_about(FakeComm& comm) {
  FakeComm::Launch& launch = *comm.launch;
  if (++launch.polls < 3) return false;
  {
    std::lock_guard lock(comm.world->mutex);
    for (const std::uint64_t asked : comm.world->launches) {
      if (state().faults.lazy && asked <= comm.launched) return false;
    }
  }
  const auto ops = std::make_shared<const Ops>(std::move(launch.ops));
  ++comm.life->kernels;
  enqueue(launch.stream,
          [world = comm.world, life = comm.life, rank = comm.rank, ops, call = comm.launched,
           stalled = &state().faults.stalled[static_cast<std::size_t>(comm.device)]] {
            if (!run_kernel(*world, rank, call, ops, *life, *stalled)) ++state().mismatched;
            --life->kernels;
          });
  ++comm.launched;
  comm.launch.reset();
  return true;
}

ncclResult_t ask_for_launch(FakeComm& comm, Ops ops, cudaStream_t stream) {
  const auto device = static_cast<std::size_t>(comm.device);
  const ncclResult_t fault = std::exchange(state().faults.next_launch[device], ncclSuccess);
  if (fault != ncclSuccess) return fault;
  if (!comm.met || comm.finalized || comm.launch) return misused("a launch out of turn");
  if (device_of(stream) != comm.device) return misused("a launch on another device's stream");
  comm.launch = FakeComm::Launch{std::move(ops), stream};
  std::lock_guard lock(comm.world->mutex);
  ++comm.world->launches[static_cast<std::size_t>(comm.rank)];
  return ncclInProgress;
}

ncclResult_t add(const Op& op, ncclDataType_t type, ncclComm_t handle, cudaStream_t stream) {
  std::lock_guard lock(state().mutex);
  FakeComm* comm = find(handle, "a call");
  if (comm == nullptr) return ncclInvalidArgument;
  if (type != ncclUint8 || op.peer < 0 || op.peer >= comm->world->size()) {
    return misused("a call with wrong arguments");
  }
  if (group.depth == 0) {
    if (op.kind == Kind::kSend || op.kind == Kind::kRecv) return misused("send outside a group");
    return ask_for_launch(*comm, {op}, stream);
  }
  if (group.comm != nullptr && (group.comm != comm || group.stream != stream)) {
    return misused("a group of several communicators");
  }
  group.comm = comm;
  group.stream = stream;
  group.ops.push_back(op);
  return ncclSuccess;
}

void remove(FakeComm* comm) {
  state().comms.erase(comm);
  delete comm;
}

}  // namespace

void set_async_error(int device, ncclResult_t error) {
  std::lock_guard lock(state().mutex);
  state().faults.async[static_cast<std::size_t>(device)] = error;
}
void fail_next_launch(int device, ncclResult_t error) {
  std::lock_guard lock(state().mutex);
  state().faults.next_launch[static_cast<std::size_t>(device)] = error;
}
void fail_unique_id(bool fail) {
  std::lock_guard lock(state().mutex);
  state().faults.unique_id = fail;
}
void connect_lazily(bool lazily) {
  std::lock_guard lock(state().mutex);
  state().faults.lazy = lazily;
}
void stall(int device, bool stalled) {
  std::lock_guard lock(state().mutex);
  state().faults.stalled[static_cast<std::size_t>(device)] = stalled;
}
void mend() {
  std::lock_guard lock(state().mutex);
  state().faults.async.fill(ncclSuccess);
  state().faults.next_launch.fill(ncclSuccess);
  state().faults.unique_id = state().faults.lazy = false;
  for (auto& stalled : state().faults.stalled) stalled = false;
  state().worlds.clear();
}
int live_comms() {
  std::lock_guard lock(state().mutex);
  return static_cast<int>(state().comms.size());
}
int aborted_comms() {
  std::lock_guard lock(state().mutex);
  return state().aborted;
}
int mismatched_calls() { return state().mismatched; }

}  // namespace zerofp8::test

using namespace zerofp8::test;

extern "C" {

const char* ncclGetErrorString(ncclResult_t code) {
  switch (code) {
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclSystemError:
      return "unhandled system error";
    default:
      return "fake NCCL error";
  }
}
const char* ncclGetLastError(ncclComm_t) { return "as the fake was told"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard lock(state().mutex);
  if (state().faults.unique_id) return ncclSystemError;
  std::memset(id, 0, sizeof *id);
  const std::string text = "meeting " + std::to_string(++state().next_id);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config == nullptr || config->blocking != 0) return misused("a blocking communicator");
  std::lock_guard lock(state().mutex);
  auto& world = state().worlds[id.internal];
  if (world == nullptr) world = std::make_shared<World>(ranks);
  std::lock_guard world_lock(world->mutex);
  if (rank < 0 || rank >= ranks || world->size() != ranks ||
      world->came[static_cast<std::size_t>(rank)]) {
    return misused("ncclCommInitRankConfig with a rank that does not fit");
  }
  auto* comm = new FakeComm;
  comm->world = world;
  comm->rank = rank;
  cudaGetDevice(&comm->device);
  world->came[static_cast<std::size_t>(rank)] = true;
  state().comms.insert(comm);
  *handle = reinterpret_cast<ncclComm_t>(comm);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  std::lock_guard lock(state().mutex);
  FakeComm* comm = find(handle, "ncclCommGetAsyncError");
  if (comm == nullptr) return ncclInvalidArgument;
  *error = state().faults.async[static_cast<std::size_t>(comm->device)];
  if (*error != ncclSuccess) return ncclSuccess;
  if (!comm->met) {
    std::lock_guard world_lock(comm->world->mutex);
    comm->met = true;
    for (const bool came : comm->world->came) comm->met = comm->met && came;
  }
  const bool busy = !comm->met || (comm->launch && !come_about(*comm)) ||
                    (comm->finalized && comm->life->kernels > 0);
  if (busy) *error = ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return misused("ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  const Group ended = std::exchange(group, Group());
  if (ended.comm == nullptr) return ncclSuccess;
  std::lock_guard lock(state().mutex);
  return ask_for_launch(*ended.comm, ended.ops, ended.stream);
}

ncclResult_t ncclSend(const void* from, size_t bytes, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kSend, peer, from, nullptr, bytes}, type, comm, stream);
}
ncclResult_t ncclRecv(void* to, size_t bytes, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add({Kind::kRecv, peer, nullptr, to, bytes}, type, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t bytes, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kAllGather, 0, from, to, bytes}, type, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t bytes, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kBroadcast, root, from, to, bytes}, type, comm, stream);
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  std::lock_guard lock(state().mutex);
  FakeComm* comm = find(handle, "ncclCommFinalize");
  if (comm == nullptr) return ncclInvalidArgument;
  if (comm->finalized || comm->launch) return misused("ncclCommFinalize out of turn");
  comm->finalized = true;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  std::lock_guard lock(state().mutex);
  FakeComm* comm = find(handle, "ncclCommDestroy");
  if (comm == nullptr) return ncclInvalidArgument;
  if (!comm->finalized || comm->life->kernels > 0) report_misuse("destroyed before it was idle");
  remove(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  std::lock_guard lock(state().mutex);
  FakeComm* comm = find(handle, "ncclCommAbort");
  if (comm == nullptr) return ncclInvalidArgument;
  {
    std::lock_guard world_lock(comm->world->mutex);
    comm->life->aborted = true;
    comm->world->changed.notify_all();
  }
  ++state().aborted;
  remove(comm);
  return ncclSuccess;
}

}  // extern "C"
