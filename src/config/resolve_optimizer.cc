// Adam's hyper-parameters and the loss scale.
#include <fmt/format.h>

#include <cmath>

#include "src/config/reader.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// A number, or the argument's value where the file says "auto".
double number_or_auto(const Reader& read, std::string_view path,
                      const std::optional<AdamOptions>& supplied, double AdamOptions::*field) {
  if (!read.is_auto(path) || !supplied) return read.number(path);
  return (*supplied).*field;
}

void resolve_betas(const Reader& read, const std::optional<AdamOptions>& supplied,
                   AdamOptions& adam) {
  constexpr std::string_view kPath = "/optimizer/params/betas";
  if (read.is_auto(kPath) && supplied) {
    adam.beta1 = supplied->beta1;
    adam.beta2 = supplied->beta2;
  } else if (const Value* betas = read.find(kPath)) {
    adam.beta1 = std::get<std::vector<double>>(betas->data)[0];
    adam.beta2 = std::get<std::vector<double>>(betas->data)[1];
  }
}

// DeepSpeed runs decoupled decay for a bare "Adam". Here a bare "Adam" is Adam, and a warning says
// so where the two differ.
Algorithm resolve_algorithm(const Reader& read, double weight_decay,
                            std::vector<std::string>& warnings) {
  const Value* type = read.find("/optimizer/type");
  const Value* mode = read.find("/optimizer/params/adam_w_mode");
  const bool adam = type && std::get<std::string>(type->data) == "Adam";
  if (mode) {
    const bool decoupled = std::get<bool>(mode->data);
    if (type && !adam && !decoupled) {
      throw ConfigError(type->pointer, type->text + ", but " + mode->pointer + " says false",
                        "\"AdamW\" with decoupled decay, or \"Adam\" with L2 decay",
                        "write \"Adam\" for L2 decay, or remove adam_w_mode");
    }
    return decoupled ? Algorithm::kAdamW : Algorithm::kAdam;
  }
  if (adam && weight_decay > 0) {
    warnings.push_back(
        "/optimizer/type: \"Adam\" adds weight decay to the gradient (L2), as torch does; "
        "DeepSpeed's \"Adam\" decays weights directly: write \"AdamW\" for that");
  }
  return adam ? Algorithm::kAdam : Algorithm::kAdamW;
}

}  // namespace

Setting<AdamOptions> resolve_adam(const Reader& read, const Arguments& arguments,
                                  std::vector<std::string>& warnings) {
  const std::optional<AdamOptions>& supplied = arguments.auto_adam;
  AdamOptions adam;
  adam.lr = number_or_auto(read, "/optimizer/params/lr", supplied, &AdamOptions::lr);
  adam.eps = number_or_auto(read, "/optimizer/params/eps", supplied, &AdamOptions::eps);
  adam.weight_decay =
      number_or_auto(read, "/optimizer/params/weight_decay", supplied, &AdamOptions::weight_decay);
  resolve_betas(read, supplied, adam);
  adam.algorithm = resolve_algorithm(read, adam.weight_decay, warnings);
  for (const auto& [path, value] : read.written().values) {
    if (path.starts_with("/optimizer")) return {adam, Origin::kKey, "/optimizer"};
  }
  return {adam, Origin::kDefault, ""};
}

Setting<LossScaleOptions> resolve_loss_scale(const Reader& read, bool enabled) {
  LossScaleOptions options;
  if (!enabled) return {options, Origin::kDefault, "fp16 only"};
  const Setting<double> scale = read.number("/fp16/loss_scale");
  options.enabled = true;
  options.dynamic = scale == 0.0;
  options.initial = scale;
  if (options.dynamic)
    options.initial = std::ldexp(1.0, read.integer<int>("/fp16/initial_scale_power"));
  options.window = read.integer<std::int64_t>("/fp16/loss_scale_window");
  options.hysteresis = read.integer<int>("/fp16/hysteresis");
  options.consecutive_hysteresis = read.boolean("/fp16/consecutive_hysteresis");
  options.min_scale = read.number("/fp16/min_loss_scale");
  return {options, scale.origin, scale.where};
}

}  // namespace zerofp8
