// The fused Adam pass over whole blocks, in short loops over L1-resident scratch: one pass over
// memory, no FP32 state is materialised. Included by cpu_ops.cc only.
#pragma once

#include "kernels/cpu_block.h"

namespace zerofp8::cpu {

template <DType kDtype, int kBits, class Rest>
ZEROFP8_INLINE void join_block(const void* weight, const void* rest, float* out, int n) {
  const auto* w = static_cast<const std::uint16_t*>(weight);
  const auto* r = static_cast<const Rest*>(rest);
  for (int i = 0; i < n; ++i) out[i] = join_master<kDtype, kBits>(w[i], r[i]);
}
template <DType kDtype, int kBits, class Rest>
ZEROFP8_INLINE void split_block(const float* p, void* weight, void* rest, int n) {
  auto* w = static_cast<std::uint16_t*>(weight);
  auto* r = static_cast<Rest*>(rest);
  for (int i = 0; i < n; ++i) {
    const SplitWeight split = split_master<kDtype, kBits>(p[i]);
    w[i] = static_cast<std::uint16_t>(split.weight);
    r[i] = static_cast<Rest>(split.rest);
  }
}

ZEROFP8_INLINE View weight_view(DType dtype, const void* weight) {
  const Storage storage = dtype == DType::kFp32   ? Storage::kFp32
                          : dtype == DType::kBf16 ? Storage::kBf16
                                                  : Storage::kFp16;
  return {storage, const_cast<void*>(weight), nullptr};
}

// The FP32 value that Adam works with.
ZEROFP8_INLINE void load_master(DType dtype, const void* weight, int master_bits, const void* rest,
                                float* out, int n) {
  if (master_bits == 32) {
    decode_block({Storage::kFp32, const_cast<void*>(rest), nullptr}, out, n);
  } else if (master_bits == 0) {
    decode_block(weight_view(dtype, weight), out, n);
  } else if (dtype == DType::kBf16) {
    if (master_bits == 16) join_block<DType::kBf16, 16, std::uint16_t>(weight, rest, out, n);
    if (master_bits == 8) join_block<DType::kBf16, 8, std::uint8_t>(weight, rest, out, n);
  } else {
    if (master_bits == 16) join_block<DType::kFp16, 16, std::uint16_t>(weight, rest, out, n);
    if (master_bits == 8) join_block<DType::kFp16, 8, std::uint8_t>(weight, rest, out, n);
  }
}

// `draws` is null to round to nearest where no remainder is kept.
ZEROFP8_INLINE void store_master(const float* p, DType dtype, void* weight, int master_bits,
                                 void* rest, int n, const std::uint32_t* draws) {
  const View out = weight_view(dtype, weight);
  if (master_bits == 32)
    encode_block(p, 0, {Storage::kFp32, rest, nullptr}, n, Rounding::kNearest, draws, true);
  if (master_bits == 0 || master_bits == 32 || dtype == DType::kFp32) {
    const bool stochastic = draws != nullptr && master_bits == 0;
    encode_block(p, 0, out, n, stochastic ? Rounding::kStochastic : Rounding::kNearest, draws,
                 true);
  } else if (dtype == DType::kBf16) {
    if (master_bits == 16) split_block<DType::kBf16, 16, std::uint16_t>(p, weight, rest, n);
    if (master_bits == 8) split_block<DType::kBf16, 8, std::uint8_t>(p, weight, rest, n);
  } else {
    if (master_bits == 16) split_block<DType::kFp16, 16, std::uint16_t>(p, weight, rest, n);
    if (master_bits == 8) split_block<DType::kFp16, 8, std::uint8_t>(p, weight, rest, n);
  }
}

struct AdamScratch {
  alignas(64) Scratch g, m, v, p, extra;
  alignas(64) Draws draws;
};

// Loads one block and computes new m (in s.m), the root of new v (in s.extra), new v (s.v), p
// (s.p).
ZEROFP8_INLINE void adam_compute(const AdamArgs& a, std::int64_t at, int n, AdamScratch& s) {
  const AdamScalars k = a.scalars;
  decode_block(a.grad.at(at, a.block), s.g, n);
  if (a.grad_residual) {
    decode_block(a.grad_residual.at(at, a.block), s.extra, n);
    for (int i = 0; i < n; ++i) s.g[i] += s.extra[i];
  }
  const char* weight = static_cast<const char*>(a.weight) + at * bytes_of(a.weight_dtype);
  load_master(a.weight_dtype, weight, a.master_bits,
              static_cast<const char*>(a.master) + at * a.master_bits / 8, s.p, n);
  decode_block(a.exp_avg.at(at, a.block), s.m, n);
  decode_block(a.exp_avg_sq.at(at, a.block), s.v, n);
  for (int i = 0; i < n; ++i) {
    s.g[i] = adam_gradient(s.g[i], s.p[i], k);
    s.m[i] = adam_first(s.m[i], s.g[i], k);
  }
  if (a.exp_avg_sq.storage == Storage::kFp32) {
    for (int i = 0; i < n; ++i) s.v[i] = adam_second(s.v[i], s.g[i], s.m[i], k);
  } else {
    for (int i = 0; i < n; ++i) s.v[i] = adam_second_of_root(s.v[i], s.g[i], s.m[i], k);
  }
  for (int i = 0; i < n; ++i) {
    s.extra[i] = sqrt_rn(s.v[i]);
    s.p[i] = adam_weight(s.p[i], s.m[i], s.extra[i], k);
  }
}

ZEROFP8_INLINE void adam_store(const AdamArgs& a, std::int64_t at, int n, AdamScratch& s) {
  const bool root = a.exp_avg_sq.storage != Storage::kFp32;
  if (root || a.exp_avg_rounding != Rounding::kNearest) {
    draw(s.draws, n, a.moments.key, a.moments.offset + static_cast<std::uint64_t>(at));
  }
  const View m = a.exp_avg.at(at, a.block);
  const View v = a.exp_avg_sq.at(at, a.block);
  encode_block(s.m, is_block(m.storage) ? block_amax(s.m, n) : 0, m, n, a.exp_avg_rounding, s.draws,
               true);
  if (root) {
    encode_block(s.extra, is_block(v.storage) ? block_amax(s.extra, n) : 0, v, n,
                 Rounding::kStochastic, s.draws, false);
  } else {
    encode_block(s.v, 0, v, n, Rounding::kNearest, s.draws, false);
  }
  const bool dither = a.master_bits == 0 && a.weight_dtype != DType::kFp32;
  if (dither) draw(s.draws, n, a.weights.key, a.weights.offset + static_cast<std::uint64_t>(at));
  store_master(s.p, a.weight_dtype, static_cast<char*>(a.weight) + at * bytes_of(a.weight_dtype),
               a.master_bits, static_cast<char*>(a.master) + at * a.master_bits / 8, n,
               dither ? s.draws : nullptr);
}

ZEROFP8_INLINE std::uint32_t adam_blocks(const AdamArgs& a, int block) {
  AdamScratch s;
  std::uint32_t max_weight = 0;
  for (std::int64_t at = 0; at < a.elements; at += block) {
    adam_compute(a, at, block, s);
    max_weight = max_u32(max_weight, block_amax(s.p, block));
    if (a.commit) adam_store(a, at, block, s);
  }
  return max_weight;
}

}  // namespace zerofp8::cpu
