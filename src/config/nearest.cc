#include "src/config/nearest.h"

#include <algorithm>
#include <limits>
#include <set>
#include <vector>

#include "src/config/keys.h"

namespace zerofp8 {
namespace {

struct PathParts {
  std::string_view parent, leaf;
};

PathParts parts_of(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  return {path.substr(0, slash), path.substr(slash + 1)};
}

// All keys and all blocks that contain keys.
std::set<std::string_view> known_paths() {
  std::set<std::string_view> paths;
  for (const Key& key : keys()) {
    if (key.role == KeyRole::kRefused) continue;
    for (std::string_view path = key.path; !path.empty(); path = parts_of(path).parent) {
      paths.insert(path);
    }
  }
  return paths;
}

struct Candidate {
  std::string_view path;
  int distance = std::numeric_limits<int>::max();
};

// "gradient_clip" of "gradient_clipping"
bool is_part(std::string_view a, std::string_view b) {
  constexpr std::size_t kTelling = 8;
  const std::size_t shared = std::min(a.size(), b.size());
  return shared >= kTelling && a.substr(0, shared) == b.substr(0, shared);
}

}  // namespace

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return lower;
}

int edit_distance(std::string_view a, std::string_view b) {
  const std::size_t width = b.size() + 1;
  std::vector<int> cost((a.size() + 1) * width);
  const auto at = [&](std::size_t i, std::size_t j) -> int& { return cost[i * width + j]; };
  for (std::size_t i = 0; i <= a.size(); ++i) at(i, 0) = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) at(0, j) = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int replace = at(i - 1, j - 1) + (a[i - 1] == b[j - 1] ? 0 : 1);
      at(i, j) = std::min({replace, at(i - 1, j) + 1, at(i, j - 1) + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        at(i, j) = std::min(at(i, j), at(i - 2, j - 2) + 1);
      }
    }
  }
  return at(a.size(), b.size());
}

std::string nearest_key(std::string_view unknown_path) {
  const PathParts unknown = parts_of(unknown_path);
  const std::string parent = canonical_path(unknown.parent);
  // The table is quadratic in the length, and nobody mistypes 64 characters of a key.
  const std::string leaf = lower_case(unknown.leaf.substr(0, 64));
  Candidate sibling, elsewhere;
  for (const std::string_view path : known_paths()) {
    const PathParts known = parts_of(path);
    const bool is_sibling = known.parent == parent;
    if (!is_sibling && path.starts_with("/msamp/")) continue;  // another spelling of ours
    Candidate& best = is_sibling ? sibling : elsewhere;
    const int distance = is_part(leaf, known.leaf) ? 1 : edit_distance(leaf, known.leaf);
    if (distance < best.distance) best = {path, distance};
  }
  // A hint that leads astray is worse than none: "fp8" is not "fp16", nor "msamp" "aio".
  const int near = std::max(1, static_cast<int>(leaf.size()) / 5);
  if (sibling.distance <= near) return std::string(sibling.path);
  if (elsewhere.distance <= near) return std::string(elsewhere.path);
  return "";
}

}  // namespace zerofp8
