// Clip, fused Adam over the state range, weight gather: the second half of a step.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/optim/adam_scalars.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

// Beyond it a stored fp16 weight may be infinite: always with stochastic rounding, from 65520 less
// one unit of the master elsewhere.
constexpr float kMaxFp16 = 65504.0f;

}  // namespace

AdamScalars Engine::Impl::scalars_for(const BucketState& b, int parameter) const {
  const ParameterState& state = states[parameter];
  const double guard_c = b.exact_moments() ? 0.0 : state.guard_c;
  AdamScalars s = adam_scalars(hyper[b.bucket->group], state.step, guard_c);
  s.grad_factor = b.gradient.factor;
  s.clip = static_cast<float>(agreed.clip * state.factor);
  return s;
}

void Engine::Impl::adam_segment(BucketState& b, const Segment& segment, bool commit) {
  const std::int64_t at = segment.offset;  // in the state range
  const int block = settings.block_size;
  const ParameterState& state = states[segment.parameter];
  AdamArgs args;
  args.elements = segment.padded;
  args.block = block;
  args.grad = b.gradient.main.at(at, block);
  if (b.gradient.residual) args.grad_residual = b.gradient.residual.at(at, block);
  args.exp_avg = b.exp_avg.at(at, block);
  args.exp_avg_sq = b.exp_avg_sq.at(at, block);
  args.weight_dtype = b.bucket->dtype;
  args.weight = weight_of(b, segment);
  args.master_bits = b.master_bits;
  args.master = b.master.data() + at * b.master_bits / 8;
  if (device_step) {
    args.scalars.grad_factor = b.gradient.factor;
  } else {
    args.scalars = scalars_for(b, segment.parameter);
  }
  args.exp_avg_rounding = exp_avg_rounding(b.exp_avg.storage, hyper[b.bucket->group].beta1);
  const auto random = [&](Purpose purpose) {
    return stream({settings.seed, use_of(purpose, 0), 0, state.name_hash}, segment.parameter_offset,
                  device_step ? device_step->before() : nullptr);
  };
  args.moments = random(Purpose::kMoments);
  args.weights = random(Purpose::kWeight);
  args.commit = commit;
  std::uint32_t* largest = commit ? words->weight() : words->next_weight();
  device->adam({.args = args,
                .weight_elements = segment.elements,
                .amax = b.bucket->dtype == DType::kFp16 ? largest : nullptr,
                .state = device_step ? device_step->state() : nullptr,
                .step = device_step ? device_step->step(segment.parameter) : nullptr});
}

void Engine::Impl::update_weights(bool commit) {
  for (BucketState& b : buckets) {
    for (const Segment& segment : b.state_segments) {
      if (states[segment.parameter].used_anywhere) adam_segment(b, segment, commit);
    }
  }
}

// fp16 only: an update that would leave the range of fp16 is a skip on all ranks. The pass that
// looks is run only where the bound |update| <= lr sqrt(C_t (1 - beta2^t)) / (1 - beta1^t) cannot
// rule it out.
bool Engine::Impl::weights_would_overflow() {
  const bool any = std::any_of(parameters.begin(), parameters.end(),
                               [](const Parameter& p) { return p.spec.dtype == DType::kFp16; });
  std::int32_t overflow = 0;
  if (any) {
    words->fetch();  // weights may have been written to since the agreement
    const double bound = words->largest_weight();
    double largest = 0;
    for (const BucketState& b : buckets) {
      if (b.bucket->dtype != DType::kFp16) continue;
      for (const Segment& s : b.state_segments) {
        const AdamOptions& h = hyper[b.bucket->group];
        const double t = static_cast<double>(states[s.parameter].step);
        const double ratio = std::sqrt(states[s.parameter].guard_c * (1 - std::pow(h.beta2, t))) /
                             (1 - std::pow(h.beta1, t));
        largest = std::max(largest, std::fabs(h.lr) * (std::isfinite(ratio) ? ratio : INFINITY) +
                                        std::fabs(h.lr * h.weight_decay) * bound);
      }
    }
    if (!(bound + largest * 1.01 <= kMaxFp16 * 0.99)) {
      words->forget_next_weights();
      update_weights(false);
      words->fetch();
      overflow = !(words->largest_next_weight() <= kMaxFp16);  // NaN counts
    }
  }
  return overflow != 0;
}

