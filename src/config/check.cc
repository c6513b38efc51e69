// Every key of the document against its row of the key table.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/config/config_impl.h"
#include "src/config/json_writer.h"
#include "src/config/nearest.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using Kind = JsonNode::Kind;

void write(JsonWriter& json, const JsonNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      json.null();
      return;
    case Kind::kBool:
      json.value(node.boolean);
      return;
    case Kind::kInteger:
      json.value(node.integer);
      return;
    case Kind::kNumber:
      json.value(node.number);
      return;
    case Kind::kString:
      json.value(node.text);
      return;
    case Kind::kArray:
      json.begin_array();
      for (const JsonNode& item : node.items) write(json, item);
      json.end_array();
      return;
    case Kind::kObject:
      break;
  }
  std::vector<const std::pair<std::string, JsonNode>*> members;
  for (const auto& member : node.members) members.push_back(&member);
  std::sort(members.begin(), members.end(),
            [](const auto* a, const auto* b) { return a->first < b->first; });
  json.begin_object();
  for (const auto* member : members) {
    json.key(member->first);
    write(json, member->second);
  }
  json.end_object();
}

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
  return in_range(key.limits, node.number);
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

// False if the value does not fit the row.
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

class Checker {
 public:
  explicit Checker(Config::Impl& impl) : impl_(impl) {}

  void object(const std::string& path, const JsonNode& node) {
    for (const auto& [name, child] : node.members) {
      check_name(path, name, child);
      member(path + '/' + name, child);
    }
  }

 private:
  // A '/' in a name would make "a/b" look like the path of a known key.
  void check_name(const std::string& path, const std::string& name, const JsonNode& node) {
    if (name.find('/') == std::string::npos && name.find('~') == std::string::npos) return;
    unknown(path + '/' + escaped_name(name), path, node);
  }

  [[noreturn]] void unknown(const std::string& path, const std::string& parent,
                            const JsonNode& node) {
    throw ConfigError(path, shown(node) + ", but there is no such key",
                      "the keys of " + (parent.empty() ? std::string("the reference") : parent),
                      "the nearest known key is " + nearest_key(path));
  }

  void member(const std::string& path, const JsonNode& node) {
    const std::string canonical = canonical_path(path);
    const Key* key = find_key(canonical);
    const bool container = is_container(canonical);
    if (!key && !container) unknown(path, path.substr(0, path.rfind('/')), node);
    if (key && key->limits.takes_null && node.kind == Kind::kNull) return;
    if (container && node.kind == Kind::kObject) return object(path, node);
    if (!key) {
      throw ConfigError(
          path, shown(node), "an object {...}",
          "write its keys inside braces: \"" + path.substr(path.rfind('/') + 1) + "\": {...}");
    }
    value(*key, path, node);
  }

  void value(const Key& key, const std::string& path, const JsonNode& node) {
    if (key.role == KeyRole::kRefused) {
      throw ConfigError(path, shown(node), "nothing", std::string(key.help));
    }
    Value value{.data = Auto{}, .pointer = path, .text = shown(node)};
    if (!read_value(key, node, &value)) {
      throw ConfigError(path, shown(node), allowed_text(key), fix_of(key, node));
    }
    if (key.role == KeyRole::kNoEffect) impl_.no_effect.push_back(path);
    if (key.role != KeyRole::kOurs) return;
    const auto [other, is_new] = impl_.values.emplace(key.path, value);
    if (!is_new && other->second.text != value.text) {
      throw ConfigError(
          path, value.text + ", but " + other->second.pointer + " says " + other->second.text,
          "one of the two", "remove one of them");
    }
  }

  static std::string fix_of(const Key& key, const JsonNode& node) {
    const bool quoted = node.kind == Kind::kString;
    std::string fix = "change the value";
    if (quoted && node.text == "auto") {
      fix = "write the value itself, nothing supplies an \"auto\" for this key";
    } else if (quoted && (key.type == KeyType::kBool || key.type == KeyType::kInteger ||
                          key.type == KeyType::kNumber)) {
      fix = "write the value without quotes";
    } else if (node.kind == Kind::kNull) {
      fix = "leave the key out for the default";
    }
    return fmt::format("{} (the key says: {})", fix, key.help);
  }

  Config::Impl& impl_;
};

}  // namespace

std::string escaped_name(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += c;
    }
  }
  return out;
}

std::string canonical_text(const JsonNode& root) {
  JsonWriter json;
  write(json, root);
  return json.text();
}

std::string shown(const JsonNode& node) {
  if (node.kind == Kind::kInteger || node.kind == Kind::kNumber) return node.text;
  JsonWriter json;
  write(json, node);
  std::string text;
  bool line_begins = false;
  for (const char c : json.text()) {  // on one line, without the indentation
    line_begins = c == '\n' || (line_begins && c == ' ');
    if (!line_begins) text += c;
  }
  constexpr std::size_t kLongest = 60;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

void check_document(const JsonNode& root, Config::Impl& impl) {
  if (root.kind != Kind::kObject) {
    throw ConfigError(impl.source, shown(root), "an object {...}", "wrap the keys in braces");
  }
  Checker(impl).object("", root);
}

}  // namespace zerofp8
