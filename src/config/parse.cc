// JSON text -> Config. The only file of the library that sees nlohmann/json, and only its lexer:
// the usual document type would silently keep the last of two equal keys.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "src/config/config_impl.h"
#include "src/config/json_change.h"
#include "src/config/mistakes.h"
#include "src/config/non_finite.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using Json = nlohmann::json;

// Configs are a few levels deep. Deeper text is refused, since later passes are recursive.
constexpr std::size_t kMaxDepth = 32;

class TreeBuilder final : public nlohmann::json_sax<Json> {
 public:
  TreeBuilder(const std::string& source, const FiniteText& text) : source_(source), text_(text) {}
  JsonNode take() { return std::move(root_); }

  bool null() override { return add({}); }
  bool boolean(bool value) override {
    return add({.kind = JsonNode::Kind::kBool, .boolean = value});
  }
  bool number_integer(number_integer_t value) override { return add_integer(value); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) {
      return number_float(static_cast<double>(value), fmt::to_string(value));
    }
    return add_integer(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    return add({.kind = JsonNode::Kind::kNumber, .number = value, .text = text});
  }
  bool string(string_t& value) override {
    const auto number = text_.numbers.find(strings_++);
    if (number != text_.numbers.end()) return add_non_finite(number->second);
    return add({.kind = JsonNode::Kind::kString, .text = value});
  }
  bool binary(binary_t&) override { return false; }  // not in JSON text
  bool start_object(std::size_t) override { return open(JsonNode::Kind::kObject); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(JsonNode::Kind::kArray); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    Level& level = levels_.back();
    if (text_.numbers.contains(strings_++)) {
      throw ConfigError(pointer(), "a number in the place of a key's name", "a quoted name",
                        "correct the text there");
    }
    level.key = name;
    if (!level.seen.insert(name).second) {
      throw ConfigError(pointer(), "this key twice", "each key once in its object",
                        "remove one of the two");
    }
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const Json::exception& error) override {
    std::string what = error.what();
    const std::size_t bracket = what.find("] ");  // "[json.exception.parse_error.101] parse ..."
    if (bracket != std::string::npos) what.erase(0, bracket + 2);
    throw ConfigError(source_, what, "JSON, with // and /* */ comments", "correct the text there");
  }

 private:
  struct Level {
    JsonNode node;
    std::string key;  // of the member that is being read
    std::set<std::string> seen;
  };

  std::string pointer() const {
    std::string path;
    for (const Level& level : levels_) {
      const bool is_array = level.node.kind == JsonNode::Kind::kArray;
      path += '/' + (is_array ? fmt::to_string(level.node.items.size()) : escaped_name(level.key));
    }
    return path;
  }
  bool add_integer(std::int64_t value) {
    return add({.kind = JsonNode::Kind::kInteger,
                .integer = value,
                .number = static_cast<double>(value),
                .text = fmt::to_string(value)});
  }
  bool add_non_finite(double value) {
    const std::string_view name = std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
    return add({.kind = JsonNode::Kind::kNumber, .number = value, .text = std::string(name)});
  }
  bool open(JsonNode::Kind kind) {
    if (levels_.size() >= kMaxDepth) {
      throw ConfigError(pointer(), "more than 32 nested levels", "at most 32", "nest less deeply");
    }
    levels_.push_back({{.kind = kind}, "", {}});
    return true;
  }
  bool close() {
    JsonNode node = std::move(levels_.back().node);
    levels_.pop_back();
    return add(std::move(node));
  }
  bool add(JsonNode node) {
    if (levels_.empty()) {
      root_ = std::move(node);
    } else if (levels_.back().node.kind == JsonNode::Kind::kArray) {
      levels_.back().node.items.push_back(std::move(node));
    } else {
      levels_.back().node.members.emplace_back(levels_.back().key, std::move(node));
    }
    return true;
  }

  const std::string& source_;
  const FiniteText& text_;
  std::size_t strings_ = 0;  // that were read
  std::vector<Level> levels_;
  JsonNode root_;
};

// What is wrong beside the values that were refused, as far as it does not depend on the ranks.
void add_mistakes_between_keys(const Config& config, Mistakes& mistakes) {
  constexpr std::string_view kOfRanks[] = {"batch", "gradient_accumulation_steps", "group_size",
                                           "partition_size", "two_level_reduce_scatter"};
  try {
    resolve(config, {}, {.assume_auto = true});
  } catch (const ConfigError& error) {
    for (const std::string_view text : split(error.what(), '\n')) {
      const std::string_view pointer = text.substr(0, text.find(':'));
      const bool of_ranks = std::any_of(
          std::begin(kOfRanks), std::end(kOfRanks),
          [&](std::string_view word) { return pointer.find(word) != std::string_view::npos; });
      if (!of_ranks) mistakes.add_text(std::string(text));
    }
  }
}

JsonNode tree_of(const std::string& text, const std::string& source) {
  const FiniteText finite = without_non_finite(text);
  TreeBuilder builder(source, finite);
  Json::sax_parse(finite.text, &builder, nlohmann::detail::input_format_t::json, /*strict=*/true,
                  /*ignore_comments=*/true);
  return builder.take();
}

// "/path=value" with a JSON value; what is no JSON is a string, so that shells need no quotes.
void apply(const std::string& change, JsonNode& root) {
  const std::size_t equals = change.find('=');
  if (equals == std::string::npos) {
    throw ConfigError("--set", change, "/path=value", "add the value");
  }
  const std::string text = change.substr(equals + 1);
  JsonNode value{.kind = JsonNode::Kind::kString, .text = text};
  try {
    value = tree_of(text, "--set");
  } catch (const ConfigError&) {
    // a bare word
  }
  set_at(root, change.substr(0, equals), std::move(value));
}

}  // namespace

Config Config::parse(const std::string& text, const std::string& source,
                     const std::vector<std::string>& changes) {
  JsonNode root = tree_of(text, source);
  for (const std::string& change : changes) apply(change, root);
  auto impl = std::make_shared<Impl>();
  impl->source = source;
  impl->canonical = canonical_text(root);
  Mistakes mistakes;
  check_document(root, *impl, mistakes);
  Config config;
  config.impl_ = std::move(impl);
  if (mistakes.any()) add_mistakes_between_keys(config, mistakes);
  mistakes.raise();
  return config;
}

Config Config::from_file(const std::string& path, const std::vector<std::string>& changes) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  // Reading a directory or an unreadable file fails here too; an empty file fails in the parser.
  if (!file || file.peek() == std::ifstream::traits_type::eof() || !(text << file.rdbuf())) {
    throw ConfigError(path, "a file that is empty or cannot be read", "a JSON config file",
                      "check the path");
  }
  return parse(text.str(), path, changes);
}

std::string Config::canonical() const { return impl_->canonical; }
const std::string& Config::source() const { return impl_->source; }

}  // namespace zerofp8
