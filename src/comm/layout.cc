#include "src/comm/layout.h"

#include <fmt/format.h>

#include <cstring>
#include <functional>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.empty() || b.empty()) return false;
  const std::less<const std::byte*> before;
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

}  // namespace

void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) {
  if (from.empty() || from.data() == to.data()) return;
  std::memcpy(to.data(), from.data(), from.size());
}

void check_all_to_all(std::span<const std::byte> send, std::span<const std::byte> recv, int ranks,
                      std::string_view label) {
  if (send.size() != recv.size() || send.size() % static_cast<std::size_t>(ranks) != 0) {
    throw ArgumentError(
        fmt::format("all_to_all '{}': given {} bytes to send and {} to receive on {} ranks; both "
                    "must be the same "
                    "multiple of the number of ranks",
                    label, send.size(), recv.size(), ranks));
  }
  if (overlap(send, recv)) {
    throw ArgumentError(
        fmt::format("all_to_all '{}': send and recv overlap; give it two separate buffers", label));
  }
}

void check_gather(Collective kind, std::span<const std::byte> send, std::span<const std::byte> recv,
                  int rank, int ranks, std::string_view label) {
  const auto parts = static_cast<std::size_t>(ranks);
  // Division, because parts * send.size() could wrap.
  if (recv.size() % parts != 0 || recv.size() / parts != send.size()) {
    throw ArgumentError(fmt::format(
        "{} '{}': given {} bytes to send and {} to receive on {} ranks; recv must hold one part of "
        "send's size for each rank",
        to_string(kind), label, send.size(), recv.size(), ranks));
  }
  if (send.data() != equal_part(recv, rank, ranks).data() && overlap(send, recv)) {
    throw ArgumentError(
        fmt::format("{} '{}': send overlaps recv; give it a separate buffer or exactly this rank's "
                    "part of recv",
                    to_string(kind), label));
  }
}

void check_root(int root, int ranks, std::string_view label) {
  if (root >= 0 && root < ranks) return;
  throw ArgumentError(
      fmt::format("broadcast '{}': given root {}; allowed: 0 to {}", label, root, ranks - 1));
}

}  // namespace zerofp8
