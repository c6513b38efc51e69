#include "src/config/json_change.h"

#include <algorithm>
#include <string>
#include <utility>

#include "src/config/config_impl.h"
#include "src/config/keys.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

// "a~1b" -> "a/b" (RFC 6901)
std::string unescaped_name(std::string_view name) {
  std::string out;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool escaped = name[i] == '~' && i + 1 < name.size();
    if (!escaped) {
      out += name[i];
    } else {
      out += name[++i] == '1' ? '/' : '~';
    }
  }
  return out;
}

JsonNode& child_of(JsonNode& node, const std::string& name) {
  const auto found = std::find_if(node.members.begin(), node.members.end(),
                                  [&](const auto& member) { return member.first == name; });
  if (found != node.members.end()) return found->second;
  return node.members.emplace_back(name, JsonNode{.kind = JsonNode::Kind::kObject}).second;
}

}  // namespace

void set_at(JsonNode& root, std::string_view pointer, JsonNode value) {
  if (!pointer.starts_with('/') || pointer.size() == 1) {
    throw ConfigError("--set", std::string(pointer), "a path such as /bf16/enabled=true",
                      "begin it with '/'");
  }
  JsonNode* node = &root;
  for (const std::string_view name : split(pointer.substr(1), '/')) {
    if (node->kind != JsonNode::Kind::kObject) {
      throw ConfigError("--set", std::string(pointer) + ", through " + shown(*node),
                        "a path through objects {...}", "set the whole object");
    }
    node = &child_of(*node, unescaped_name(name));
  }
  *node = std::move(value);
}

}  // namespace zerofp8
