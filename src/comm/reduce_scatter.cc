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

// Decodes in pieces that stay in cache; encodes with round to nearest.
void encode_parts(const Ops& ops, const PartLayout& from, void* source, const PartLayout& to,
                  void* out) {
  constexpr std::int64_t kPiece = 4096;
  alignas(64) std::array<float, kPiece> value, rest;
  for (int part = 0; part < from.parts; ++part) {
    for (std::int64_t at = 0; at < from.part_elements; at += kPiece) {
      const std::int64_t n = std::min(kPiece, from.part_elements - at);
      ops.decode(from.view(source, part, at), value.data(), n, from.block);
      if (from.residual) {
        ops.decode(from.residual_view(source, part, at), rest.data(), n, from.block);
        for (std::int64_t i = 0; i < n; ++i) value[i] += rest[i];
      }
      ops.encode(value.data(), to.view(out, part, at), n, to.block, Rounding::kNearest, {});
    }
  }
}

}  // namespace

ReduceScatter::ReduceScatter(Communicator& comm, const Ops& ops, BufferPool& pool,
                             const PartLayout& source, void* memory, Storage wire)
    : ops_(&ops), layout_(source) {
  if (source.parts != comm.size()) {
    throw ArgumentError("reduce-scatter: " + std::to_string(source.parts) + " parts for " +
                        std::to_string(comm.size()) + " ranks");
  }
  void* message = memory;
  if (source.storage != wire) {
    layout_.storage = wire;
    layout_.residual = false;
    send_ = pool.acquire(static_cast<std::size_t>(layout_.bytes()));
    message = send_.data();
    encode_parts(ops, source, memory, layout_, message);
  }
  received_ = message;
  if (comm.size() == 1) return;
  const auto bytes = static_cast<std::size_t>(layout_.bytes());
  recv_ = pool.acquire(bytes);
  received_ = recv_.data();
  work_ = comm.all_to_all({static_cast<const std::byte*>(message), bytes}, {recv_.data(), bytes},
                          {.dtype = dtype_of(wire), .label = "gradient reduce-scatter"});
}

void ReduceScatter::wait() {
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
