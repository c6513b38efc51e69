// The CPU as a device: the kernels' tables of functions over the threads of one rank. What the
// tables leave open is here: the last, partial block of a caller's memory goes through a
// zero-padded one, and sums go through pieces that stay in cache.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "kernels/exact_limbs.h"
#include "kernels/launch_args.h"
#include "kernels/parallel.h"
#include "kernels/step_element.h"
#include "zerofp8/device.h"

namespace zerofp8 {
namespace {

constexpr std::int64_t kPiece = 4096;
constexpr std::size_t kMaxBlockBytes = 256 * 4;
using PaddedBlock = std::array<std::byte, kMaxBlockBytes>;

void raise(std::uint32_t* amax, std::uint32_t bits) {
  if (amax != nullptr) *amax = std::max(*amax, bits);
}

// The views of a sum, `begin` elements further on.
class Parts {
 public:
  Parts(const Summands& in, int block) : in_(in), block_(block) {}
  std::uint32_t sum(const Ops& ops, std::int64_t begin, std::int64_t n, float factor, float* out) {
    views_.clear();
    residuals_.clear();
    for (int k = 0; k < in_.count; ++k) {
      views_.push_back(lane::moved(in_.part, k * in_.part_bytes).at(begin, block_));
      if (in_.residual) {
        residuals_.push_back(lane::moved(in_.residual, k * in_.part_bytes).at(begin, block_));
      }
    }
    return ops.decode_sum(views_.data(), in_.residual ? residuals_.data() : nullptr, in_.count,
                          factor, out, n, block_);
  }

 private:
  const Summands& in_;
  int block_;
  std::vector<View> views_, residuals_;
};

RandomStream moved(const RandomStream& stream, std::int64_t elements) {
  return {lane::key_of(stream), stream.offset + static_cast<std::uint64_t>(elements)};
}

AdamArgs moved(const AdamArgs& whole, std::int64_t begin, std::int64_t n) {
  AdamArgs a = whole;
  a.elements = n;
  a.grad = a.grad.at(begin, a.block);
  if (a.grad_residual) a.grad_residual = a.grad_residual.at(begin, a.block);
  a.exp_avg = a.exp_avg.at(begin, a.block);
  a.exp_avg_sq = a.exp_avg_sq.at(begin, a.block);
  a.weight = static_cast<std::byte*>(a.weight) + begin * bytes_of(a.weight_dtype);
  a.master = static_cast<std::byte*>(a.master) + begin * a.master_bits / 8;
  a.moments = moved(a.moments, begin);
  a.weights = moved(a.weights, begin);
  return a;
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int threads) : ops_(cpu_ops()), threads_(threads) {}
  std::string name() const override { return "cpu"; }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return allocator_; }
  bool is_host() const override { return true; }
  void* stream() const override { return nullptr; }
  bool is_capturing() const override { return false; }
  std::optional<std::size_t> free_bytes() const override { return std::nullopt; }
  std::string fault_of(const void*) const override { return ""; }

