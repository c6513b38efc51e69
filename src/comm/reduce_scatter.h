// The reduce-scatter of a bucket in any wire dtype: encode -> one all-to-all of codes and scales ->
// decode and add in FP32 in rank order -> one multiplication. Two roundings whatever the number of
// ranks, so the error does not grow with them (design: docs/numerics.md, "Reduce-scatter").
//
//   ReduceScatter rs({&comm}, device, pool, layout, memory, Storage::kE4m3Block);   // sends
//   rs.wait();
//   device.decode_sum({.in = rs.received(offset), .out = out, .elements = n});      // of the shard
#pragma once

#include <cstdint>
#include <memory>

#include "src/comm/buffer_pool.h"
#include "src/comm/part_store.h"
#include "zerofp8/communicator.h"
#include "zerofp8/device.h"

namespace zerofp8 {

// The storage of a gradient message in `dtype`, and back.
Storage wire_storage(DType dtype);
DType dtype_of(Storage storage);

// Between whom. Flat: `across` has all ranks. Two-level, with k ranks per node: rank r is local
// rank r % k of node r / k; `in_node` has the k ranks of its node in this order, `across` those
// with its local rank in the order of nodes.
struct ReduceRanks {
  Communicator* across = nullptr;
  Communicator* in_node = nullptr;  // null: flat
  Storage in_node_wire = Storage::kFp32;
  int size() const { return across->size() * (in_node == nullptr ? 1 : in_node->size()); }
};

class ReduceScatter {
 public:
  // Memory is the device's. `source` in `memory` has ranks.size() parts and must stay untouched
  // until wait() returned. Flat: it is sent as it is where its storage is `wire`, else encoded
  // (round to nearest) into a pooled buffer. Two-level: it is encoded in `in_node_wire`, and each
  // node's sum in `wire`.
  ReduceScatter(const ReduceRanks& ranks, Device& device, BufferPool& pool,
                const PartLayout& source, void* memory, Storage wire);
  // Two-level: waits for the node and starts the exchange across nodes. Like the constructor,
  // called in the same order on every rank. No effect if that was done, or if flat.
  void send_across();
  void wait();  // after send_across(), which it calls

  // What the ranks sent of this rank's shard, in rank order, from element `offset` (whole blocks)
  // on. Two-level: sums of nodes instead of ranks. Valid until this object ends.
  Summands received(std::int64_t offset) const;

 private:
  void start_in_node(const PartLayout& source, void* memory);
  void add_up_node();
  void start(void* message);

  Device* device_;
  BufferPool* pool_;
  ReduceRanks ranks_;
  PartLayout layout_;       // of the message that received() tells of
  PartLayout node_layout_;  // two-level: of the message inside the node
  PooledBuffer send_, recv_, node_recv_;
  void* received_ = nullptr;
  bool in_node_ = false;  // the exchange under way is the one inside the node
  std::unique_ptr<Work> work_;
};

}  // namespace zerofp8
