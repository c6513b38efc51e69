// How ranks meet: by the host communicator first, so that a rank that cannot come is known to all.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "src/comm/nccl_communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// What a rank tells the others: how it got on, and rank 0 where NCCL is to meet.
struct Report {
  std::array<char, 252> error{};  // empty: well
  std::int32_t failed = 0;
  ncclUniqueId id{};

  void fail(const std::string& text) {
    failed = 1;
    std::memcpy(error.data(), text.data(), std::min(text.size(), error.size() - 1));
  }
};

// Returns rank 0's. Throws the same on all ranks if one has failed.
Report exchange(Communicator& control, const Report& mine) {
  std::vector<Report> all(static_cast<std::size_t>(control.size()));
  try {
    control.gather_control(std::as_bytes(std::span(&mine, 1)),
                           std::as_writable_bytes(std::span(all)));
  } catch (const CommError& error) {
    throw CommError(fmt::format("the NCCL communicator did not come about: {}{}{}",
                                mine.error.data(), mine.failed != 0 ? "; " : "", error.what()),
                    error.absent_ranks());
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].failed == 0) continue;
    throw CommError(fmt::format("the NCCL communicator did not come about: rank {}: {}", r,
                                all[r].error.data()));
  }
  return all[0];
}

std::unique_ptr<nccl::Handle> meet(Communicator& control, int device, const ncclUniqueId& id) {
  const milliseconds timeout = control.timeout();
  const Clock::time_point deadline = Clock::now() + timeout;
  std::unique_ptr<nccl::Handle> handle;
  Report mine;
  try {
    handle = std::make_unique<nccl::Handle>(device, control.size(), id, control.rank(), timeout);
  } catch (const CommError& error) {
    mine.fail(error.what());
  }
  // Ranks that got nowhere come when their time is up, a rank that failed at once waits for them.
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  control.set_timeout(std::max(left, milliseconds(0)) + NcclLink::patience(timeout));
  exchange(control, mine);
  control.set_timeout(timeout);
  return handle;
}

// One stream for all communicators of a device, also those that are not split from each other, as
// an engine's data ranks and experts are: see NcclRoot. Per thread: ranks may be threads.
std::shared_ptr<NcclRoot> root_of_this_thread(int device) {
  thread_local std::map<int, std::weak_ptr<NcclRoot>> roots;
  std::shared_ptr<NcclRoot> root = roots[device].lock();
  if (root == nullptr) roots[device] = root = std::make_shared<NcclRoot>(device);
  return root;
}

// With a `root` to share, or null.
std::unique_ptr<Communicator> open(std::unique_ptr<Communicator> control, int device,
                                   std::shared_ptr<NcclRoot> root) {
  Report mine;
  try {
    if (root == nullptr) root = root_of_this_thread(device);
    if (control->rank() == 0 && control->size() > 1) {
      nccl::check(ncclGetUniqueId(&mine.id), "ncclGetUniqueId");
    }
  } catch (const CommError& error) {
    mine.fail(error.what());
  }
  const ncclUniqueId id = exchange(*control, mine).id;
  std::unique_ptr<Communicator> watch;
  std::unique_ptr<nccl::Handle> handle;
  if (control->size() > 1) {
    watch = control->split(0, control->rank());
    handle = meet(*control, device, id);
  }
  auto link = std::make_shared<NcclLink>(std::move(watch), std::move(handle), control->timeout());
  return std::make_unique<NcclCommunicator>(std::move(root), std::move(control), std::move(link));
}

}  // namespace

// A communicator of its own, not ncclCommSplit: that would be a call on the parent, which it could
// take down with it.
std::unique_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  std::unique_ptr<Communicator> control;
  throw_if_failed("split", "control");
  try {
    control = control_->split(color, key);
  } catch (const CommError& error) {
    link_->fail({error.what(), error.absent_ranks()});
    throw;
  }
  return open(std::move(control), root_->device, root_);
}

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> control,
                                                     int device) {
  if (control == nullptr || control->on_device()) {
    throw ArgumentError(
        "make_nccl_communicator: control calls need a communicator of host memory: give it one of "
        "MPI, threads or a torch process group");
  }
  return open(std::move(control), device, nullptr);
}

bool built_with_nccl() { return true; }

}  // namespace zerofp8
