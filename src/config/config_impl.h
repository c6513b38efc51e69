// What a Config holds: the checked values of the keys that were written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/config/json_node.h"
#include "src/config/keys.h"
#include "zerofp8/config.h"

namespace zerofp8 {

struct Auto {  // "auto"
  bool operator==(const Auto&) const = default;
};

struct Value {
  // Type and bounds of the key's row hold. Lists only keep their length.
  std::variant<Auto, bool, std::int64_t, double, std::string, std::vector<double>> data;
  std::string pointer;  // as written (an alias, perhaps)
  std::string text;     // as written, for messages
  bool is_auto() const { return std::holds_alternative<Auto>(data); }
};

struct Config::Impl {
  std::string source;
  std::string canonical;
  std::map<std::string, Value, std::less<>> values;  // by canonical path; only keys of role kOurs
  std::vector<std::string> no_effect;                // pointers of keys of role kNoEffect
  std::vector<std::string> unknown;                  // pointers of other programs' keys
  std::vector<std::string> assumed;                  // "auto" where DeepSpeed takes the default
  const Value* find(std::string_view path) const {
    const auto found = values.find(path);
    return found == values.end() ? nullptr : &found->second;
  }
};

class Mistakes;
// Checks every key of a parsed document against the key table.
void check_document(const JsonNode& root, Config::Impl& impl, Mistakes& mistakes);
// Sets value->data; false if the node does not fit the row.
bool read_value(const Key& key, const JsonNode& node, Value* value);
// A value as it may be shown in a message: JSON text, cut after 60 characters.
std::string shown(const JsonNode& node);
// A member's name as a part of a JSON pointer (RFC 6901).
std::string escaped_name(std::string_view name);
// The document with sorted keys, one per line, and numbers in one spelling.
std::string canonical_text(const JsonNode& root);

}  // namespace zerofp8
