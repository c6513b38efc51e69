// Static or dynamic loss scale with DeepSpeed's keys and one sequence for every stage and
// accumulator: an overflow first uses up the hysteresis, then halves the scale down to its floor;
// `window` clean steps in a row double it.
#pragma once

#include <cstdint>

#include "zerofp8/config.h"

namespace zerofp8 {

class LossScaler {
 public:
  struct State {
    double scale = 1.0;
    std::int64_t clean_steps = 0;  // since the last overflow or growth
    int hysteresis_left = 1;       // overflows until the scale is halved
  };

  LossScaler() = default;
  explicit LossScaler(const LossScaleOptions& options)
      : options_(options), state_{options.enabled ? options.initial : 1.0, 0, options.hysteresis} {}

  double scale() const { return state_.scale; }
  // True when an overflow now could not be answered by a smaller scale.
  bool at_floor() const {
    return options_.dynamic && state_.hysteresis_left <= 1 && state_.scale <= options_.min_scale;
  }
  void update(bool overflow);

  const State& state() const { return state_; }
  // A static scale stays what the config says.
  void restore(const State& state);

 private:
  LossScaleOptions options_;
  State state_;
};

}  // namespace zerofp8
