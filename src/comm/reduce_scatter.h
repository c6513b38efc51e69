// The reduce-scatter of a bucket in any wire dtype: encode -> one all-to-all of codes and scales ->
// decode and add in FP32 in rank order -> one multiplication. Two roundings whatever the number of
// ranks, so the error does not grow with them (design: docs/numerics.md, "Reduce-scatter").
//
//   ReduceScatter rs(comm, ops, pool, layout, memory, Storage::kE4m3Block);   // starts sending
//   rs.wait();
//   rs.sum(offset, n, factor, out);          // part of this rank's shard
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/comm/buffer_pool.h"
#include "src/comm/part_store.h"
#include "zerofp8/communicator.h"
#include "zerofp8/ops.h"

namespace zerofp8 {

// The storage of a gradient message in `dtype`, and back.
Storage wire_storage(DType dtype);
DType dtype_of(Storage storage);

class ReduceScatter {
 public:
  // `source` in `memory` has comm.size() parts and must stay untouched until wait() returned. It is
  // sent as it is where its storage is `wire`, else encoded (round to nearest) into a pooled
  // buffer.
  ReduceScatter(Communicator& comm, const Ops& ops, BufferPool& pool, const PartLayout& source,
                void* memory, Storage wire);
  void wait();

  // out = factor * (rank 0 + rank 1 + ...) of elements [offset, offset + n) of this rank's shard;
  // whole blocks. Returns the bits of max |out|.
  std::uint32_t sum(std::int64_t offset, std::int64_t n, float factor, float* out) const;

 private:
  const Ops* ops_;
  PartLayout layout_;  // of the message
  PooledBuffer send_, recv_;
  void* received_ = nullptr;
  std::unique_ptr<Work> work_;
};

}  // namespace zerofp8
