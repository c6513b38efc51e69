#include <algorithm>
#include <array>
#include <numeric>

#include "src/comm/p2p_communicator.h"

namespace zerofp8 {

// Gathers colors and keys and settles on a context id that no rank has in use. Communicators may be
// made from several parents at once, in another order on another rank: each rank then lets only the
// first of them have an id, and if ranks let different ones have it, all try again with fresh ids.
int P2pCommunicator::agree_on_context(int color, int key, std::vector<int>& colors,
                                      std::vector<int>& keys) {
  struct Proposal {
    int color, key, context;
  };
  const auto ranks = static_cast<std::size_t>(size());
  ContextIds& ids = progress_->transport().context_ids();
  std::vector<Proposal> all(ranks);
  std::vector<int> reserved(ranks);
  for (;;) {
    const Proposal mine{color, key, ids.propose()};
    gather_control(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    int context = 0;
    for (const Proposal& proposal : all) context = std::max(context, proposal.context);
    const int ok = ids.reserve(context) ? 1 : 0;
    gather_control(std::as_bytes(std::span(&ok, 1)), std::as_writable_bytes(std::span(reserved)));
    if (std::find(reserved.begin(), reserved.end(), 0) != reserved.end()) continue;
    colors.clear();
    keys.clear();
    for (const Proposal& proposal : all) {
      colors.push_back(proposal.color);
      keys.push_back(proposal.key);
    }
    return context;
  }
}

// Ranks of different colors share the context id: no message ever goes between them.
std::unique_ptr<Communicator> P2pCommunicator::split(int color, int key) {
  std::vector<int> colors, keys;
  const int context = agree_on_context(color, key, colors, keys);
  std::vector<int> chosen(colors.size());
  std::iota(chosen.begin(), chosen.end(), 0);
  std::erase_if(chosen, [&](int r) { return colors[static_cast<std::size_t>(r)] != color; });
  std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) {
    return keys[static_cast<std::size_t>(a)] < keys[static_cast<std::size_t>(b)];
  });
  Group group;
  group.rank = static_cast<int>(std::find(chosen.begin(), chosen.end(), rank()) - chosen.begin());
  for (const int r : chosen) group.members.push_back(group_.members[static_cast<std::size_t>(r)]);
  return std::make_unique<P2pCommunicator>(progress_, std::move(group), context, timeout());
}

}  // namespace zerofp8
