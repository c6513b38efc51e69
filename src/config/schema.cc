// JSON Schema of the config file, made from the key table.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "src/config/json_writer.h"
#include "src/config/keys.h"
#include "zerofp8/config.h"
#include "zerofp8/dtype.h"

namespace zerofp8 {
namespace {

std::vector<double> numbers_in(std::string_view text) {
  std::vector<double> numbers;
  for (std::string_view part : split(text, ',')) {
    while (!part.empty() && (part.front() == ' ' || part.front() == '[')) part.remove_prefix(1);
    double number = 0;
    const auto result = std::from_chars(part.data(), part.data() + part.size(), number);
    if (result.ec == std::errc()) numbers.push_back(number);
  }
  return numbers;
}

// A default that depends on other keys ("by opt_level") only appears in the description.
void write_default(JsonWriter& json, const Key& key) {
  const std::vector<double> numbers = numbers_in(key.standard);
  const auto choices = split(key.limits.choices, '|');
  if (key.type == KeyType::kBool && (key.standard == "true" || key.standard == "false")) {
    json.field("default", key.standard == "true");
  } else if ((key.type == KeyType::kInteger || key.type == KeyType::kNumber) &&
             numbers.size() == 1) {
    json.field("default", numbers[0]);
  } else if (key.type == KeyType::kNumberPair) {
    json.key("default").begin_array();
    for (const double number : numbers) json.value(number);
    json.end_array();
  } else if (std::find(choices.begin(), choices.end(), key.standard) != choices.end()) {
    json.field("default", key.standard);
  }
}

void write_description(JsonWriter& json, const Key& key) {
  std::string text(key.help);
  if (key.role == KeyRole::kTrainer) text = "Read by the trainer. " + text;
  if (key.role == KeyRole::kRefused) text = "Refused: " + text + ".";
  if (key.role == KeyRole::kNoEffect) text = "No effect: " + text + ".";
  if (!key.standard.empty()) text += fmt::format(" Default: {}.", key.standard);
  json.field("description", text);
}

void write_bounds(JsonWriter& json, const Limits& limits) {
  if (std::isfinite(limits.min)) {
    json.field(limits.above_min ? "exclusiveMinimum" : "minimum", limits.min);
  }
  if (std::isfinite(limits.max)) {
    json.field(limits.below_max ? "exclusiveMaximum" : "maximum", limits.max);
  }
}

void write_choices(JsonWriter& json, const Key& key) {
  const auto choices = split(key.limits.choices, '|');
  json.key("enum").begin_array();
  for (const std::string_view choice : choices) json.value(choice);
  if (key.type == KeyType::kDType) {
    if (key.limits.choices.find("fp8") != std::string_view::npos) json.value("fp8");
    for (const std::string_view spelling : dtype_spellings()) {
      const std::string_view name = to_string(*dtype_from_string(spelling));
      if (std::find(choices.begin(), choices.end(), name) != choices.end()) json.value(spelling);
    }
  }
  json.end_array();
}

// The keywords of a value without "auto" and null.
void write_type(JsonWriter& json, const Key& key) {
  switch (key.type) {
    case KeyType::kBool:
      if (key.limits.choices.empty()) {
        json.field("type", "boolean");
      } else {
        json.field("const", key.limits.choices == "true");
      }
      return;
    case KeyType::kInteger:
      json.field("type", "integer");
      if (!key.limits.choices.empty()) {
        json.key("enum").begin_array();
        for (const std::string_view choice : split(key.limits.choices, '|')) {
          json.value(numbers_in(choice).at(0));
        }
        json.end_array();
      }
      return write_bounds(json, key.limits);
    case KeyType::kNumber:
      json.field("type", "number");
      return write_bounds(json, key.limits);
    case KeyType::kString:
      json.field("type", "string");
      return;
    case KeyType::kChoice:
    case KeyType::kDType:
      return write_choices(json, key);
    case KeyType::kNumberPair:
      json.field("type", "array").key("items").begin_object().field("type", "number");
      write_bounds(json, key.limits);
      json.end_object().field("minItems", 2).field("maxItems", 2);
      return;
    case KeyType::kList:
      json.field("type", "array");
      return;
    case KeyType::kObject:
    case KeyType::kAny:
      return;
  }
}

void write_object(JsonWriter& json, const std::string& path);

bool takes_auto(const Key& key) { return key.limits.takes_auto || auto_is_default(key); }

// What a refused key may still say.
void write_nothing(JsonWriter& json) {
  json.key("anyOf").begin_array().begin_object().key("enum").begin_array();
  json.value(false).value(0).null().value("").value("auto").begin_object().end_object();
  json.begin_array().end_array().end_array().end_object();
  json.begin_object().field("type", "object").key("properties").begin_object();
  json.key("enabled").begin_object().field("const", false).end_object().end_object();
  json.key("required").begin_array().value("enabled").end_array().end_object().end_array();
}

void write_alternatives(JsonWriter& json, const Key& key, bool object) {
  json.key("anyOf").begin_array();
  if (key.type != KeyType::kObject) {
    json.begin_object();
    write_type(json, key);
    json.end_object();
  }
  if (object) {
    json.begin_object();
    write_object(json, std::string(key.path));
    json.end_object();
  }
  if (takes_auto(key)) json.begin_object().field("const", "auto").end_object();
  if (key.limits.takes_null) json.begin_object().field("type", "null").end_object();
  json.end_array();
}

void write_member(JsonWriter& json, const std::string& path) {
  const Key* key = find_key(path);
  const bool object = is_container(path);
  json.begin_object();
  if (key) {
    write_description(json, *key);
    write_default(json, *key);
    const bool open = key->type == KeyType::kAny;
    if (key->role == KeyRole::kRefused) {
      write_nothing(json);
    } else if (!open && (object || takes_auto(*key) || key->limits.takes_null)) {
      write_alternatives(json, *key, object);
    } else {
      write_type(json, *key);
    }
  } else {
    write_object(json, path);
  }
  json.end_object();
}

// Direct children of a block in the order of the table, without keys that are always refused.
std::vector<std::string> children(std::string_view path) {
  std::vector<std::string> names;
  for (const Key& key : keys()) {
    const bool never = key.role == KeyRole::kRefused && !key.limits.takes_nothing;
    if (never || !key.path.starts_with(path)) continue;
    if (key.path.size() <= path.size() || key.path[path.size()] != '/') continue;
    const std::string_view rest = key.path.substr(path.size() + 1);
    const std::string name(rest.substr(0, rest.find('/')));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

// "/a/b" -> "#/properties/a/properties/b"
std::string schema_pointer(std::string_view path) {
  std::string pointer = "#";
  for (const std::string_view name : split(path.substr(1), '/')) {
    pointer += fmt::format("/properties/{}", name);
  }
  return pointer;
}

void write_object(JsonWriter& json, const std::string& path) {
  json.field("type", "object").field("additionalProperties", false);
  if (path.empty()) {  // comments
    json.key("patternProperties").begin_object().key("^(_|//)").begin_object();
    json.end_object().end_object();
  }
  json.key("properties").begin_object();
  for (const std::string& name : children(path)) {
    json.key(name);
    write_member(json, path + '/' + name);
  }
  for (const Alias& alias : aliases()) {
    if (alias.alias.substr(0, alias.alias.rfind('/')) != path) continue;
    json.key(alias.alias.substr(path.size() + 1)).begin_object();
    json.field("$ref", schema_pointer(alias.name)).end_object();
  }
  json.end_object();
}

}  // namespace

std::string config_schema() {
  JsonWriter json;
  json.begin_object();
  json.field("$schema", "https://json-schema.org/draft/2020-12/schema");
  json.field("title", "zerofp8 config (a DeepSpeed config with zerofp8's keys)");
  write_object(json, "");
  json.end_object();
  return json.text() + "\n";
}

}  // namespace zerofp8
