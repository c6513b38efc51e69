// A step whose decisions are made on the device: it is queued as a whole, and what came of it is
// fetched when somebody asks. The bits are those of step() in update.cc and boundary.cc.
#include <fmt/format.h>

#include "kernels/step_element.h"
#include "src/optim/adam_scalars.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"

namespace zerofp8 {

void Engine::Impl::make_device_step() {
  std::vector<ParameterStep> steps(parameters.size());
  for (std::size_t i = 0; i < steps.size(); ++i) steps[i].group = parameters[i].spec.group;
  for (const BucketState& b : buckets) {
    for (const Placement& p : b.bucket->placements) {
      steps[static_cast<std::size_t>(p.parameter)].guarded = !b.exact_moments();
    }
  }
  device_step =
      std::make_unique<DeviceStep>(*device, std::move(steps), hyper.size(), groups.data->size(),
                                   groups.model == nullptr ? 1 : groups.model->size());
}

void Engine::Impl::check_capturable(const std::string& call) const {
  if (device_step) return;
  throw ArgumentError(call + ": the engine is not capturable; set EngineOptions::capturable");
}

std::string Engine::Impl::fault_of_groups() const {
  for (const AdamOptions& h : hyper) {
    if (std::string fault = fault_of(h); !fault.empty()) return fault;
  }
  return "";
}

void Engine::Impl::send_groups() {
  device_step->write_groups(hyper, hash_name(text_of(hyper)), !fault_of_groups().empty());
}

void Engine::Impl::refuse_within_capture(const std::string& call) const {
  if (!device->is_capturing()) return;
  throw DeviceError(
      fmt::format("{}: {}: the step is being captured into a graph and has not run; "
                  "call it after a replay",
                  device->name(), call));
}

// A step outside of the graph may have changed what the graph relies on.
void Engine::Impl::before_replay() {
  refuse_within_capture("write_groups");
  watch_replays();
  if (captured) {
    for (const BucketState& b : buckets) {
      const auto g = static_cast<std::size_t>(b.bucket->group);
      if (exp_avg_rounding(b.exp_avg.storage, hyper[g].beta1) ==
          exp_avg_rounding(b.exp_avg.storage, captured->beta1[g])) {
        continue;
      }
      throw ArgumentError(fmt::format(
          "beta1 of group {} was {} when the step was captured and is {} now: the rounding of the "
          "first moment changes between them, and a graph repeats the old one; make one ordinary "
          "step with it and capture the step again",
          g, captured->beta1[g], hyper[g].beta1));
    }
    device_step->write_use(captured->used);
    queued = captured->queued;
    for (std::size_t i = 0; i < kept_weights.size(); ++i) {
      if (kept_weights[i].data() != nullptr && !captured->known[i]) kept_is_old[i] = true;
    }
  }
  send_groups();
}

std::vector<bool> Engine::Impl::used_parameters() const {
  std::vector<bool> used(states.size());
  for (std::size_t i = 0; i < states.size(); ++i) used[i] = states[i].used_anywhere;
  return used;
}

// Parts travel as the gradients do: on the device's stream. They are not in the plan's bytes.
// What an aborted collective does not bring is no part, and not one of the step before.
void Engine::Impl::gather_parts(Communicator* comm, const StepPart* mine, StepPart* all) {
  const std::size_t bytes = sizeof(StepPart);
  const auto ranks = static_cast<std::size_t>(comm->size());
  device->zero(all, bytes * ranks);
  payload(comm)
      ->all_gather({reinterpret_cast<const std::byte*>(mine), bytes},
                   {reinterpret_cast<std::byte*>(all), bytes * ranks},
                   payload_of(kPartDType, "agreement on the step"))
      ->wait();
  part_bytes += bytes * (ranks - 1);
}

void Engine::Impl::agree_on_device() {
  count_squares();
  device_step->write_use(used_parameters());
  send_groups();
  DeviceStep& on = *device_step;
  device->make_part({.squares = words->norm(),
                     .maxima = words->given(0),
                     .parameters = static_cast<std::int32_t>(states.size()),
                     .data_rank = data_rank(),
                     .slice = model_rank(),
                     .digest = on.digest(),
                     .refusal = on.refusal(),
                     .state = on.state(),
                     .out = on.mine()});
  gather_parts(groups.data, on.mine(), on.of_data());
  const bool one_slice = groups.model == nullptr;
  device->combine_parts({.parts = on.of_data(),
                         .count = groups.data->size(),
                         .out = one_slice ? on.total() : on.of_slice()});
  if (one_slice) return;
  gather_parts(groups.model, on.of_slice(), on.of_slices());
  device->combine_parts({.parts = on.of_slices(),
                         .count = groups.model->size(),
                         .compare = false,
                         .out = on.total()});
}

double Engine::Impl::norm_on_device() {
  refuse_within_capture("grad_norm");
  watch_replays();
  if (!reduced) return queued ? device_step->read_state().norm : agreed.norm;
  return element::decision_of(device_step->read_total(), settings.gradient_clipping).norm;
}

// What a capture that failed has recorded did not run: on the device everything is as before it,
// and so it has to be on the host.
void Engine::Impl::enqueue_step() {
  const bool capturing = device->is_capturing();
  try {
    queue_step();
  } catch (...) {
    if (capturing) forget_gradients();
    throw;
  }
}

void Engine::Impl::queue_step() {
  reduce_gradients();
  device->decide({.total = device_step->total(),
                  .max_norm = settings.gradient_clipping,
                  .groups = device_step->groups(),
                  .parameters = static_cast<std::int32_t>(states.size()),
                  .steps = device_step->step(0),
                  .state = device_step->state()});
  update_weights(true);
  for (BucketState& b : buckets) gather_weights(b);
  keep_weights();
  StepReport report;
  report.micro_batches = micro_batches;
  report.loss_scale = report.next_loss_scale = scaler.scale();
  for (const ParameterState& state : states) report.unused_parameters += !state.used_anywhere;
  const WireBytes total = wire_total();
  report.wire = total - wire_before;
  report.wire.payload[static_cast<std::size_t>(kPartDType)] -= part_bytes;
  report.wire.control += part_bytes;
  queued = report;
  wire_before = total;
  part_bytes = 0;
  if (device->is_capturing()) {
    captured = {.queued = report, .used = used_parameters()};
    for (const AdamOptions& h : hyper) captured->beta1.push_back(h.beta1);
    captured->known = written;
    captured->written.resize(parameters.size());
  }
  clear_gradients();
}

// Ranks that wait for one that is gone are told, in the same order on all of them.
void Engine::Impl::watch_replays() {
  if (!device_step) return;
  for (Communicator* comm : payload_comms()) {
    if (comm->on_device()) comm->watch(device->stream());
  }
}

// What the device has counted, for everything that reads the host's copy.
StepState Engine::Impl::read_counters() {
  if (!device_step) return {};
  refuse_within_capture("the engine's counters or report");
  watch_replays();
  const StepState state = device_step->read_state();
  applied = static_cast<std::int64_t>(state.applied);
  skipped = static_cast<std::int64_t>(state.skipped);
  const std::vector<ParameterStep> steps = device_step->read_steps();
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i].step = steps[i].step;
    states[i].guard_c = steps[i].guard_c;
  }
  return state;
}

