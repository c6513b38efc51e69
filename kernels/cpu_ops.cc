// The CPU kernels, compiled once per instruction set with ZEROFP8_ISA set to its name. Only the
// table is exported: an inline function shared with other objects could be linked from the wrong
// instruction set.
#include "kernels/cpu_adam.h"
#include "kernels/cpu_block.h"
#include "kernels/ieee_mode.h"

#define ZEROFP8_CONCAT2(a, b) a##b
#define ZEROFP8_CONCAT(a, b) ZEROFP8_CONCAT2(a, b)
#define ZEROFP8_STRING2(a) #a
#define ZEROFP8_STRING(a) ZEROFP8_STRING2(a)

namespace zerofp8::cpu {
namespace {

alignas(64) constexpr float kZeros[kMaxBlock] = {};

// The last, short block of a plain storage goes through padded scratch, so that other loops see
// whole blocks only.
ZEROFP8_INLINE std::uint32_t encode_tail(const float* x, const View& out, int len, int block,
                                         Rounding rounding, const Draws draws) {
  alignas(64) Scratch padded;
  alignas(64) unsigned char codes[sizeof(Scratch)];
  __builtin_memcpy(padded, kZeros, sizeof padded);
  __builtin_memcpy(padded, x, static_cast<std::size_t>(len) * sizeof(float));
  encode_block(padded, 0, {out.storage, codes, nullptr}, block, rounding, draws, true);
  __builtin_memcpy(out.codes, codes, static_cast<std::size_t>(len) * bytes_of(out.storage));
  return block_amax(padded, block);
}

std::uint32_t encode_op(const float* x, View out, std::int64_t n, int block, Rounding rounding,
                        RandomStream stream) {
  const IeeeMode mode;
  alignas(64) Draws draws;
  std::uint32_t amax_all = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    if (rounding != Rounding::kNearest)
      draw(draws, block, stream.key, stream.offset + static_cast<std::uint64_t>(at));
    std::uint32_t amax;
    if (n - at < block) {
      amax =
          encode_tail(x + at, out.at(at, block), static_cast<int>(n - at), block, rounding, draws);
    } else {
      amax = block_amax(x + at, block);
      encode_block(x + at, amax, out.at(at, block), block, rounding, draws, true);
    }
    amax_all = max_u32(amax_all, amax);
  }
  return amax_all;
}

void decode_op(View in, float* out, std::int64_t n, int block) {
  const IeeeMode mode;
  const std::int64_t whole = n - n % block;
  for (std::int64_t at = 0; at < whole; at += block) {
    decode_block(in.at(at, block), out + at, block);
  }
  if (whole == n) return;
  alignas(64) Scratch value;
  alignas(64) unsigned char codes[sizeof(Scratch)];
  __builtin_memcpy(codes, kZeros, sizeof codes);
  __builtin_memcpy(codes, in.at(whole, block).codes,
                   static_cast<std::size_t>(n - whole) * bytes_of(in.storage));
  decode_block({in.storage, codes, nullptr}, value, block);
  __builtin_memcpy(out + whole, value, static_cast<std::size_t>(n - whole) * sizeof(float));
}

std::uint32_t accumulate_op(View acc, View residual, View gradient, std::int64_t n, int block,
                            Rounding rounding, RandomStream stream) {
  const IeeeMode mode;
  alignas(64) Scratch total, part;
  alignas(64) Draws draws;
  std::uint32_t amax_all = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    const View a = acc.at(at, block);
    decode_block(a, total, block);
    if (residual) {
      decode_block(residual.at(at, block), part, block);
      add_block(total, part, block);
    }
    decode_block(gradient.at(at, block), part, block);
    add_block(total, part, block);
    const std::uint32_t amax = block_amax(total, block);
    if (rounding != Rounding::kNearest)
      draw(draws, block, stream.key, stream.offset + static_cast<std::uint64_t>(at));
    encode_block(total, amax, a, block, rounding, draws, true);
    if (residual) {
      decode_block(a, part, block);
      each(
          block, ZEROFP8_EACH { total[i] -= part[i]; });
      encode_block(total, block_amax(total, block), residual.at(at, block), block, rounding, draws,
                   false);
    }
    amax_all = max_u32(amax_all, amax);
  }
  return amax_all;
}

