// The kernels: one table of functions per instruction set (and, later, per device). All tables
// compute the same bits, whatever floating-point mode the caller has set. Sizes are in elements and
// are whole blocks unless a function says otherwise; a block is 32, 64, 128 or 256 elements.
//
//   const Ops& ops = cpu_ops();                 // best for this CPU, or what ZEROFP8_ISA names
//   ops.encode(Storage::kE4m3Block, x, out, n, 128, Rounding::kNearest, {});
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "zerofp8/dtype.h"
#include "zerofp8/random.h"

namespace zerofp8 {

// How numbers lie in memory. "Block": codes of scaled values plus one FP32 scale per block.
enum class Storage : std::uint8_t {
  kFp32,
  kBf16,
  kFp16,       // IEEE fp16, overflow is infinity: weights and wire
  kFp16Block,  // power-of-two scale, amax in (2^14, 2^15]
  kE4m3Block,
  kE5m2Block,
  kUe4m4Block,  // non-negative values
};
constexpr bool is_block(Storage s) { return s >= Storage::kFp16Block; }
constexpr int bytes_of(Storage s) {
  return s == Storage::kFp32                                                      ? 4
         : s == Storage::kBf16 || s == Storage::kFp16 || s == Storage::kFp16Block ? 2
                                                                                  : 1;
}

// Where values lie without scales: weights, gradients as they come. FP8 formats have none: nullopt.
constexpr std::optional<Storage> plain_storage(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return Storage::kFp32;
    case DType::kBf16:
      return Storage::kBf16;
    case DType::kFp16:
      return Storage::kFp16;
    default:
      return std::nullopt;
  }
}

enum class Rounding : std::uint8_t {
  kNearest,     // to nearest, ties to even
  kStochastic,  // up with the probability of the remainder
  kMixed,       // nearest for normal codes, stochastic for subnormal ones
};

// Codes with their scales (null unless is_block).
struct View {
  Storage storage = Storage::kFp32;
  void* codes = nullptr;
  float* scales = nullptr;
  explicit operator bool() const { return codes != nullptr; }
  // The view `elements` further on (whole blocks).
  View at(std::int64_t elements, int block) const {
    return {storage, static_cast<char*>(codes) + elements * bytes_of(storage),
            scales == nullptr ? nullptr : scales + elements / block};
  }
};

// Kernels return the bits of the largest absolute value: these or more mean an Inf or a NaN.
inline constexpr std::uint32_t kNotFiniteBits = 0x7F800000u;
constexpr bool not_finite(std::uint32_t amax_bits) { return amax_bits >= kNotFiniteBits; }

struct RandomStream {
  std::uint64_t key = 0;
  std::uint64_t offset = 0;  // of the first element in its logical parameter; a multiple of 32
  // Device::accumulate and adam only: where the number of the step lies in its memory; null: `key`
  // is all.
  const std::uint64_t* step = nullptr;
  RandomKeyBase base{};  // with *step: the key
};

// Scalars of one Adam step, computed in float64 and rounded once (design: docs/numerics.md).
struct AdamScalars {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  float step_size;     // lr / (1 - beta1^t)
  float inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^t)
  float decay;         // 1 - lr * weight_decay (AdamW), else 1
  float l2;            // weight_decay (Adam), else 0
  float guard;         // 1 / C_t, or 0 where both moments are exact
  float grad_factor;   // 1 / (W * A * loss scale)
  float clip;          // clip coefficient, 1 = off
};

struct AdamArgs {
  std::int64_t elements = 0;  // whole blocks
  int block = 128;
  View grad, grad_residual;  // residual: error feedback, else empty
  View exp_avg, exp_avg_sq;  // exp_avg_sq: v if kFp32, else its square root
  DType weight_dtype = DType::kFp32;
  void* weight = nullptr;
  int master_bits = 0;  // 0, 8, 16 remainder bits, or 32: separate FP32 master
  void* master = nullptr;
  AdamScalars scalars{};
  Rounding exp_avg_rounding = Rounding::kNearest;
  RandomStream moments, weights;
  bool commit = true;  // false: compute max_weight only, change nothing
};

struct Ops {
  std::string_view name;  // "base", "v3", "v4"

  // Returns the bits of max |x|; at least 0x7F800000 when a value is not finite.
  std::uint32_t (*encode)(const float* x, View out, std::int64_t n, int block, Rounding rounding,
                          RandomStream stream);
  void (*decode)(View in, float* out, std::int64_t n, int block);

  // acc = round(decode(acc) + gradient); with a residual view r: t = acc + r + g, acc = round(t),
  // r = round(t - acc). Gradient: plain storage (kFp32, kBf16, kFp16). Returns the bits of max |t|.
  std::uint32_t (*accumulate)(View acc, View residual, View gradient, std::int64_t n, int block,
                              Rounding rounding, RandomStream stream);

  // out = factor * (decode(part 0) + decode(part 1) + ...), added in FP32 in that order.
  // `residuals` is null, or one view per part that is added to it first. Returns the bits of max
  // |out|.
  std::uint32_t (*decode_sum)(const View* parts, const View* residuals, int count, float factor,
                              float* out, std::int64_t n, int block);

  // out[i] = sum over block i of (float64(decode(x)) * factor)^2, in 16 fixed lanes.
  // factor is applied in FP32 as in the Adam pass. Returns the bits of max |x * factor|.
  std::uint32_t (*sum_squares)(View x, View residual, float factor, double* out, std::int64_t n,
                               int block);

  // One fused Adam/AdamW pass. Returns the bits of max |new weight|.
  std::uint32_t (*adam)(const AdamArgs& args);

  // Splits an FP32 master into weight + remainder (master_bits 8 or 16), copies it (32), or only
  // rounds to nearest (0). And back: out = the FP32 value that Adam works with.
  void (*split_master)(const float* master, DType dtype, void* weight, int master_bits, void* rest,
                       std::int64_t n);
  void (*join_master)(DType dtype, const void* weight, int master_bits, const void* rest,
                      float* out, std::int64_t n);
};

// Chosen once: the best table that this CPU can run, or the one that the environment variable
// ZEROFP8_ISA names (base, v3, v4). Throws ArgumentError if that one is unknown or cannot run here.
const Ops& cpu_ops();
// All tables that can run on this CPU, base first.
std::vector<const Ops*> runnable_cpu_ops();

}  // namespace zerofp8