void Engine::Impl::write_counters() {
  if (!device_step) return;
  std::vector<std::int64_t> steps;
  std::vector<double> guards;
  for (const ParameterState& state : states) {
    steps.push_back(state.step);
    guards.push_back(state.guard_c);
  }
  steps_told = steps_at_start = applied + skipped;
  queued.reset();
  device_step->write_counters(static_cast<std::uint64_t>(applied),
                              static_cast<std::uint64_t>(skipped), steps, guards);
}

// Other slices have other parameters, and data ranks other experts, under the same index.
std::string Engine::Impl::name_of(int parameter, int bad_rank, int bad_slice) const {
  const auto i = static_cast<std::size_t>(parameter);
  const bool known = bad_slice == model_rank() &&
                     (bad_rank == data_rank() || parameters[i].spec.reduce_group.empty());
  return known ? parameters[i].spec.name
               : fmt::format("number {} of model rank {}", parameter, bad_slice);
}

// Waits for the device, but not for a rank that is gone: replays are watched from here on.
std::optional<StepReport> Engine::Impl::fetch_report() {
  const StepState state = read_counters();
  if (const std::string failure = failure_on_device(); !failure.empty()) throw CommError(failure);
  if (!queued || applied + skipped == steps_at_start) return std::nullopt;
  StepReport report = *queued;
  report.step = applied;
  report.skipped_steps = skipped;
  report.applied = state.skip == StepSkip::kNone;
  report.grad_norm = agreed.norm = state.norm;
  report.clip_coefficient = static_cast<float>(state.clip);
  report.clipped_norm = report.grad_norm * report.clip_coefficient;
  if (state.bad_parameter >= 0) {
    report.bad_rank = state.bad_rank;
    report.bad_parameter = name_of(state.bad_parameter, state.bad_rank, state.bad_slice);
  }
  if (!report.applied) {
    report.skip_reason = reason_to_skip(state.skip, report);
  }
  if (steps_told == applied + skipped) return report;
  steps_told = applied + skipped;
  if (state.skip == StepSkip::kFault) {
    const std::string own = fault_of_groups();
    throw ArgumentError(own.empty() ? "hyper-parameters of another rank make no sense: that rank "
                                      "tells which; the step was skipped on all ranks"
                                    : own + "; the step was skipped on all ranks");
  }
  if (state.skip == StepSkip::kDisagree) {
    throw ArgumentError(fmt::format(
        "ranks disagree on this step, which was skipped on all of them; data rank {} has \"{} "
        "applied steps{}\"; set the same hyper-parameters on every rank",
        data_rank(), applied, text_of(hyper)));
  }
  if (!report.applied) log_skip(report);
  return report;
}

}  // namespace zerofp8