  void zero(void* data, std::size_t bytes) override {
    if (bytes != 0) std::memset(data, 0, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  void copy_many(std::span<const Copy> copies) override {
    for (const Copy& c : copies) copy(c.to, c.from, static_cast<std::size_t>(c.bytes));
  }
  void upload(void* to, const void* host, std::size_t bytes) override { copy(to, host, bytes); }
  void download(void* host, const void* from, std::size_t bytes) override {
    copy(host, from, bytes);
  }
  void synchronize() override {}

  void recode(const RecodeArgs& a) override {
    const std::int64_t whole = a.elements / a.block * a.block;
    std::uint32_t amax =
        parallel_blocks(whole, a.block, threads_, [&](std::int64_t begin, std::int64_t n) {
          return recode_blocks(a.in, a.out, a, begin, n);
        });
    if (whole < a.elements) amax = std::max(amax, recode_tail(a, whole));
    raise(a.amax, amax);
  }

  void accumulate(const AccumulateArgs& a) override {
    const std::int64_t whole = a.elements / a.block * a.block;
    const auto add = [&](std::int64_t at, std::int64_t n, const View& gradient) {
      return ops_.accumulate(a.acc.at(at, a.block),
                             a.residual ? a.residual.at(at, a.block) : View{}, gradient, n, a.block,
                             a.rounding, moved(a.stream, at));
    };
    std::uint32_t amax =
        parallel_blocks(whole, a.block, threads_, [&](std::int64_t begin, std::int64_t n) {
          if (!a.sum) return add(begin, n, a.gradient.at(begin, a.block));
          alignas(64) std::array<float, kPiece> sum;
          Parts parts(a.sum, a.block);
          std::uint32_t largest = 0;
          for (std::int64_t at = begin; at < begin + n; at += kPiece) {
            const std::int64_t len = std::min(kPiece, begin + n - at);
            parts.sum(ops_, at, len, 1.0f, sum.data());
            largest = std::max(largest, add(at, len, {Storage::kFp32, sum.data(), nullptr}));
          }
          return largest;
        });
    if (whole < a.elements) {
      alignas(64) PaddedBlock padded{};
      copy_tail(padded.data(), a.gradient.at(whole, a.block), a.elements - whole);
      amax = std::max(amax, add(whole, a.block, {a.gradient.storage, padded.data(), nullptr}));
    }
    raise(a.amax, amax);
  }

  void decode_sum(const DecodeSumArgs& a) override {
    raise(a.amax,
          parallel_blocks(a.elements, a.block, threads_, [&](std::int64_t begin, std::int64_t n) {
            return Parts(a.in, a.block).sum(ops_, begin, n, a.factor, a.out + begin);
          }));
  }

  void sum_squares(const SquaresArgs& a) override {
    constexpr std::int64_t kSquaresPiece = 1 << 16;
    squares_.resize(static_cast<std::size_t>(kSquaresPiece / a.block));
    for (std::int64_t at = 0; at < a.elements; at += kSquaresPiece) {
      const std::int64_t n = std::min(kSquaresPiece, a.elements - at);
      raise(a.amax,
            parallel_blocks(n, a.block, threads_, [&](std::int64_t begin, std::int64_t len) {
              const View rest = a.residual ? a.residual.at(at + begin, a.block) : View{};
              return ops_.sum_squares(a.x.at(at + begin, a.block), rest, a.factor,
                                      squares_.data() + begin / a.block, len, a.block);
            }));
      add_to_limbs(a.limbs, n / a.block);
    }
  }

  void adam(const AdamLaunch& launch) override {
    if (lane::is_idle(launch)) return;
    AdamArgs a = launch.args;
    a.scalars = lane::scalars_of(launch);
    const std::int64_t whole = launch.weight_elements / a.block * a.block;
    std::uint32_t amax = parallel_blocks(
        whole, a.block, threads_,
        [&](std::int64_t begin, std::int64_t n) { return ops_.adam(moved(a, begin, n)); });
    if (whole < launch.weight_elements) {
      alignas(64) PaddedBlock padded{};
      AdamArgs last = moved(a, whole, a.block);
      void* weight = last.weight;
      const auto bytes =
          static_cast<std::size_t>((launch.weight_elements - whole) * bytes_of(a.weight_dtype));
      std::memcpy(padded.data(), weight, bytes);
      last.weight = padded.data();
      amax = std::max(amax, ops_.adam(last));
      if (a.commit) std::memcpy(weight, padded.data(), bytes);
    }
    raise(launch.amax, amax);
  }

  void split_master(const MasterArgs& a) override {
    ops_.split_master(a.values, a.dtype, a.weight, a.master_bits, a.rest, a.elements);
    if (a.amax != nullptr) raise(a.amax, largest(a.values, a.elements));
  }
  void join_master(const MasterArgs& a) override {
    if (a.values == nullptr) return look_at_masters(a);
    ops_.join_master(a.dtype, a.weight, a.master_bits, a.rest, a.values, a.elements);
    if (a.amax != nullptr) raise(a.amax, largest(a.values, a.elements));
  }

  void follow_weights(const FollowArgs& a) override {
    const auto* weight = static_cast<const std::uint16_t*>(a.weight);
    auto* kept = static_cast<std::uint16_t*>(a.kept);
    for (std::int64_t i = 0; i < a.elements; ++i) {
      if (weight[i] == kept[i]) continue;
      kept[i] = weight[i];
      std::byte* master = static_cast<std::byte*>(a.master) + i * a.master_bits / 8;
      if (a.master_bits == 32) {
        ops_.join_master(a.dtype, weight + i, 0, nullptr, reinterpret_cast<float*>(master), 1);
      } else {
        std::memset(master, 0, static_cast<std::size_t>(a.master_bits / 8));
      }
    }
  }

  void make_part(const MakePartArgs& a) override {
    element::make_part(a, element::worst_of(a, 0, 1));
  }
  void combine_parts(const CombinePartsArgs& a) override { element::combine_parts(a); }
  void decide(const DecideArgs& a) override { element::decide(a, 0, 1); }

 private:
  static void copy_tail(std::byte* padded, const View& from, std::int64_t elements) {
    std::memcpy(padded, from.codes, static_cast<std::size_t>(elements * bytes_of(from.storage)));
  }

  void look_at_masters(const MasterArgs& a) const {
    alignas(64) std::array<float, kPiece> values;
    for (std::int64_t at = 0; at < a.elements; at += kPiece) {
      const std::int64_t n = std::min(kPiece, a.elements - at);
      ops_.join_master(
          a.dtype, static_cast<const std::byte*>(a.weight) + at * bytes_of(a.dtype), a.master_bits,
          static_cast<const std::byte*>(a.rest) + at * a.master_bits / 8, values.data(), n);
      raise(a.amax, largest(values.data(), n));
    }
  }

  static std::uint32_t largest(const float* x, std::int64_t n) {
    std::uint32_t bits = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      std::uint32_t u;
      std::memcpy(&u, x + i, sizeof u);
      bits = std::max(bits, u & 0x7FFFFFFFu);
    }
    return bits;
  }

  // Whole blocks [begin, begin + n) of `in` to `out`.
  std::uint32_t recode_blocks(const Summands& in, const View& out, const RecodeArgs& a,
                              std::int64_t begin, std::int64_t n) const {
    Parts parts(in, a.block);
    if (out.storage == Storage::kFp32) {
      return parts.sum(ops_, begin, n, 1.0f, static_cast<float*>(out.codes) + begin);
    }
    const auto encode = [&](const float* x, std::int64_t at, std::int64_t len) {
      return ops_.encode(x, out.at(at, a.block), len, a.block, a.rounding, moved(a.stream, at));
    };
    const bool one = in.count == 1 && !in.residual;
    if (one && in.part.storage == Storage::kFp32) {
      return encode(static_cast<const float*>(in.part.codes) + begin, begin, n);
    }
    alignas(64) std::array<float, kPiece> value;
    std::uint32_t amax = 0;
    for (std::int64_t at = begin; at < begin + n; at += kPiece) {
      const std::int64_t len = std::min(kPiece, begin + n - at);
      if (one) {
        ops_.decode(in.part.at(at, a.block), value.data(), len, a.block);  // the same bits, faster
      } else {
        parts.sum(ops_, at, len, 1.0f, value.data());
      }
      amax = std::max(amax, encode(value.data(), at, len));
    }
    return amax;
  }

  std::uint32_t recode_tail(const RecodeArgs& a, std::int64_t whole) const {
    alignas(64) PaddedBlock from{}, to{};
    const std::int64_t left = a.elements - whole;
    Summands in = a.in;
    in.part = in.part.at(whole, a.block);
    if (in.residual) in.residual = in.residual.at(whole, a.block);
    if (!is_block(in.part.storage)) {
      copy_tail(from.data(), in.part, left);
      in.part.codes = from.data();
    }
    RecodeArgs rest = a;
    rest.stream = moved(a.stream, whole);
    const View out = a.out.at(whole, a.block);
    if (is_block(out.storage)) return recode_blocks(in, out, rest, 0, a.block);
    const std::uint32_t amax =
        recode_blocks(in, {out.storage, to.data(), nullptr}, rest, 0, a.block);
    std::memcpy(out.codes, to.data(), static_cast<std::size_t>(left * bytes_of(out.storage)));
    return amax;
  }

  void add_to_limbs(std::int64_t* limbs, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const double x = squares_[static_cast<std::size_t>(i)];
      if (x <= 0x1p1000) add_exactly(limbs, x);  // else of a block that is not finite
    }
    carry_exactly(limbs);
  }

  const Ops& ops_;
  int threads_;
  CpuAllocator allocator_;
  std::vector<double> squares_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(int threads) {
  return std::make_unique<CpuDevice>(threads);
}

}  // namespace zerofp8
