// Counter-based random bits: a pure function of what is being rounded, so results do not depend on
// the number of ranks, threads, devices, on bucket sizes or on a resume.
//
//   std::uint64_t key = random_key({.seed = 1, .step = 7, .purpose = Purpose::kMoments, .name_hash
//   = h}); std::uint32_t r = random_bits(key, offset);       // offset: element in the logical
//   parameter
//
// Granules of 32 elements get a 32-bit key from 64-bit mixing (the finaliser of SplitMix64: Steele,
// Lea, Flood 2014, with Stafford's variant 13 constants); elements of a granule are hashed with
// "lowbias32" (C. Wellons' hash-prospector, 2018). Known-answer vectors: tests/random_test.cc.
#pragma once

#include <cstdint>
#include <string_view>

#include "zerofp8/element.h"

namespace zerofp8 {

enum class Purpose : std::uint32_t { kMoments = 1, kWeight = 2, kAccumulator = 3, kWire = 4 };

namespace element {

ZEROFP8_HD std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
ZEROFP8_HD std::uint32_t lowbias32(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}
inline constexpr int kGranule = 32;
ZEROFP8_HD std::uint32_t granule_key(std::uint64_t key, std::uint64_t granule) {
  return static_cast<std::uint32_t>(mix64(key + (granule + 1u) * 0x9E3779B97F4A7C15ull) >> 32);
}
ZEROFP8_HD std::uint32_t lane_bits(std::uint32_t granule_key, std::uint32_t lane) {
  return lowbias32(granule_key + lane * 0x9E3779B9u);
}

}  // namespace element

struct RandomKeyInput {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;  // applied steps before this one
  Purpose purpose = Purpose::kMoments;
  std::uint32_t micro_batch = 0;  // accumulators and wire only
  std::uint32_t data_rank = 0;    // accumulators and wire only
  std::uint64_t name_hash = 0;    // hash_name() of the parameter; tied copies share a name
};

// FNV-1a, 64 bits.
constexpr std::uint64_t hash_name(std::string_view name) {
  std::uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  return h;
}

// A key of which all but the step is known.
struct RandomKeyBase {
  std::uint64_t seed = 0, use = 0, data_rank = 0, name_hash = 0;
};
constexpr std::uint64_t use_of(Purpose purpose, std::uint32_t micro_batch) {
  return (std::uint64_t(purpose) << 32) ^ micro_batch;
}

namespace element {

ZEROFP8_HD std::uint64_t random_key(const RandomKeyBase& base, std::uint64_t step) {
  std::uint64_t key = mix64(base.seed + 0x9E3779B97F4A7C15ull);
  key = mix64(key ^ step);
  key = mix64(key ^ base.use);
  key = mix64(key ^ base.data_rank);
  return mix64(key ^ base.name_hash);
}

}  // namespace element

inline std::uint64_t random_key(const RandomKeyInput& in) {
  return element::random_key(
      {in.seed, use_of(in.purpose, in.micro_batch), in.data_rank, in.name_hash}, in.step);
}

inline std::uint32_t random_bits(std::uint64_t key, std::uint64_t offset) {
  return element::lane_bits(element::granule_key(key, offset / element::kGranule),
                            static_cast<std::uint32_t>(offset % element::kGranule));
}

}  // namespace zerofp8