void Engine::Impl::gather_weights(BucketState& b) {
  const int ranks = b.shard_comm->size();
  if (ranks == 1 || b.state_elements() == b.bucket->elements) return;
  const bool touched =
      std::any_of(b.bucket->placements.begin(), b.bucket->placements.end(),
                  [&](const Placement& p) { return states[p.parameter].used_anywhere; });
  if (!touched) return;
  const std::int64_t bytes = bytes_of(b.bucket->dtype);
  const std::int64_t shard = b.bucket->shard_elements;
  const std::int64_t block = settings.block_size;
  const std::int64_t slice = std::clamp<std::int64_t>(
      settings.allgather_bucket_size / ranks / block * block, block, shard);
  std::vector<Copy> copies;
  const auto add_copies = [&](int rank, std::int64_t begin, std::int64_t n, std::byte* memory,
                              bool pack) {
    for (const Segment& s :
         segments_in(*b.bucket, rank * shard + begin, rank * shard + begin + n)) {
      std::byte* weight = weight_of(b, s);
      std::byte* packed = memory + s.offset * bytes;
      copies.push_back({pack ? packed : weight, pack ? weight : packed, s.elements * bytes});
    }
  };
  for (std::int64_t begin = 0; begin < shard; begin += slice) {
    const std::int64_t n = std::min(slice, shard - begin);
    const auto part = static_cast<std::size_t>(n * bytes);
    const int me = b.shard_comm->rank();
    PooledBuffer all = pool.acquire(part * static_cast<std::size_t>(ranks));
    std::byte* own = all.data() + part * static_cast<std::size_t>(me);
    device->zero(own, part);
    copies.clear();
    add_copies(me, begin, n, own, true);
    device->copy_many(copies);
    b.shard_comm
        ->all_gather({own, part}, {all.data(), part * static_cast<std::size_t>(ranks)},
                     payload_of(b.bucket->dtype, "weight all-gather"))
        ->wait();
    copies.clear();
    for (int r = 0; r < ranks; ++r) {
      if (r != me) add_copies(r, begin, n, all.data() + part * static_cast<std::size_t>(r), false);
    }
    device->copy_many(copies);
  }
}

// False if the update would overflow somewhere: then nothing was changed, on any rank.
bool Engine::Impl::apply(StepReport& report) {
  const std::vector<ParameterState> before = states;
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (states[i].used_anywhere) {
      advance(hyper[parameters[i].spec.group], states[i].step, states[i].guard_c);
    } else {
      ++report.unused_parameters;
    }
  }
  try {
    if (agree_on_update(weights_would_overflow())) {
      states = before;
      return false;
    }
  } catch (...) {
    states = before;
    throw;
  }
  report.clip_coefficient = static_cast<float>(agreed.clip);
  update_weights(true);
  for (BucketState& b : buckets) gather_weights(b);
  keep_weights();
  return true;
}

std::string Engine::Impl::reason_to_skip(StepSkip skip, const StepReport& report) const {
  switch (skip) {
    case StepSkip::kNone:
      return "";
    case StepSkip::kNotFinite:
      return fmt::format("non-finite gradient in parameter \"{}\" on data rank {}",
                         report.bad_parameter, report.bad_rank);
    case StepSkip::kTooLarge:
      return fmt::format(
          "the gradient norm after clipping, {:.3g}, is above {:.2g}: its square does not fit into "
          "a second moment in FP32; set /gradient_clipping",
          report.grad_norm * report.clip_coefficient, element::kMaxGradient);
    case StepSkip::kDisagree:
    case StepSkip::kFault:
      break;
  }
  return "the ranks' hyper-parameters differ or make no sense";
}

void Engine::Impl::log_skip(const StepReport& report) const {
  log(fmt::format("zerofp8: step {} skipped: {} (loss scale {} -> {}; {} skipped so far)",
                  applied + skipped, report.skip_reason, report.loss_scale, report.next_loss_scale,
                  skipped));
}

// Of a random stream that no rank, thread, bucket or resume changes; `step`: where the device
// counts, or null.
RandomStream Engine::Impl::stream(const RandomKeyBase& base, std::int64_t offset,
                                  const std::uint64_t* step) const {
  const auto at = static_cast<std::uint64_t>(offset);
  if (step != nullptr) return {.key = 0, .offset = at, .step = step, .base = base};
  return {.key = element::random_key(base, static_cast<std::uint64_t>(applied)), .offset = at};
}

StepReport Engine::Impl::step() {
  if (device_step) {
    enqueue_step();
    return *fetch_report();
  }
  reduce_gradients();
  StepReport report;
  report.micro_batches = micro_batches;
  report.grad_norm = agreed.norm;
  report.loss_scale = scaler.scale() * trainer_scale;
  report.bad_parameter = agreed.bad_parameter;
  report.bad_rank = agreed.bad_rank;
  report.skip_reason =
      reason_to_skip(element::skip_of(agreed.bad, 0, agreed.norm, agreed.clip), report);
  if (agreed.bad && scaler.at_floor()) {
    const std::string list = agreed.bad_list;
    const double scale = scaler.scale();
    clear_gradients();
    throw NumericError(fmt::format(
        "the loss scale is at its floor ({}) and gradients are still not finite; parameters: {}; "
        "lower the learning rate, look at the data of this step, or lower /fp16/min_loss_scale",
        scale, list));
  }
  if (report.skip_reason.empty()) {
    report.applied = apply(report);
    if (!report.applied) {
      report.skip_reason = "an fp16 weight would leave the range of fp16 (65504), or is NaN";
    }
  }
  report.clipped_norm = report.grad_norm * report.clip_coefficient;
  scaler.update(agreed.bad);
  (report.applied ? applied : skipped) += 1;
  report.step = applied;
  report.skipped_steps = skipped;
  report.next_loss_scale = scaler.scale();
  const WireBytes total = wire_total();
  report.wire = total - wire_before;
  wire_before = total;
  clear_gradients();
  if (!report.applied) log_skip(report);
  return report;
}

}  // namespace zerofp8
