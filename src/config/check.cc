// Every key of the document against its row of the key table.
#include <fmt/format.h>

#include "src/config/config_impl.h"
#include "src/config/foreign_keys.h"
#include "src/config/mistakes.h"
#include "src/config/nearest.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

using Kind = JsonNode::Kind;

constexpr std::string_view kOptimizer = "/optimizer/type";

const JsonNode* member_of(const JsonNode& node, std::string_view name) {
  for (const auto& [key, child] : node.members) {
    if (key == name) return &child;
  }
  return nullptr;
}

bool is_text(const JsonNode& node, std::string_view text) {
  return node.kind == Kind::kString && node.text == text;
}

// Values of a refused key that ask for nothing.
bool asks_for_nothing(const JsonNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      return true;
    case Kind::kBool:
      return !node.boolean;
    case Kind::kInteger:
    case Kind::kNumber:
      return node.number == 0;
    case Kind::kString:
      return node.text.empty() || node.text == "auto";
    case Kind::kArray:
      return node.items.empty();
    case Kind::kObject:
      break;
  }
  const JsonNode* enabled = member_of(node, "enabled");
  return node.members.empty() || (enabled != nullptr && asks_for_nothing(*enabled));
}

bool names_other_optimizer(const JsonNode& root) {
  const JsonNode* optimizer = member_of(root, "optimizer");
  const JsonNode* type = optimizer == nullptr ? nullptr : member_of(*optimizer, "type");
  if (type == nullptr || type->kind != Kind::kString) return false;
  const std::string name = lower_case(type->text);
  return name != "adam" && name != "adamw";
}

class Checker {
 public:
  Checker(Config::Impl& impl, Mistakes& mistakes, bool has_other_optimizer)
      : impl_(impl), mistakes_(mistakes), has_other_optimizer_(has_other_optimizer) {}

  void object(const std::string& path, const JsonNode& node) {
    for (const auto& [name, child] : node.members) {
      if (is_comment(path, name)) continue;
      mistakes_.of([&] {
        check_name(path, name, child);
        member(path + '/' + name, child);
      });
    }
  }

 private:
  // A '/' in a name would make "a/b" look like the path of a known key.
  void check_name(const std::string& path, const std::string& name, const JsonNode& node) {
    if (name.find('/') == std::string::npos && name.find('~') == std::string::npos) return;
    unknown(path + '/' + escaped_name(name), path, node);
  }

  void unknown(const std::string& path, const std::string& parent, const JsonNode& node) {
    if (is_of_other_optimizer(path)) return;
    if (parent.empty() && !seems_meant(path)) {
      impl_.unknown.push_back(path);
      return;
    }
    const std::string nearest = nearest_key(path);
    const std::string remove = is_comment(parent, "_")
                                   ? "remove it; comments have names that begin with \"_\""
                                   : "remove it";
    throw ConfigError(path, shown(node) + ", but there is no such key",
                      "the keys of " + (parent.empty() ? std::string("the reference") : parent),
                      nearest.empty() ? remove : "the nearest known key is " + nearest);
  }

  bool is_of_other_optimizer(const std::string& path) const {
    return has_other_optimizer_ && path.starts_with("/optimizer/params/");
  }

  // "zero_optimization": true was stage 1 once, and DeepSpeed still takes it.
  void obsolete_stage(const std::string& path, const JsonNode& node) {
    const Key& stage = *find_key(kStage);
    impl_.values.emplace(
        stage.path,
        Value{.data = std::int64_t{node.boolean}, .pointer = path, .text = shown(node)});
  }

  void member(const std::string& path, const JsonNode& node) {
    const std::string canonical = canonical_path(path);
    const Key* key = find_key(canonical);
    const bool container = is_container(canonical);
    if (!key && !container) return unknown(path, path.substr(0, path.rfind('/')), node);
    if (canonical == kZero && node.kind == Kind::kBool) return obsolete_stage(path, node);
    if (key && key->limits.takes_null && node.kind == Kind::kNull) return;
    const bool optional_block = key && key->type == KeyType::kObject && key->limits.takes_null;
    if (optional_block && is_text(node, "auto")) return;
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
      if (key.limits.takes_nothing && asks_for_nothing(node)) return;
      if (is_of_other_optimizer(path)) return;
      throw ConfigError(path, shown(node), "nothing", std::string(key.help));
    }
    if (is_text(node, "auto") && auto_is_default(key)) {
      const std::string_view standard = key.standard.empty() ? "none" : key.standard;
      impl_.assumed.push_back(fmt::format("{} {}", path, standard));
      return;
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

  static bool is_one_bit(const std::string& name) {
    return name.starts_with("onebit") || name.starts_with("zeroone");
  }

  static std::string fix_of(const Key& key, const JsonNode& node) {
    const bool quoted = node.kind == Kind::kString;
    std::string fix = "change the value";
    if (key.path == kOptimizer && quoted && is_one_bit(lower_case(node.text))) {
      return "write \"AdamW\"; compressed gradients are /zerofp8/gradient_communication_dtype: "
             "\"fp8\"";
    }
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

  static constexpr std::string_view kZero = "/zero_optimization";
  static constexpr std::string_view kStage = "/zero_optimization/stage";

  Config::Impl& impl_;
  Mistakes& mistakes_;
  const bool has_other_optimizer_;  // whose parameters are not worth a line each
};

}  // namespace

void check_document(const JsonNode& root, Config::Impl& impl, Mistakes& mistakes) {
  if (root.kind != Kind::kObject) {
    throw ConfigError(impl.source, shown(root), "an object {...}", "wrap the keys in braces");
  }
  Checker(impl, mistakes, names_other_optimizer(root)).object("", root);
}

}  // namespace zerofp8
