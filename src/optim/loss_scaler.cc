#include "src/optim/loss_scaler.h"

#include <algorithm>

namespace zerofp8 {
namespace {

constexpr double kLargest = 0x1p126;  // as /fp16/initial_scale_power allows; FP32 holds its inverse

}  // namespace

void LossScaler::restore(const State& state) {
  if (!options_.dynamic) return;
  state_ = state;
  state_.scale = std::clamp(state.scale, std::min(options_.min_scale, kLargest), kLargest);
}

void LossScaler::update(bool overflow) {
  if (!options_.dynamic) return;
  if (overflow) {
    state_.clean_steps = 0;
    if (state_.hysteresis_left > 1) {
      --state_.hysteresis_left;
    } else {
      state_.scale = std::max(state_.scale / 2, options_.min_scale);
    }
    return;
  }
  if (options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
  if (++state_.clean_steps >= options_.window) {
    state_.clean_steps = 0;
    state_.scale = std::min(state_.scale * 2, kLargest);
    state_.hysteresis_left = options_.hysteresis;
  }
}

}  // namespace zerofp8
