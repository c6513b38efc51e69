// The public face of the engine.
#include "zerofp8/engine.h"

#include <cmath>

#include "src/optim/checkpoint.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"

namespace zerofp8 {

Engine::Engine(const Settings& settings, std::vector<Parameter> parameters, const Groups& groups,
               EngineOptions options)
    : impl_(std::make_unique<Impl>(settings, std::move(parameters), groups, std::move(options))) {}
Engine::~Engine() = default;

void Engine::add_gradient(int parameter, const void* gradient, DType dtype) {
  impl_->add_gradient(parameter, gradient, dtype);
}
void Engine::end_micro_batch() {
  if (impl_->reduced) {
    throw ArgumentError("end_micro_batch: gradients were reduced already; call step() first");
  }
  impl_->end_micro_batch();
}
void Engine::reduce_gradients() { impl_->reduce_gradients(); }
double Engine::grad_norm() const {
  return impl_->device_step ? impl_->norm_on_device() : impl_->agreed.norm;
}

std::vector<double> Engine::gradient_norms(NormKind kind) {
  if (!impl_->reduced) {
    throw ArgumentError(
        "gradient_norms: nothing is reduced; call reduce_gradients() before, and "
        "step() after it");
  }
  return impl_->gradient_norms(kind);
}
StepReport Engine::step() { return impl_->step(); }
void Engine::enqueue_step() {
  impl_->check_capturable("enqueue_step");
  impl_->enqueue_step();
}
std::optional<StepReport> Engine::fetch_report() {
  impl_->check_capturable("fetch_report");
  return impl_->fetch_report();
}
void Engine::write_groups() {
  impl_->check_capturable("write_groups");
  impl_->before_replay();
}

void Engine::discard_gradients() {
  // A reduction that some ranks have started is ended by all.
  if (impl_->settings.accumulation_sharded && !impl_->reduced) impl_->end_open_micro_batch();
  impl_->clear_gradients();
}

void Engine::discard_gradient(int parameter, bool keep_zeros) {
  impl_->discard_gradient(parameter, keep_zeros);
}
void Engine::scale_gradient(int parameter, double factor) {
  impl_->scale_gradient(parameter, factor);
}

double Engine::loss_scale() const { return impl_->scaler.scale(); }
void Engine::set_trainer_loss_scale(double scale) {
  if (!(scale >= 0x1p-126 && scale <= 0x1p126)) {  // FP32 holds its inverse
    throw ArgumentError("set_trainer_loss_scale: given " + std::to_string(scale) +
                        "; allowed: a number above 0 from 2^-126 to 2^126");
  }
  if (impl_->reduced) {
    throw ArgumentError("set_trainer_loss_scale: gradients were reduced already; call it before");
  }
  if (impl_->device_step && scale != 1) {
    throw ArgumentError(
        "set_trainer_loss_scale: given " + std::to_string(scale) +
        "; a capturable engine takes 1 only: a captured step would repeat the factor for ever");
  }
  impl_->trainer_scale = scale;
}
AdamOptions& Engine::group(int index) {
  if (index < 0 || index >= group_count()) {
    throw ArgumentError("group " + std::to_string(index) + " of " + std::to_string(group_count()));
  }
  return impl_->hyper[static_cast<std::size_t>(index)];
}
int Engine::group_count() const { return static_cast<int>(impl_->hyper.size()); }
std::int64_t Engine::applied_steps() const {
  impl_->read_counters();
  return impl_->applied;
}
std::int64_t Engine::skipped_steps() const {
  impl_->read_counters();
  return impl_->skipped;
}
std::int64_t Engine::step_of(int parameter) const {
  if (parameter < 0 || parameter >= static_cast<int>(impl_->states.size())) {
    throw ArgumentError("step_of: no parameter " + std::to_string(parameter));
  }
  impl_->read_counters();
  return impl_->states[static_cast<std::size_t>(parameter)].step;
}

const Settings& Engine::settings() const { return impl_->settings; }
const Plan& Engine::plan() const { return impl_->plan; }
const Partition& Engine::partition() const { return impl_->partition; }
const std::vector<Parameter>& Engine::parameters() const { return impl_->parameters; }
const Allocator& Engine::allocator() const { return impl_->device->allocator(); }
Device& Engine::device() const { return *impl_->device; }

void Engine::weights_changed() { impl_->reset_masters(); }
void Engine::raise_on_all_ranks(const std::string& error) {
  const std::string first = first_error(impl_->groups.data, impl_->groups.model, error);
  if (!first.empty()) throw ArgumentError(first);
}
void Engine::weight_changed(int parameter) { impl_->weight_changed(parameter); }
std::vector<StatePiece> Engine::state_pieces() { return impl_->state_pieces(); }
void Engine::read_piece(const StatePiece& piece, void* host) {
  impl_->device->download(host, piece.bytes.data(), piece.bytes.size());
}
void Engine::write_piece(const StatePiece& piece, const void* host) {
  impl_->device->upload(piece.bytes.data(), host, piece.bytes.size());
  impl_->device->synchronize();
}
StateCounters Engine::counters() const { return impl_->counters(); }
void Engine::restore_counters(const StateCounters& counters) { impl_->restore_counters(counters); }
void Engine::save(const std::string& root) { impl_->save(root); }
void Engine::load(const std::string& root) { impl_->load(root); }
std::vector<OwnState> Engine::own_state(int parameter, StateKind kind) {
  return impl_->own_state(parameter, kind);
}
std::vector<float> Engine::full_state(int parameter, StateKind kind) {
  return impl_->full_state(parameter, kind);
}
void Engine::set_full_state(int parameter, StateKind kind, std::span<const float> values) {
  impl_->set_full_state(parameter, kind, values);
}
void Engine::set_step(int parameter, std::int64_t step) { impl_->set_step(parameter, step); }

}  // namespace zerofp8
