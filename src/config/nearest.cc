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

}  // namespace

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
  const std::string_view leaf = unknown.leaf.substr(0, 64);
  Candidate sibling, elsewhere;
  for (const std::string_view path : known_paths()) {
    const PathParts known = parts_of(path);
    Candidate& best = known.parent == parent ? sibling : elsewhere;
    const int distance = edit_distance(leaf, known.leaf);
    if (distance < best.distance) best = {path, distance};
  }
  const int near = std::max(2, static_cast<int>(leaf.size()) / 3);
  if (sibling.distance <= near) return std::string(sibling.path);
  if (elsewhere.distance <= near) return std::string(elsewhere.path);
  return std::string(sibling.path.empty() ? elsewhere.path : sibling.path);
}

}  // namespace zerofp8
