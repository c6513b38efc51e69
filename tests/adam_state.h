// Everything that one call of Ops::adam reads and writes, owned by a test.
#pragma once

#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "src/optim/adam_scalars.h"
#include "tests/stored.h"

namespace zerofp8::test {

// One row of the product of state storages.
struct AdamLayout {
  Storage exp_avg = Storage::kFp32;
  Storage exp_avg_sq = Storage::kFp32;  // v if FP32, else its root
  DType weight = DType::kFp32;
  int master_bits = 0;
  Rounding exp_avg_rounding = Rounding::kNearest;

  bool exact() const { return exp_avg == Storage::kFp32 && exp_avg_sq == Storage::kFp32; }
  std::string name() const {
    return storage_name(exp_avg) + "_" + storage_name(exp_avg_sq) + "_" +
           std::string(to_string(weight)) + "_" + std::to_string(master_bits);
  }
};

struct Moments {
  Storage exp_avg, exp_avg_sq;
  std::string name() const { return storage_name(exp_avg) + "_" + storage_name(exp_avg_sq); }
};
inline void PrintTo(const Moments& moments, std::ostream* out) { *out << moments.name(); }

inline std::vector<Moments> all_moments() {
  std::vector<Moments> all;
  for (const Storage m :
       {Storage::kFp32, Storage::kBf16, Storage::kFp16Block, Storage::kE4m3Block}) {
    for (const Storage v :
         {Storage::kFp32, Storage::kBf16, Storage::kFp16Block, Storage::kUe4m4Block}) {
      all.push_back({m, v});
    }
  }
  return all;
}

// Every weight and master beside these moments.
inline std::vector<AdamLayout> layouts_of(const Moments& moments) {
  const Rounding rounding =
      moments.exp_avg == Storage::kFp32 ? Rounding::kNearest : Rounding::kMixed;
  std::vector<AdamLayout> all;
  all.push_back({moments.exp_avg, moments.exp_avg_sq, DType::kFp32, 0, rounding});
  for (const DType weight : {DType::kBf16, DType::kFp16}) {
    for (const int bits : {0, 8, 16, 32}) {
      all.push_back({moments.exp_avg, moments.exp_avg_sq, weight, bits, rounding});
    }
  }
  return all;
}

class AdamState {
 public:
  AdamState(const AdamLayout& layout, const std::vector<float>& p, int block)
      : layout_(layout),
        n_(static_cast<std::int64_t>(p.size())),
        block_(block),
        exp_avg_(layout.exp_avg, n_, block),
        exp_avg_sq_(layout.exp_avg_sq, n_, block),
        weight_(p.size() * static_cast<std::size_t>(zerofp8::bytes_of(layout.weight))),
        master_(p.size() * static_cast<std::size_t>(layout.master_bits) / 8) {
    set_master(p);
  }

  void set_master(const std::vector<float>& p) {
    cpu_ops().split_master(p.data(), layout_.weight, weight_.data(), layout_.master_bits,
                           master_.data(), n_);
  }
  // The FP32 value that Adam works with.
  std::vector<float> master() const {
    std::vector<float> p(static_cast<std::size_t>(n_));
    cpu_ops().join_master(layout_.weight, weight_.data(), layout_.master_bits, master_.data(),
                          p.data(), n_);
    return p;
  }
  const std::vector<std::uint8_t>& weight() const { return weight_; }
  Stored& exp_avg() { return exp_avg_; }
  Stored& exp_avg_sq() { return exp_avg_sq_; }

  // `t` is the number of this step, from 1; it seeds the random bits too.
  std::uint32_t step(const Ops& ops, Stored& grad, const AdamScalars& scalars, std::int64_t t,
                     bool commit = true, View residual = {}) {
    AdamArgs args;
    args.elements = n_;
    args.block = block_;
    args.grad = grad.view();
    args.grad_residual = residual;
    args.exp_avg = exp_avg_.view();
    args.exp_avg_sq = exp_avg_sq_.view();
    args.weight_dtype = layout_.weight;
    args.weight = weight_.data();
    args.master_bits = layout_.master_bits;
    args.master = master_.data();
    args.scalars = scalars;
    args.exp_avg_rounding = layout_.exp_avg_rounding;
    args.moments = {.key = 1000 + static_cast<std::uint64_t>(t), .offset = 0};
    args.weights = {.key = 5000 + static_cast<std::uint64_t>(t), .offset = 0};
    args.commit = commit;
    return ops.adam(args);
  }
  std::uint32_t step(const Ops& ops, const std::vector<float>& g, const AdamScalars& scalars,
                     std::int64_t t, bool commit = true) {
    Stored grad(Storage::kFp32, n_, block_);
    grad.encode(ops, g);
    return step(ops, grad, scalars, t, commit);
  }
  // All bits of weights, masters and moments.
  std::string bytes() const {
    return std::string(weight_.begin(), weight_.end()) +
           std::string(master_.begin(), master_.end()) + exp_avg_.bytes() + exp_avg_sq_.bytes();
  }

 private:
  AdamLayout layout_;
  std::int64_t n_;
  int block_;
  Stored exp_avg_, exp_avg_sq_;
  std::vector<std::uint8_t> weight_;
  std::vector<std::uint8_t> master_;
};

// The scalars of step t as the engine makes them; the guard is on where a moment is quantised.
inline AdamScalars scalars_at(const AdamOptions& options, std::int64_t t, bool guarded) {
  std::int64_t step = 0;
  double c = 0;
  for (std::int64_t i = 0; i < std::min<std::int64_t>(t, 2000); ++i) advance(options, step, c);
  return adam_scalars(options, t, guarded ? c : 0.0);
}

}  // namespace zerofp8::test
