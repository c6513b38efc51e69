// The fused Adam pass over whole blocks, in short loops over L1-resident scratch: one pass over
// memory, no FP32 state is materialised. Included by cpu_ops.cc only.
#pragma once

#include "kernels/cpu_block.h"

namespace zerofp8::cpu {

template <DType kDtype, int kBits, class Rest>
ZEROFP8_INLINE void join_block(const void* weight, const void* rest, float* __restrict out, int n) {
  const auto* __restrict w = static_cast<const std::uint16_t*>(weight);
  const auto* __restrict r = static_cast<const Rest*>(rest);
  each(
      n, ZEROFP8_EACH { out[i] = join_master<kDtype, kBits>(w[i], r[i]); });
}
template <DType kDtype, int kBits, class Rest>
ZEROFP8_INLINE void split_block(const float* __restrict p, void* weight, void* rest, int n) {
  auto* __restrict w = static_cast<std::uint16_t*>(weight);
  auto* __restrict r = static_cast<Rest*>(rest);
  each(
      n, ZEROFP8_EACH {
        const SplitWeight split = split_master<kDtype, kBits>(p[i]);
        w[i] = static_cast<std::uint16_t>(split.weight);
        r[i] = static_cast<Rest>(split.rest);
      });
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
  alignas(64) Scratch g, m, v, p;
  alignas(64) Draws draws;
};

// Loads one block: g, m, v (or its root) and p into scratch.
ZEROFP8_INLINE void adam_load(const AdamArgs& a, std::int64_t at, int n, AdamScratch& s) {
  decode_block(a.grad.at(at, a.block), s.g, n);
  if (a.grad_residual) {
    decode_block(a.grad_residual.at(at, a.block), s.m, n);
    add_block(s.g, s.m, n);
  }
  const char* weight = static_cast<const char*>(a.weight) + at * bytes_of(a.weight_dtype);
  load_master(a.weight_dtype, weight, a.master_bits,
              static_cast<const char*>(a.master) + at * a.master_bits / 8, s.p, n);
  decode_block(a.exp_avg.at(at, a.block), s.m, n);
  decode_block(a.exp_avg_sq.at(at, a.block), s.v, n);
}

// New m and p, and in s.v what is stored of the second moment: v, or with kRoot its root. One loop,
// also for the random bits: integer work that fits in beside the division and the root.
template <bool kRoot, bool kDraw>
ZEROFP8_INLINE void adam_compute(const AdamArgs& a, std::int64_t at, int n, AdamScratch& s) {
  const AdamScalars k = a.scalars;
  const std::uint64_t first = (a.moments.offset + static_cast<std::uint64_t>(at)) / kGranule;
  for (int granule = 0; granule < n / kGranule; ++granule) {
    const std::uint32_t base =
        kDraw ? granule_key(a.moments.key, first + static_cast<unsigned>(granule)) : 0u;
    for (std::uint32_t lane = 0; lane < kGranule; ++lane) {
      const std::uint32_t i = static_cast<std::uint32_t>(granule) * kGranule + lane;
      const AdamElement next = adam_element<kRoot>(s.g[i], s.m[i], s.v[i], s.p[i], k);
      s.m[i] = next.m;
      s.v[i] = next.v;
      s.p[i] = next.p;
      if (kDraw) s.draws[i] = lane_bits(base, lane);
    }
  }
}

ZEROFP8_INLINE void adam_store(const AdamArgs& a, std::int64_t at, int n, AdamScratch& s) {
  const bool root = a.exp_avg_sq.storage != Storage::kFp32;
  const View m = a.exp_avg.at(at, a.block);
  const View v = a.exp_avg_sq.at(at, a.block);
  encode_block(s.m, is_block(m.storage) ? block_amax(s.m, n) : 0, m, n, a.exp_avg_rounding, s.draws,
               true);
  encode_block(s.v, is_block(v.storage) ? block_amax(s.v, n) : 0, v, n,
               root ? Rounding::kStochastic : Rounding::kNearest, s.draws, false);
  const bool dither_weight = a.master_bits == 0 && a.weight_dtype != DType::kFp32;
  if (dither_weight) {
    draw(s.draws, n, a.weights.key, a.weights.offset + static_cast<std::uint64_t>(at));
  }
  store_master(s.p, a.weight_dtype, static_cast<char*>(a.weight) + at * bytes_of(a.weight_dtype),
               a.master_bits, static_cast<char*>(a.master) + at * a.master_bits / 8, n,
               dither_weight ? s.draws : nullptr);
}

template <bool kRoot, bool kDraw>
ZEROFP8_INLINE std::uint32_t adam_loop(const AdamArgs& a) {
  const int block = a.block;
  AdamScratch s;
  std::uint32_t max_weight = 0;
  for (std::int64_t at = 0; at < a.elements; at += block) {
    adam_load(a, at, block, s);
    adam_compute<kRoot, kDraw>(a, at, block, s);
    max_weight = max_u32(max_weight, block_amax(s.p, block));
    if (a.commit) adam_store(a, at, block, s);
  }
  return max_weight;
}

ZEROFP8_INLINE std::uint32_t adam_blocks(const AdamArgs& a) {
  if (a.exp_avg_sq.storage != Storage::kFp32) return adam_loop<true, true>(a);
  return a.exp_avg_rounding == Rounding::kNearest ? adam_loop<false, false>(a)
                                                  : adam_loop<false, true>(a);
}

}  // namespace zerofp8::cpu
