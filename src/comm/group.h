// The ranks of one communicator and what they are called in messages.
#pragma once

#include <string>
#include <vector>

namespace zerofp8 {

struct Group {
  int rank = 0;              // this rank, within the group
  std::vector<int> members;  // members[r] = rank of r in the transport

  int size() const { return static_cast<int>(members.size()); }

  // "rank 2", or "rank 2 (world rank 5)" in a sub-communicator where the two differ.
  std::string name(int r) const {
    std::string text = "rank " + std::to_string(r);
    const int world = members[static_cast<std::size_t>(r)];
    if (world != r) text += " (world rank " + std::to_string(world) + ")";
    return text;
  }
};

// "rank 3", "ranks 0, 3".
inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace zerofp8
