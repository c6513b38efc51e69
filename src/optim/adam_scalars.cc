#include "src/optim/adam_scalars.h"

#include <fmt/format.h>

#include <limits>

namespace zerofp8 {

std::string fault_of(const AdamOptions& o) {
  const auto fails = [](const char* name, double given, const char* allowed) {
    return fmt::format("{}: given {}; allowed: {}; set it to one of these before the step", name,
                       given, allowed);
  };
  // As FP32 numbers, which the kernels take; NaN fails every comparison.
  const auto lr = static_cast<float>(o.lr), decay = static_cast<float>(o.weight_decay);
  const auto eps = static_cast<float>(o.eps);
  const float largest = std::numeric_limits<float>::max();
  if (!(lr >= 0 && lr <= largest)) return fails("lr", o.lr, "0 to 3.4e38");
  if (!(decay >= 0 && decay <= largest))
    return fails("weight_decay", o.weight_decay, "0 to 3.4e38");
  if (!(eps > 0 && eps <= largest)) return fails("eps", o.eps, "1.2e-38 to 3.4e38");
  for (const double beta : {o.beta1, o.beta2}) {
    if (!(beta >= 0 && beta < 1)) return fails("betas", beta, "from 0 up to, not including, 1");
  }
  return "";
}

std::string text_of(const std::vector<AdamOptions>& groups) {
  std::string text;
  for (const AdamOptions& h : groups) {
    text += fmt::format("; {} lr {} betas {} {} eps {} weight decay {}", to_string(h.algorithm),
                        h.lr, h.beta1, h.beta2, h.eps, h.weight_decay);
  }
  return text;
}

Rounding exp_avg_rounding(Storage storage, double beta1) {
  // Above this beta1, a moment that is rounded to nearest stalls (docs/numerics.md, "First
  // moment").
  if (storage == Storage::kFp32) return Rounding::kNearest;
  return beta1 > 0.93 ? Rounding::kStochastic : Rounding::kMixed;
}

}  // namespace zerofp8
