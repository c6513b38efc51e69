// The CPU kernels, compiled once per instruction set with ZEROFP8_ISA set to its name. Only the
// table is exported: an inline function shared with other objects could be linked from the wrong
// instruction set.
#include "kernels/cpu_adam.h"
#include "kernels/cpu_block.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define ZEROFP8_CONCAT2(a, b) a##b
#define ZEROFP8_CONCAT(a, b) ZEROFP8_CONCAT2(a, b)
#define ZEROFP8_STRING2(a) #a
#define ZEROFP8_STRING(a) ZEROFP8_STRING2(a)

namespace zerofp8::cpu {
namespace {

// IEEE arithmetic inside a kernel whatever the program has set: round to nearest, subnormals kept,
// no traps. The program's mode and sticky flags are put back.
class IeeeMode {
 public:
#if defined(__SSE__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Calls f(block) with a compile-time 128, the default, so that its loops are unrolled.
template <class F>
ZEROFP8_INLINE std::uint32_t with_block(int block, F f) {
  return block == 128 ? f(128) : f(block);
}

ZEROFP8_INLINE std::uint32_t encode_all(const float* x, View out, std::int64_t n, int block,
                                        Rounding rounding, RandomStream stream) {
  alignas(64) Draws draws;
  std::uint32_t amax_all = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    const int len =
        n - at < block ? static_cast<int>(n - at) : block;  // short only for plain storage
    const std::uint32_t amax = block_amax(x + at, len);
    if (rounding != Rounding::kNearest)
      draw(draws, block, stream.key, stream.offset + static_cast<std::uint64_t>(at));
    encode_block(x + at, amax, out.at(at, block), len, rounding, draws, true);
    amax_all = max_u32(amax_all, amax);
  }
  return amax_all;
}

std::uint32_t encode_op(const float* x, View out, std::int64_t n, int block, Rounding rounding,
                        RandomStream stream) {
  const IeeeMode mode;
  return with_block(
      block, [&](int b) __attribute__((always_inline)) {
        return encode_all(x, out, n, b, rounding, stream);
      });
}

void decode_op(View in, float* out, std::int64_t n, int block) {
  const IeeeMode mode;
  for (std::int64_t at = 0; at < n; at += block) {
    const int len = n - at < block ? static_cast<int>(n - at) : block;
    decode_block(in.at(at, block), out + at, len);
  }
}

ZEROFP8_INLINE std::uint32_t accumulate_all(View acc, View residual, View gradient, std::int64_t n,
                                            int block, Rounding rounding, RandomStream stream) {
  alignas(64) Scratch total, part;
  alignas(64) Draws draws;
  std::uint32_t amax_all = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    const View a = acc.at(at, block);
    decode_block(a, total, block);
    if (residual) {
      decode_block(residual.at(at, block), part, block);
      for (int i = 0; i < block; ++i) total[i] += part[i];
    }
    decode_block(gradient.at(at, block), part, block);
    for (int i = 0; i < block; ++i) total[i] += part[i];
    const std::uint32_t amax = block_amax(total, block);
    if (rounding != Rounding::kNearest)
      draw(draws, block, stream.key, stream.offset + static_cast<std::uint64_t>(at));
    encode_block(total, amax, a, block, rounding, draws, true);
    if (residual) {
      decode_block(a, part, block);
      for (int i = 0; i < block; ++i) total[i] -= part[i];
      encode_block(total, block_amax(total, block), residual.at(at, block), block, rounding, draws,
                   false);
    }
    amax_all = max_u32(amax_all, amax);
  }
  return amax_all;
}

std::uint32_t accumulate_op(View acc, View residual, View gradient, std::int64_t n, int block,
                            Rounding rounding, RandomStream stream) {
  const IeeeMode mode;
  return with_block(
      block, [&](int b) __attribute__((always_inline)) {
        return accumulate_all(acc, residual, gradient, n, b, rounding, stream);
      });
}

ZEROFP8_INLINE std::uint32_t decode_sum_all(const View* parts, const View* residuals, int count,
                                            float factor, float* out, std::int64_t n, int block) {
  alignas(64) Scratch part, rest;
  std::uint32_t amax = 0;
  for (std::int64_t at = 0; at < n; at += block) {
    float* sum = out + at;
    for (int k = 0; k < count; ++k) {
      decode_block(parts[k].at(at, block), part, block);
      if (residuals != nullptr) {
        decode_block(residuals[k].at(at, block), rest, block);
        for (int i = 0; i < block; ++i) part[i] += rest[i];
      }
      if (k == 0) {
        for (int i = 0; i < block; ++i) sum[i] = part[i];
      } else {
        for (int i = 0; i < block; ++i) sum[i] += part[i];
      }
    }
    for (int i = 0; i < block; ++i) sum[i] *= factor;
    amax = max_u32(amax, block_amax(sum, block));
  }
  return amax;
}

std::uint32_t decode_sum_op(const View* parts, const View* residuals, int count, float factor,
                            float* out, std::int64_t n, int block) {
  const IeeeMode mode;
  return with_block(
      block, [&](int b) __attribute__((always_inline)) {
        return decode_sum_all(parts, residuals, count, factor, out, n, b);
      });
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
      for (int i = 0; i < block; ++i) value[i] += rest[i];
    }
    for (int i = 0; i < block; ++i) value[i] *= factor;
    amax = max_u32(amax, block_amax(value, block));
    out[at / block] = sum_block_squares(value, block);
  }
  return amax;
}

std::uint32_t adam_op(const AdamArgs& args) {
  const IeeeMode mode;
  return with_block(
      args.block, [&](int b) __attribute__((always_inline)) { return adam_blocks(args, b); });
}

void split_master_op(const float* master, DType dtype, void* weight, int master_bits, void* rest,
                     std::int64_t n) {
  const IeeeMode mode;
  for (std::int64_t at = 0; at < n; at += kMaxBlock) {
    const int len = n - at < kMaxBlock ? static_cast<int>(n - at) : kMaxBlock;
    store_master(master + at, dtype, static_cast<char*>(weight) + at * bytes_of(dtype), master_bits,
                 static_cast<char*>(rest) + at * master_bits / 8, len, nullptr);
  }
}

void join_master_op(DType dtype, const void* weight, int master_bits, const void* rest, float* out,
                    std::int64_t n) {
  const IeeeMode mode;
  for (std::int64_t at = 0; at < n; at += kMaxBlock) {
    const int len = n - at < kMaxBlock ? static_cast<int>(n - at) : kMaxBlock;
    load_master(dtype, static_cast<const char*>(weight) + at * bytes_of(dtype), master_bits,
                static_cast<const char*>(rest) + at * master_bits / 8, out + at, len);
  }
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
