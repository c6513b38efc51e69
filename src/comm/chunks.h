// A payload of any size as messages below the backend's limit. Offsets are 64-bit throughout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/comm/transport.h"

namespace zerofp8 {

// How `bytes` bytes are cut: equal chunks, the last one shorter; an empty payload has none.
struct ChunkPlan {
  std::uint64_t bytes = 0;
  std::uint64_t chunk_bytes = 1;

  struct Chunk {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  // Not (bytes + chunk_bytes - 1) / chunk_bytes: the sum could wrap.
  std::uint64_t count() const { return bytes / chunk_bytes + (bytes % chunk_bytes != 0 ? 1 : 0); }
  Chunk at(std::uint64_t index) const {
    const std::uint64_t offset = index * chunk_bytes;
    return {offset, std::min(chunk_bytes, bytes - offset)};
  }
};

// Calls post(chunk) for each chunk of `bytes`; keeps the requests in `requests`.
template <class Byte, class Post>
void post_chunks(std::span<Byte> bytes, std::size_t chunk_bytes,
                 std::vector<std::unique_ptr<Request>>& requests, Post post) {
  const ChunkPlan plan{bytes.size(), chunk_bytes};
  requests.reserve(requests.size() + plan.count());
  for (std::uint64_t i = 0; i < plan.count(); ++i) {
    const ChunkPlan::Chunk chunk = plan.at(i);
    requests.push_back(post(bytes.subspan(chunk.offset, chunk.bytes)));
  }
}

}  // namespace zerofp8
