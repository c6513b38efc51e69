#include "src/config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace zerofp8 {
namespace {

constexpr std::string_view kDTypeSpellings[] = {
    "float32", "float",          "torch.float32", "torch.float",   "bfloat16",
    "float16", "torch.bfloat16", "half",          "torch.float16", "torch.half",
};

// As DeepSpeed spells, and used to spell, them.
constexpr Alias kAliases[] = {
    {"/bfloat16", "/bf16"},
    {"/zero_optimization/prefetch_bucket_size", "/zero_optimization/stage3_prefetch_bucket_size"},
    {"/zero_optimization/param_persistence_threshold",
     "/zero_optimization/stage3_param_persistence_threshold"},
    {"/zero_optimization/model_persistence_threshold",
     "/zero_optimization/stage3_model_persistence_threshold"},
    {"/zero_optimization/max_live_parameters", "/zero_optimization/stage3_max_live_parameters"},
    {"/zero_optimization/max_reuse_distance", "/zero_optimization/stage3_max_reuse_distance"},
    {"/zero_optimization/gather_16bit_weights_on_model_save",
     "/zero_optimization/stage3_gather_16bit_weights_on_model_save"},
    {"/zero_optimization/stage3_gather_fp16_weights_on_model_save",
     "/zero_optimization/stage3_gather_16bit_weights_on_model_save"},
    {"/zero_optimization/module_granularity_threshold",
     "/zero_optimization/stage3_module_granularity_threshold"},
    {"/zero_optimization/use_all_reduce_for_fetch_params",
     "/zero_optimization/stage3_use_all_reduce_for_fetch_params"},
    {"/zero_optimization/allgather_sequential", "/zero_optimization/stage3_allgather_sequential"},
};

std::string choices_text(const Key& key) {
  std::string text;
  bool has_fp8 = false;
  for (const std::string_view choice : split(key.limits.choices, '|')) {
    if (key.type == KeyType::kDType && choice.starts_with("fp8") && !has_fp8) {
      has_fp8 = true;
      text += fmt::format("{}\"fp8\"", text.empty() ? "" : ", ");
    }
    const bool quoted = key.type == KeyType::kChoice || key.type == KeyType::kDType;
    text += fmt::format("{}{}{}{}", text.empty() ? "" : ", ", quoted ? "\"" : "", choice,
                        quoted ? "\"" : "");
  }
  return text;
}

std::string range_text(const Limits& limits) {
  std::string text;
  if (limits.min == limits.max) return fmt::format(" equal to {}", limits.min);
  if (std::isfinite(limits.min)) {
    text += fmt::format(" {} {}", limits.above_min ? ">" : ">=", limits.min);
  }
  if (std::isfinite(limits.max)) {
    text += fmt::format("{} {} {}", text.empty() ? "" : " and",
                        limits.below_max ? "<" : "<=", limits.max);
  }
  return text;
}

std::string type_text(const Key& key) {
  switch (key.type) {
    case KeyType::kBool:
      if (!key.limits.choices.empty()) return fmt::format("only {}", key.limits.choices);
      return "true or false, without quotes";
    case KeyType::kInteger:
      if (!key.limits.choices.empty()) return "one of " + choices_text(key);
      return fmt::format("a whole number{}, without quotes", range_text(key.limits));
    case KeyType::kNumber:
      return fmt::format("a number{}, without quotes", range_text(key.limits));
    case KeyType::kNumberPair:
      return fmt::format("two numbers [a, b], each{}", range_text(key.limits));
    case KeyType::kChoice:
    case KeyType::kDType:
      return "one of " + choices_text(key);
    case KeyType::kString:
      return "a string";
    case KeyType::kList:
      return "a list [...]";
    case KeyType::kObject:
      return "an object {...}";
    case KeyType::kAny:
      return "anything";
  }
  return "";
}

}  // namespace

const Key* find_key(std::string_view path) {
  for (const Key& key : keys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

bool is_container(std::string_view path) {
  for (const Key& key : keys()) {
    if (key.path.size() > path.size() && key.path.starts_with(path) &&
        key.path[path.size()] == '/') {
      return true;
    }
  }
  return false;
}

std::string canonical_path(std::string_view path) {
  for (const Alias& alias : kAliases) {
    const bool inside = path.size() > alias.alias.size() && path[alias.alias.size()] == '/';
    if (path.starts_with(alias.alias) && (inside || path == alias.alias)) {
      return std::string(alias.name) + std::string(path.substr(alias.alias.size()));
    }
  }
  return std::string(path);
}

bool auto_is_default(const Key& key) {
  constexpr std::string_view kBlocks[] = {"/bf16/", "/fp16/", "/zero_optimization/"};
  if (key.limits.takes_auto || key.type == KeyType::kAny || key.type == KeyType::kObject) {
    return false;
  }
  return std::any_of(std::begin(kBlocks), std::end(kBlocks),
                     [&](std::string_view block) { return key.path.starts_with(block); });
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return parts;
}

std::string allowed_text(const Key& key) {
  std::string text = type_text(key);
  if (is_container(key.path) && key.type != KeyType::kObject) {
    text += ", or an object with these keys:";
    for (const Key& child : keys()) {
      if (child.path.size() > key.path.size() && child.path.starts_with(key.path) &&
          child.path[key.path.size()] == '/') {
        text += fmt::format(" {}", child.path.substr(key.path.size() + 1));
      }
    }
  }
  if (key.limits.takes_null) text += ", or null";
  if (key.limits.takes_auto) text += ", or \"auto\" where the caller supplies the value";
  if (auto_is_default(key)) text += ", or \"auto\" for the default";
  return text;
}

std::span<const Alias> aliases() { return kAliases; }
std::span<const std::string_view> dtype_spellings() { return kDTypeSpellings; }

}  // namespace zerofp8
