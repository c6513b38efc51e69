// Numbers in some storage, owned by a test: codes and, for block storages, scales.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "zerofp8/ops.h"

namespace zerofp8::test {

inline constexpr Storage kAllStorages[] = {
    Storage::kFp32,      Storage::kBf16,      Storage::kFp16,      Storage::kFp16Block,
    Storage::kE4m3Block, Storage::kE5m2Block, Storage::kUe4m4Block};
inline constexpr int kBlockSizes[] = {32, 64, 128, 256};

inline std::string storage_name(Storage storage) {
  constexpr const char* kNames[] = {"fp32",      "bf16",      "fp16",      "fp16block",
                                    "e4m3block", "e5m2block", "ue4m4block"};
  return kNames[static_cast<int>(storage)];
}

class Stored {
 public:
  Stored() = default;
  Stored(Storage storage, std::int64_t n, int block)
      : storage_(storage),
        block_(block),
        codes_(static_cast<std::size_t>(n * bytes_of(storage))),
        scales_(is_block(storage) ? static_cast<std::size_t>(n / block) : 0) {}

  View view() { return {storage_, codes_.data(), scales_.empty() ? nullptr : scales_.data()}; }
  std::uint32_t encode(const Ops& ops, const std::vector<float>& x,
                       Rounding rounding = Rounding::kNearest, RandomStream stream = {}) {
    return ops.encode(x.data(), view(), static_cast<std::int64_t>(x.size()), block_, rounding,
                      stream);
  }
  std::vector<float> decode(const Ops& ops) {
    std::vector<float> out(codes_.size() / static_cast<std::size_t>(bytes_of(storage_)));
    ops.decode(view(), out.data(), static_cast<std::int64_t>(out.size()), block_);
    return out;
  }
  const std::vector<std::uint8_t>& codes() const { return codes_; }
  const std::vector<float>& scales() const { return scales_; }
  // All bits, scales included.
  std::string bytes() const {
    return std::string(codes_.begin(), codes_.end()) +
           std::string(reinterpret_cast<const char*>(scales_.data()),
                       scales_.size() * sizeof(float));
  }

 private:
  Storage storage_ = Storage::kFp32;
  int block_ = 128;
  std::vector<std::uint8_t> codes_;
  std::vector<float> scales_;
};

inline std::vector<float> gaussian(std::int64_t n, std::uint32_t seed, float sigma = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& value : x) value = normal(generator);
  return x;
}
// Cubed Gaussians times a log-normal per 1,024 elements: outliers inside blocks, and blocks that
// differ.
inline std::vector<float> heavy_tailed(std::int64_t n, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  float level = 1;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i % 1024 == 0) level = std::exp(2 * normal(generator));
    const float z = normal(generator);
    x[i] = z * z * z * level;
  }
  return x;
}

}  // namespace zerofp8::test
