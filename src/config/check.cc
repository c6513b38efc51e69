// Every key of the document against its row of the key table.
#include <fmt/format.h>

#include "src/config/config_impl.h"
#include "src/config/nearest.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using Kind = JsonNode::Kind;

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

void check_document(const JsonNode& root, Config::Impl& impl) {
  if (root.kind != Kind::kObject) {
    throw ConfigError(impl.source, shown(root), "an object {...}", "wrap the keys in braces");
  }
  Checker(impl).object("", root);
}

}  // namespace zerofp8
