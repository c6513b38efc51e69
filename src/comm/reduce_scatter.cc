#include "src/comm/reduce_scatter.h"

#include <array>
#include <vector>

#include "zerofp8/error.h"

namespace zerofp8 {

Storage wire_storage(DType dtype) {
  if (const auto plain = plain_storage(dtype)) return *plain;
  if (dtype == DType::kE4m3) return Storage::kE4m3Block;
  if (dtype == DType::kE5m2) return Storage::kE5m2Block;
  throw ArgumentError("gradients cannot travel as fp8_ue4m4: it has no sign");
}

DType dtype_of(Storage storage) {
  switch (storage) {
    case Storage::kFp32:
      return DType::kFp32;
    case Storage::kBf16:
      return DType::kBf16;
    case Storage::kFp16:
    case Storage::kFp16Block:
      return DType::kFp16;
    case Storage::kE4m3Block:
      return DType::kE4m3;
    case Storage::kE5m2Block:
      return DType::kE5m2;
    case Storage::kUe4m4Block:
      return DType::kUe4m4;
  }
  return DType::kFp32;
}

namespace {

// Sums of decoded parts go through pieces that stay in cache, and are rounded to nearest.
// `sources(part)` are the parts of `from` that make part `part` of `to`.
template <class Sources>
void encode_sums(const Ops& ops, const PartLayout& from, void* source, const PartLayout& to,
                 void* out, const Sources& sources) {
  constexpr std::int64_t kPiece = 4096;
  alignas(64) std::array<float, kPiece> value;
  std::vector<View> views, residuals;
  for (int part = 0; part < to.parts; ++part) {
    const std::vector<int> added = sources(part);
    for (std::int64_t at = 0; at < to.part_elements; at += kPiece) {
      const std::int64_t n = std::min(kPiece, to.part_elements - at);
      views.clear();
      residuals.clear();
      for (const int s : added) {
        views.push_back(from.view(source, s, at));
        if (from.residual) residuals.push_back(from.residual_view(source, s, at));
      }
      if (added.size() == 1 && !from.residual) {
        ops.decode(views[0], value.data(), n, from.block);  // the same bits, faster
      } else {
        ops.decode_sum(views.data(), from.residual ? residuals.data() : nullptr,
                       static_cast<int>(added.size()), 1.0f, value.data(), n, from.block);
      }
      ops.encode(value.data(), to.view(out, part, at), n, to.block, Rounding::kNearest, {});
    }
  }
}

}  // namespace

ReduceScatter::ReduceScatter(const ReduceRanks& ranks, const Ops& ops, BufferPool& pool,
                             const PartLayout& source, void* memory, Storage wire)
    : ops_(&ops), pool_(&pool), ranks_(ranks), layout_(source) {
  if (source.parts != ranks.size()) {
    throw ArgumentError("reduce-scatter: " + std::to_string(source.parts) + " parts for " +
                        std::to_string(ranks.size()) + " ranks");
  }
  const bool two_level = ranks.in_node != nullptr;
  const bool as_it_is = !two_level && source.storage == wire;
  layout_.storage = wire;
  layout_.parts = ranks.across->size();
  if (!as_it_is) layout_.residual = false;
  if (two_level) {
    start_in_node(source, memory);
  } else if (as_it_is) {
    start(memory);
  } else {
    send_ = pool.acquire(static_cast<std::size_t>(layout_.bytes()));
    encode_sums(ops, source, memory, layout_, send_.data(),
                [](int part) { return std::vector<int>{part}; });
    start(send_.data());
  }
}

// A local rank's message: the parts of the ranks with that local rank, in the order of nodes.
void ReduceScatter::start_in_node(const PartLayout& source, void* memory) {
  const int nodes = layout_.parts, local_ranks = ranks_.in_node->size();
  node_layout_ = source;
  node_layout_.storage = ranks_.in_node_wire;
  node_layout_.residual = false;
  const auto bytes = static_cast<std::size_t>(node_layout_.bytes());
  send_ = pool_->acquire(bytes);
  node_recv_ = pool_->acquire(bytes);
  encode_sums(*ops_, source, memory, node_layout_, send_.data(), [&](int part) {
    return std::vector<int>{part % nodes * local_ranks + part / nodes};
  });
  in_node_ = true;
  work_ = ranks_.in_node->all_to_all(
      {send_.data(), bytes}, {node_recv_.data(), bytes},
      {.dtype = dtype_of(ranks_.in_node_wire), .label = "gradient reduce-scatter inside nodes"});
}

// What came from the node, added in the order of its ranks, becomes the message to the other nodes.
void ReduceScatter::add_up_node() {
  send_ = {};
  send_ = pool_->acquire(static_cast<std::size_t>(layout_.bytes()));
  encode_sums(*ops_, node_layout_, node_recv_.data(), layout_, send_.data(), [&](int node) {
    std::vector<int> parts;
    for (int part = node; part < node_layout_.parts; part += layout_.parts) parts.push_back(part);
    return parts;
  });
  node_recv_ = {};
}

void ReduceScatter::start(void* message) {
  received_ = message;
  if (ranks_.across->size() == 1) return;
  const auto bytes = static_cast<std::size_t>(layout_.bytes());
  recv_ = pool_->acquire(bytes);
  received_ = recv_.data();
  work_ = ranks_.across->all_to_all(
      {static_cast<const std::byte*>(message), bytes}, {recv_.data(), bytes},
      {.dtype = dtype_of(layout_.storage), .label = "gradient reduce-scatter"});
}

void ReduceScatter::send_across() {
  if (!in_node_) return;
  work_->wait();
  in_node_ = false;
  add_up_node();
  start(send_.data());
}

void ReduceScatter::wait() {
  send_across();
  if (work_) work_->wait();
}

std::uint32_t ReduceScatter::sum(std::int64_t offset, std::int64_t n, float factor,
                                 float* out) const {
  std::vector<View> parts, residuals;
  for (int part = 0; part < layout_.parts; ++part) {
    parts.push_back(layout_.view(received_, part, offset));
    if (layout_.residual) residuals.push_back(layout_.residual_view(received_, part, offset));
  }
  return ops_->decode_sum(parts.data(), layout_.residual ? residuals.data() : nullptr,
                          layout_.parts, factor, out, n, layout_.block);
}

}  // namespace zerofp8
