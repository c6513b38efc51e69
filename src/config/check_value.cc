// One value against its row: type, bounds and choices.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/config/config_impl.h"

namespace zerofp8 {
namespace {

using Kind = JsonNode::Kind;

bool in_range(const Limits& limits, double value) {
  const bool low = limits.above_min ? value > limits.min : value >= limits.min;
  const bool high = limits.below_max ? value < limits.max : value <= limits.max;
  return low && high;  // false for NaN
}

bool is_choice(const Key& key, std::string_view text) {
  if (key.limits.choices.empty()) return true;
  const auto choices = split(key.limits.choices, '|');
  const auto has = [&](std::string_view name) {
    return std::find(choices.begin(), choices.end(), name) != choices.end();
  };
  if (key.type != KeyType::kDType) return has(text);
  // "fp8" alone leaves the choice of the format to resolve().
  if (text == "fp8") {
    return std::any_of(choices.begin(), choices.end(),
                       [](std::string_view name) { return name.starts_with("fp8"); });
  }
  const auto dtype = dtype_from_string(text);
  return dtype && has(to_string(*dtype));
}

bool read_number(const Key& key, const JsonNode& node, double* out) {
  if (node.kind != Kind::kInteger && node.kind != Kind::kNumber) return false;
  *out = node.number;
  return std::isfinite(node.number) && in_range(key.limits, node.number);
}

// 5e8 is a whole number, 15099494.4 is not.
bool read_integer(const Key& key, const JsonNode& node, std::int64_t* out) {
  double number = 0;
  if (!read_number(key, node, &number)) return false;
  if (node.kind == Kind::kInteger) {
    *out = node.integer;
  } else {
    if (number != std::floor(number) || std::fabs(number) > 0x1p53) return false;
    *out = static_cast<std::int64_t>(number);
  }
  return is_choice(key, fmt::to_string(*out));
}

// Names of formats and optimizers in any case, as DeepSpeed takes them; the row's spelling is kept.
bool read_text(const Key& key, const JsonNode& node, std::string* out) {
  if (node.kind != Kind::kString) return false;
  *out = node.text;
  const auto lower = [](std::string text) {
    for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    return text;
  };
  for (const std::string_view choice : split(key.limits.choices, '|')) {
    if (lower(node.text) == lower(std::string(choice))) *out = choice;
  }
  if (key.type == KeyType::kDType) *out = lower(node.text);
  return is_choice(key, *out);
}

bool read_pair(const Key& key, const JsonNode& node, std::vector<double>* out) {
  if (node.kind != Kind::kArray || node.items.size() != 2) return false;
  out->resize(2);
  return read_number(key, node.items[0], &(*out)[0]) && read_number(key, node.items[1], &(*out)[1]);
}

}  // namespace

bool read_value(const Key& key, const JsonNode& node, Value* value) {
  if (key.limits.takes_auto && node.kind == Kind::kString && node.text == "auto") {
    value->data = Auto{};
    return true;
  }
  switch (key.type) {
    case KeyType::kBool:
      value->data = node.boolean;
      return node.kind == Kind::kBool && is_choice(key, node.boolean ? "true" : "false");
    case KeyType::kInteger:
      return read_integer(key, node, &value->data.emplace<std::int64_t>());
    case KeyType::kNumber:
      return read_number(key, node, &value->data.emplace<double>());
    case KeyType::kString:
    case KeyType::kChoice:
    case KeyType::kDType:
      return read_text(key, node, &value->data.emplace<std::string>());
    case KeyType::kNumberPair:
      return read_pair(key, node, &value->data.emplace<std::vector<double>>());
    case KeyType::kList:
      value->data = static_cast<std::int64_t>(node.items.size());
      return node.kind == Kind::kArray;
    case KeyType::kObject:
      return false;  // objects were handled before
    case KeyType::kAny:
      return true;
  }
  return false;
}

}  // namespace zerofp8
