#include "src/optim/device_step.h"

#include <cstring>

#include "src/optim/adam_scalars.h"
#include "zerofp8/error.h"

namespace zerofp8 {

DeviceStep::DeviceStep(Device& device, std::vector<ParameterStep> steps, std::size_t groups,
                       int data_ranks, int slices)
    : device_(device), steps_(std::move(steps)) {
  state_ = reserve(sizeof(StepState));
  steps_at_ = reserve(steps_.size() * sizeof(ParameterStep));
  groups_at_ = reserve(groups * sizeof(HyperParameters));
  digest_ = reserve(sizeof(std::uint64_t));
  refusal_ = reserve(sizeof(std::uint32_t));
  mine_ = reserve(sizeof(StepPart));
  of_data_ = reserve(static_cast<std::size_t>(data_ranks) * sizeof(StepPart));
  of_slice_ = reserve(sizeof(StepPart));
  of_slices_ = reserve(static_cast<std::size_t>(slices) * sizeof(StepPart));
  total_ = reserve(sizeof(StepPart));
  memory_ = Buffer(device_.allocator(), Component::kTransient, size_);
  device_.zero(memory_.data(), size_);
  const StepState fresh;
  device_.upload(state(), &fresh, sizeof fresh);
  device_.upload(step(0), steps_.data(), steps_.size() * sizeof(ParameterStep));
}

std::size_t DeviceStep::reserve(std::size_t bytes) {
  constexpr std::size_t kAlignment = 16;
  const std::size_t offset = size_;
  size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

void DeviceStep::send(void* to, const void* from, std::size_t bytes, const std::string& what) {
  if (device_.is_capturing()) {
    throw DeviceError(device_.name() + ": " + what +
                      " while the step is captured into a graph, which would repeat today's values "
                      "for ever; run a whole step of the same kind before the capture, and change "
                      "hyper-parameters between replays only");
  }
  device_.upload(to, from, bytes);
}

void DeviceStep::write_groups(const std::vector<AdamOptions>& groups, std::uint64_t digest,
                              bool fault) {
  if (!groups_.empty() && digest == sent_digest_ && fault == sent_fault_) return;
  std::vector<HyperParameters> next;
  for (const AdamOptions& options : groups) next.push_back(hyper_parameters(options));
  const std::string what = "hyper-parameters were changed";
  send(this->groups(), next.data(), next.size() * sizeof(HyperParameters), what);
  const std::uint32_t word = fault ? static_cast<std::uint32_t>(StepSkip::kFault) : 0;
  send(refusal(), &word, sizeof word, what);
  send(this->digest(), &digest, sizeof digest, what);
  groups_ = std::move(next);
  sent_digest_ = digest;
  sent_fault_ = fault;
}

void DeviceStep::write_use(const std::vector<bool>& used) {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const std::uint32_t word = used[i];
    if (word == steps_[i].used) continue;
    send(&step(static_cast<int>(i))->used, &word, sizeof word,
         "other parameters have a gradient than in the step before");
    steps_[i].used = word;
  }
}

void DeviceStep::write_counters(std::uint64_t applied, std::uint64_t skipped,
                                const std::vector<std::int64_t>& steps,
                                const std::vector<double>& guards) {
  StepState state;
  state.applied = state.before = applied;
  state.skipped = skipped;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    steps_[i].step = steps[i];
    steps_[i].guard_c = guards[i];
  }
  const std::string what = "counters were set";
  send(this->state(), &state, sizeof state, what);
  send(step(0), steps_.data(), steps_.size() * sizeof(ParameterStep), what);
}

StepState DeviceStep::read_state() {
  StepState state;
  device_.download(&state, this->state(), sizeof state);
  return state;
}

std::vector<ParameterStep> DeviceStep::read_steps() {
  device_.download(steps_.data(), step(0), steps_.size() * sizeof(ParameterStep));
  return steps_;
}

StepPart DeviceStep::read_total() {
  StepPart part;
  device_.download(&part, total(), sizeof part);
  return part;
}

}  // namespace zerofp8
