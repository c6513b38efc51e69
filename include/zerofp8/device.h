// A rank's memory and kernels on one device, behind one face: the CPU's cores, a CUDA device, and
// what tests run on the host in a device's place. Calls are queued in order and return at once;
// only download() and synchronize() wait.
//
//   std::shared_ptr<Device> gpu = make_cuda_device(0);
//   Engine engine(settings, parameters, groups, {.device = gpu});   // weights are in its memory
//
// Buffers of the engine (accumulators, moments, masters, messages) are padded to whole blocks and
// 16-byte aligned; what belongs to the caller (gradients, weights) holds `elements` numbers,
// aligned to its type only: beyond them a kernel reads zeros and writes nothing.
//
// Kernels have the bits of the CPU's (zerofp8/ops.h), but for the sign and payload of NaNs. Maxima
// are combined into device memory, so that nothing has to wait for them: *amax becomes
// max(*amax, bits of max |x|), and not_finite(*amax) tells of an Inf or a NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "zerofp8/buffer.h"
#include "zerofp8/device_step.h"
#include "zerofp8/ops.h"

namespace zerofp8 {

// decode(part 0) + decode(residual 0), then + part 1 (+ residual 1), ...: added in FP32 in that
// order. Part k lies `k * part_bytes` behind the first one, its scales and its residual, too.
struct Summands {
  View part, residual;
  int count = 1;
  std::int64_t part_bytes = 0;  // a multiple of 16
  explicit operator bool() const { return static_cast<bool>(part); }
};

// out = encode(in); `in` and `out` may be the caller's if there is one summand. Plain storages
// convert.
struct RecodeArgs {
  Summands in;
  View out;
  std::int64_t elements = 0;
  int block = 128;
  Rounding rounding = Rounding::kNearest;
  RandomStream stream;
  std::uint32_t* amax = nullptr;
};

// As Ops::accumulate: adds the caller's `gradient`, or else the engine's `sum` (whole blocks).
struct AccumulateArgs {
  View acc, residual, gradient;
  Summands sum;
  std::int64_t elements = 0;
  int block = 128;
  Rounding rounding = Rounding::kNearest;
  RandomStream stream;
  std::uint32_t* amax = nullptr;
};

// out = factor * in, as Ops::decode_sum.
struct DecodeSumArgs {
  Summands in;
  float factor = 1.0f;
  float* out = nullptr;
  std::int64_t elements = 0;  // whole blocks
  int block = 128;
  std::uint32_t* amax = nullptr;
};

// Adds the squares of (decode(x) + decode(residual)) * factor to an exact sum; each block is summed
// as in Ops::sum_squares. Blocks that are not finite add nothing. limbs: ExactLimbs::kWords words
// of kernels/exact_limbs.h, zeroed before the first sum.
struct SquaresArgs {
  View x, residual;
  float factor = 1.0f;
  std::int64_t elements = 0;  // whole blocks
  int block = 128;
  std::int64_t* limbs = nullptr;
  std::uint32_t* amax = nullptr;
};

// As Ops::adam; the weight is the caller's. *amax: of the new weights.
struct AdamLaunch {
  AdamArgs args;
  std::int64_t weight_elements = 0;  // args.elements, or fewer where the parameter ends in a block
  std::uint32_t* amax = nullptr;
  // Of a step that was decided in device memory, or null: nothing is done where it is skipped, and
  // the scalars but for grad_factor are the parameter's.
  const StepState* state = nullptr;
  const ParameterStep* step = nullptr;
};

// As Ops::split_master and join_master. *amax of a join: of the values, which may be null if that
// is all that is asked for.
struct MasterArgs {
  DType dtype = DType::kFp32;
  void* weight = nullptr;
  int master_bits = 0;
  void* rest = nullptr;
  float* values = nullptr;
  std::int64_t elements = 0;
  std::uint32_t* amax = nullptr;
};

// Where the bits of a 16-bit weight are not the kept ones, its master becomes what the weight is
// (remainder bits: 0) and the kept one follows.
struct FollowArgs {
  DType dtype = DType::kBf16;
  const void* weight = nullptr;
  void* kept = nullptr;
  int master_bits = 0;
  void* master = nullptr;
  std::int64_t elements = 0;
};

// One of many copies within a device's memory, of which none reads what another one writes. Any
// size and alignment.
struct Copy {
  void* to = nullptr;
  const void* from = nullptr;
  std::int64_t bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;     // "cpu", "cuda:0"
  virtual Allocator& allocator() = 0;       // of device memory
  virtual Allocator& host_allocator() = 0;  // of host memory that copies are fast to and from
  // Whether the program can read and write the memory by itself, too.
  virtual bool is_host() const = 0;
  // What kernels and copies are queued on: a cudaStream_t; null for the default one and on hosts.
  virtual void* stream() const = 0;
  // Whether what is queued is being recorded into a graph instead of run: download() and
  // synchronize() are DeviceErrors then, and so is new memory.
  virtual bool is_capturing() const = 0;
  // Of its memory; nullopt where that is not known.
  virtual std::optional<std::size_t> free_bytes() const = 0;
  // What is wrong with memory that is handed to kernels, as "is in host memory"; empty: nothing.
  virtual std::string fault_of(const void* data) const = 0;

  virtual void zero(void* data, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  // Packs and unpacks: a launch per kCopiesAtOnce of them instead of one for each.
  virtual void copy_many(std::span<const Copy> copies) = 0;
  // Ordinary memory may be written to again at once; page-locked memory when the copy is over.
  virtual void upload(void* to, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* from, std::size_t bytes) = 0;
  virtual void synchronize() = 0;

  virtual void recode(const RecodeArgs& args) = 0;
  virtual void accumulate(const AccumulateArgs& args) = 0;
  virtual void decode_sum(const DecodeSumArgs& args) = 0;
  virtual void sum_squares(const SquaresArgs& args) = 0;
  virtual void adam(const AdamLaunch& args) = 0;
  virtual void split_master(const MasterArgs& args) = 0;
  virtual void join_master(const MasterArgs& args) = 0;
  virtual void follow_weights(const FollowArgs& args) = 0;

  virtual void make_part(const MakePartArgs& args) = 0;
  virtual void combine_parts(const CombinePartsArgs& args) = 0;
  virtual void decide(const DecideArgs& args) = 0;
};

// The CPU: its best instruction set (see cpu_ops()), `threads` threads of the caller's OpenMP pool.
// The number of threads never changes bits.
std::unique_ptr<Device> make_cpu_device(int threads = 1);

// Why CUDA cannot be used here, as a sentence for people; empty if it can. `index`: the CUDA
// device.
std::string why_no_cuda(int index = 0);
// `stream`: a cudaStream_t, or null for the default stream; outlives the device. Throws
// DeviceError.
std::unique_ptr<Device> make_cuda_device(int index = 0, void* stream = nullptr);

}  // namespace zerofp8
