// The check at the start of a run: ranks that would make different calls later learn it here, by
// name, instead of in a hang. Hashes are compared first; texts travel only where they differ.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "src/comm/group.h"
#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// Two independent 64-bit FNV-1a style sums and the length: a chance match cannot matter in
// practice.
struct Digest {
  std::uint64_t first = 0xcbf29ce484222325u, second = 0x84222325cbf29ce4u, bytes = 0;
  auto operator<=>(const Digest&) const = default;
};

Digest digest_of(std::string_view text) {
  Digest digest;
  for (const char c : text) {
    digest.first = (digest.first ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    digest.second = (digest.second + static_cast<unsigned char>(c) + 1) * 0x9e3779b97f4a7c15u;
    digest.second ^= digest.second >> 29;
  }
  digest.bytes = text.size();
  return digest;
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return lines;
}

std::string quote_line(const std::vector<std::string_view>& lines, std::size_t index) {
  constexpr std::size_t kShown = 160;
  if (index >= lines.size()) return "nothing (the text ends before)";
  const bool cut = lines[index].size() > kShown;
  return fmt::format("'{}'{}", lines[index].substr(0, kShown), cut ? " ..." : "");
}

std::string first_difference(const std::string& a, const std::string& b, const std::string& who_a,
                             const std::string& who_b) {
  const auto lines_a = lines_of(a), lines_b = lines_of(b);
  std::size_t i = 0;
  while (i < lines_a.size() && i < lines_b.size() && lines_a[i] == lines_b[i]) ++i;
  return fmt::format("first difference in line {}: {} has {}, {} has {}", i + 1, who_a,
                     quote_line(lines_a, i), who_b, quote_line(lines_b, i));
}

// The text of `rank`, on every rank. As control data, in pieces of which each rank has room for
// one of every rank: payloads may lie on a device, and this precedes a throw.
std::string text_of(Communicator& comm, int rank, std::uint64_t bytes, const std::string& own) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  std::string text;
  while (text.size() < bytes) {
    std::string mine(std::min<std::size_t>(kPiece, bytes - text.size()), '\0');
    if (comm.rank() == rank) mine = own.substr(text.size(), mine.size());
    std::string all(mine.size() * static_cast<std::size_t>(comm.size()), '\0');
    comm.gather_control(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
    text += all.substr(mine.size() * static_cast<std::size_t>(rank), mine.size());
  }
  return text;
}

}  // namespace

void check_same_on_all_ranks(Communicator& comm, const std::string& what, const std::string& text) {
  const Digest mine = digest_of(text);
  std::vector<Digest> digests(static_cast<std::size_t>(comm.size()));
  comm.gather_control(std::as_bytes(std::span(&mine, 1)),
                      std::as_writable_bytes(std::span(digests)));
  std::map<Digest, std::vector<int>> groups;
  for (int r = 0; r < comm.size(); ++r) groups[digests[static_cast<std::size_t>(r)]].push_back(r);
  if (groups.size() == 1) return;

  // The largest group is taken for right; of equal ones the one with the lowest rank.
  std::vector<std::vector<int>> ordered;
  for (auto& [digest, ranks] : groups) ordered.push_back(ranks);
  std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return a.size() != b.size() ? a.size() > b.size() : a.front() < b.front();
  });
  constexpr std::size_t kShownGroups = 4;
  const auto bytes_of_rank = [&](int r) { return digests[static_cast<std::size_t>(r)].bytes; };
  const int reference = ordered[0].front();
  const std::string expected = text_of(comm, reference, bytes_of_rank(reference), text);
  std::string story = fmt::format("{} differs between ranks", what);
  for (std::size_t g = 1; g < std::min(ordered.size(), kShownGroups); ++g) {
    const int other = ordered[g].front();
    const std::string found = text_of(comm, other, bytes_of_rank(other), text);
    story +=
        "; " + first_difference(expected, found, list_ranks(ordered[0]), list_ranks(ordered[g]));
  }
  if (ordered.size() > kShownGroups) {
    story += fmt::format("; {} more variants", ordered.size() - kShownGroups);
  }
  throw CommError(story + ". Start all ranks with the same config and model");
}

}  // namespace zerofp8
