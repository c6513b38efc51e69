// Blocking byte collectives of one c10d::ProcessGroup, and the notes with which ranks find out who
// is absent.
//
//   auto group = TorchGroup::find("zerofp8:0");          // the name that torch.distributed gave it
//   group->all_gather(mine.data(), all.data(), 64, {.timeout = 10s, .may_abandon = true});
//
// No torch header here: torch_group.cc is the one file that includes them. Nothing takes the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace zerofp8 {

// What the process group said when a collective failed.
class GroupFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller has given up.
class GroupInterrupted : public GroupFailure {
 public:
  using GroupFailure::GroupFailure;
};

struct GroupCall {
  std::chrono::milliseconds timeout{0};
  // Number of this call on its communicator; noted in the group's store once the call waits long.
  std::uint64_t index = 0;
  const std::atomic<bool>* interrupted = nullptr;  // looked at while the call waits
};

class TorchGroup {
 public:
  // Throws ArgumentError if there is no group of that name.
  static std::unique_ptr<TorchGroup> find(const std::string& name);
  virtual ~TorchGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string backend() const = 0;  // "gloo", "nccl"

  // The caller's memory is free even if a call is given up. Of small messages: all in one.
  virtual void all_gather_note(const void* send, void* recv, std::size_t bytes,
                               const GroupCall& call) = 0;
  // Sizes are bytes per rank, 64-bit; messages are cut to at most 16 MiB. Throw GroupFailure.
  virtual void all_gather(const void* send, void* recv, std::size_t bytes,
                          const GroupCall& call) = 0;
  virtual void all_to_all(const void* send, void* recv, std::size_t bytes,
                          const GroupCall& call) = 0;
  virtual void broadcast(void* data, std::size_t bytes, int root, const GroupCall& call) = 0;

  // After a failure: ranks that had not come to call `index`, as far as the store can tell. False
  // if it cannot.
  virtual bool find_absent(std::uint64_t index, std::vector<int>& absent) = 0;
};

}  // namespace zerofp8
