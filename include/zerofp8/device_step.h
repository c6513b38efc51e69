// A step that is decided in device memory: nobody on the host waits for gradients, and a CUDA graph
// of it can be replayed. What the host otherwise computes at the boundary (norm, clip coefficient,
// skip, step counters, Adam's scalars) is computed by three small kernels, with the same arithmetic
// in float64 (kernels/step_element.h), so that the bits are the same either way:
//
//   device.make_part({...});       // this rank's squares, flags and digest as one StepPart
//   (all-gather of the parts)
//   device.combine_parts({...});   // one StepPart from those of all ranks
//   device.decide({...});          // StepState and every ParameterStep
//   device.adam({.args = ..., .state = state, .step = steps + i});   // does nothing in a skip
#pragma once

#include <cstdint>

#include "zerofp8/ops.h"

namespace zerofp8 {

// An exact sum of squares, as of kernels/exact_limbs.h.
inline constexpr int kExactSumWords = 23;

// Of one parameter group.
struct HyperParameters {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  std::uint32_t decoupled = 0;  // 1: AdamW
  std::uint32_t padding = 0;
};

enum class StepSkip : std::uint32_t {
  kNone,       // the step is applied
  kNotFinite,  // a gradient was not finite
  kTooLarge,   // the square of the clipped norm does not fit into FP32
  kDisagree,   // data ranks differ in hyper-parameters or in the number of applied steps
  kFault,      // hyper-parameters of a rank make no sense in FP32
};

// What one rank, or several together, have to say about a step. Travels as bytes.
struct StepPart {
  std::int64_t squares[kExactSumWords] = {};
  std::uint64_t digest = 0;         // of the hyper-parameters and applied steps
  std::uint32_t refusal = 0;        // StepSkip::kFault, kDisagree, or 0
  std::int32_t bad = 0;             // 1: a sum was not finite; 2: so was a rank's gradient
  std::int32_t bad_rank = -1;       // data rank
  std::int32_t bad_slice = -1;      // rank in the model group
  std::int32_t bad_parameter = -1;  // index there
  std::uint32_t valid = 0;          // 1: this is a part
};

// What was decided last, and the counters.
struct StepState {
  std::uint64_t applied = 0, skipped = 0;  // steps
  std::uint64_t before = 0;                // applied steps before the one that was decided last
  double norm = 0, clip = 1;
  StepSkip skip = StepSkip::kNone;
  std::int32_t bad_rank = -1, bad_slice = -1, bad_parameter = -1;
};

// Of one parameter.
struct ParameterStep {
  std::int64_t step = 0;      // Adam's t
  double guard_c = 0;         // C_t of the guard
  AdamScalars scalars{};      // of the last applied step; but grad_factor, which a launch gives
  std::int32_t group = 0;     // of its hyper-parameters
  std::uint32_t used = 0;     // has a gradient on some rank
  std::uint32_t guarded = 0;  // 0: both moments are FP32
  std::uint32_t padding = 0;
};

// All of it in device memory, `out` included.
struct MakePartArgs {
  const std::int64_t* squares = nullptr;
  const std::uint32_t* maxima = nullptr;  // per parameter: of what was given, of what was received
  std::int32_t parameters = 0;
  std::int32_t data_rank = 0, slice = 0;
  const std::uint64_t* digest = nullptr;   // of this rank's hyper-parameters
  const std::uint32_t* refusal = nullptr;  // StepSkip::kFault or 0
  const StepState* state = nullptr;
  StepPart* out = nullptr;
};

struct CombinePartsArgs {
  const StepPart* parts = nullptr;
  std::int32_t count = 1;
  bool compare = true;  // digests: those of data ranks, not of model slices
  StepPart* out = nullptr;
};

struct DecideArgs {
  const StepPart* total = nullptr;
  double max_norm = 0;  // of clipping; 0: off
  const HyperParameters* groups = nullptr;
  std::int32_t parameters = 0;
  ParameterStep* steps = nullptr;
  StepState* state = nullptr;
};

}  // namespace zerofp8
