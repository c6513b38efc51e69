// A bucket's numbers laid out as the message of a reduce-scatter: one part per rank, each part
// holding its codes, then their scales, then (error feedback) the same of the residual. An
// accumulator kept this way is sent as it is, without a copy.
#pragma once

#include <cstdint>

#include "zerofp8/ops.h"

namespace zerofp8 {

struct PartLayout {
  Storage storage = Storage::kFp32;
  bool residual = false;
  int parts = 1;
  int block = 128;
  std::int64_t part_elements = 0;  // whole blocks

  std::int64_t code_bytes() const { return part_elements * bytes_of(storage); }
  std::int64_t scale_bytes() const {
    return is_block(storage) ? part_elements / block * std::int64_t{sizeof(float)} : 0;
  }
  std::int64_t part_bytes() const { return (code_bytes() + scale_bytes()) * (residual ? 2 : 1); }
  std::int64_t bytes() const { return part_bytes() * parts; }

  // Views of one part inside memory of bytes() bytes, `offset` elements (whole blocks) into the
  // part.
  View view(void* memory, int part, std::int64_t offset = 0) const {
    return view_at(memory, part * part_bytes(), offset);
  }
  View residual_view(void* memory, int part, std::int64_t offset = 0) const {
    if (!residual) return {};
    return view_at(memory, part * part_bytes() + code_bytes() + scale_bytes(), offset);
  }
  bool operator==(const PartLayout&) const = default;

 private:
  View view_at(void* memory, std::int64_t begin, std::int64_t offset) const {
    char* codes = static_cast<char*>(memory) + begin;
    float* scales = is_block(storage) ? reinterpret_cast<float*>(codes + code_bytes()) : nullptr;
    return View{storage, codes, scales}.at(offset, block);
  }
};

}  // namespace zerofp8