std::uint32_t decode_sum_op(const View* parts, const View* residuals, int count, float factor,
                            float* out, std::int64_t n, int block) {
  const IeeeMode mode;
  alignas(64) Scratch sum, part, rest;
  std::uint32_t amax = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    for (int k = 0; k < count; ++k) {
      float* value = k == 0 ? sum : part;
      decode_block(parts[k].at(at, block), value, block);
      if (residuals != nullptr) {
        decode_block(residuals[k].at(at, block), rest, block);
        add_block(value, rest, block);
      }
      if (k != 0) add_block(sum, part, block);
    }
    each(
        block, ZEROFP8_EACH { sum[i] *= factor; });
    __builtin_memcpy(out + at, sum, static_cast<std::size_t>(block) * sizeof(float));
    amax = max_u32(amax, block_amax(sum, block));
  }
  return amax;
}

ZEROFP8_INLINE double sum_block_squares(const float* x, int n) {
  constexpr int kLanes = 16;
  double lanes[kLanes] = {};
  for (int i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(x[i + lane]);
      lanes[lane] = __builtin_fma(value, value, lanes[lane]);  // the square is exact in float64
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

std::uint32_t sum_squares_op(View x, View residual, float factor, double* out, std::int64_t n,
                             int block) {
  const IeeeMode mode;
  alignas(64) Scratch value, rest;
  std::uint32_t amax = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    decode_block(x.at(at, block), value, block);
    if (residual) {
      decode_block(residual.at(at, block), rest, block);
      add_block(value, rest, block);
    }
    each(
        block, ZEROFP8_EACH { value[i] *= factor; });
    amax = max_u32(amax, block_amax(value, block));
    out[at / block] = sum_block_squares(value, block);
  }
  return amax;
}

std::uint32_t adam_op(const AdamArgs& args) {
  const IeeeMode mode;
  return adam_blocks(args);
}

// Masters come in any number: the last few go through padded scratch.
void split_master_op(const float* master, DType dtype, void* weight, int master_bits, void* rest,
                     std::int64_t n) {
  const IeeeMode mode;
  auto* w = static_cast<char*>(weight);
  auto* r = static_cast<char*>(rest);
  std::int64_t at = 0;
  for (; at + kGranule <= n; at += kGranule) {
    store_master(master + at, dtype, w + at * bytes_of(dtype), master_bits,
                 r + at * master_bits / 8, kGranule, nullptr);
  }
  if (at == n) return;
  const auto tail = static_cast<std::size_t>(n - at);
  alignas(64) float padded[kGranule] = {};
  alignas(64) unsigned char w_tail[sizeof padded], r_tail[sizeof padded];
  __builtin_memcpy(padded, master + at, tail * sizeof(float));
  store_master(padded, dtype, w_tail, master_bits, r_tail, kGranule, nullptr);
  __builtin_memcpy(w + at * bytes_of(dtype), w_tail, tail * bytes_of(dtype));
  if (master_bits != 0) __builtin_memcpy(r + at * master_bits / 8, r_tail, tail * master_bits / 8);
}

void join_master_op(DType dtype, const void* weight, int master_bits, const void* rest, float* out,
                    std::int64_t n) {
  const IeeeMode mode;
  const auto* w = static_cast<const char*>(weight);
  const auto* r = static_cast<const char*>(rest);
  std::int64_t at = 0;
  for (; at + kGranule <= n; at += kGranule) {
    load_master(dtype, w + at * bytes_of(dtype), master_bits, r + at * master_bits / 8, out + at,
                kGranule);
  }
  if (at == n) return;
  const auto tail = static_cast<std::size_t>(n - at);
  alignas(64) float value[kGranule];
  alignas(64) unsigned char w_tail[sizeof value] = {}, r_tail[sizeof value] = {};
  __builtin_memcpy(w_tail, w + at * bytes_of(dtype), tail * bytes_of(dtype));
  if (master_bits != 0) __builtin_memcpy(r_tail, r + at * master_bits / 8, tail * master_bits / 8);
  load_master(dtype, w_tail, master_bits, r_tail, value, kGranule);
  __builtin_memcpy(out + at, value, tail * sizeof(float));
}

}  // namespace

extern const Ops ZEROFP8_CONCAT(kOps_, ZEROFP8_ISA);
const Ops ZEROFP8_CONCAT(kOps_, ZEROFP8_ISA) = {ZEROFP8_STRING(ZEROFP8_ISA),
                                                encode_op,
                                                decode_op,
                                                accumulate_op,
                                                decode_sum_op,
                                                sum_squares_op,
                                                adam_op,
                                                split_master_op,
                                                join_master_op};

}  // namespace zerofp8::cpu
