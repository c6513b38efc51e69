// Communicator over a torch process group: gloo, or nccl (through device memory). Sums are made in
// rank order, as everywhere, so that the bits are those of the other backends.
//
//   auto data = make_process_group_communicator("zerofp8:0", 10min, make_group);
//
// A thread per communicator executes calls in order. Before each one the ranks exchange a note of
// what they are about to do: a difference is a CommError on all ranks, and a small control message
// travels inside the note.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zerofp8/communicator.h"

namespace zerofp8 {

// Makes a group of these ranks of the parent and returns its name; called by exactly these ranks.
using GroupFactory = std::function<std::string(const std::vector<int>& members)>;

// `name` is the group's name in torch's registry. The group must have no other user.
std::unique_ptr<Communicator> make_process_group_communicator(const std::string& name,
                                                              std::chrono::milliseconds timeout,
                                                              GroupFactory make_group);

}  // namespace zerofp8
