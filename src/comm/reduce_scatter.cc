#include "src/comm/reduce_scatter.h"

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

// out's part = encode(sum of `count` parts of `from`: first, first + step, ...), to nearest.
void encode_sum(Device& device, const PartLayout& from, void* source, int first, int step,
                int count, const PartLayout& to, void* out, int part) {
  device.recode({.in = {.part = from.view(source, first),
                        .residual = from.residual_view(source, first),
                        .count = count,
                        .part_bytes = step * from.part_bytes()},
                 .out = to.view(out, part),
                 .elements = to.part_elements,
                 .block = from.block,
                 .stream = {}});
}

}  // namespace

ReduceScatter::ReduceScatter(const ReduceRanks& ranks, Device& device, BufferPool& pool,
                             const PartLayout& source, void* memory, Storage wire)
    : device_(&device), pool_(&pool), ranks_(ranks), layout_(source) {
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
    for (int part = 0; part < layout_.parts; ++part) {
      encode_sum(device, source, memory, part, 0, 1, layout_, send_.data(), part);
    }
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
  for (int part = 0; part < node_layout_.parts; ++part) {
    const int of = part % nodes * local_ranks + part / nodes;
    encode_sum(*device_, source, memory, of, 0, 1, node_layout_, send_.data(), part);
  }
  in_node_ = true;
  work_ = ranks_.in_node->all_to_all({send_.data(), bytes}, {node_recv_.data(), bytes},
                                     {.dtype = dtype_of(ranks_.in_node_wire),
                                      .stream = device_->stream(),
                                      .label = "gradient reduce-scatter inside nodes"});
}

// What came from the node, added in the order of its ranks, becomes the message to the other nodes.
void ReduceScatter::add_up_node() {
  send_ = {};
  send_ = pool_->acquire(static_cast<std::size_t>(layout_.bytes()));
  const int nodes = layout_.parts;
  for (int node = 0; node < nodes; ++node) {
    encode_sum(*device_, node_layout_, node_recv_.data(), node, nodes, node_layout_.parts / nodes,
               layout_, send_.data(), node);
  }
  node_recv_ = {};
}

void ReduceScatter::start(void* message) {
  received_ = message;
  if (ranks_.across->size() == 1) return;
  const auto bytes = static_cast<std::size_t>(layout_.bytes());
  recv_ = pool_->acquire(bytes);
  received_ = recv_.data();
  work_ = ranks_.across->all_to_all({static_cast<const std::byte*>(message), bytes},
                                    {recv_.data(), bytes},
                                    {.dtype = dtype_of(layout_.storage),
                                     .stream = device_->stream(),
                                     .label = "gradient reduce-scatter"});
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

Summands ReduceScatter::received(std::int64_t offset) const {
  return {.part = layout_.view(received_, 0, offset),
          .residual = layout_.residual_view(received_, 0, offset),
          .count = layout_.parts,
          .part_bytes = layout_.part_bytes()};
}

}  // namespace zerofp8
