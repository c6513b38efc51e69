// A parsed document as text: canonical for comparison, cut for messages.
#include <algorithm>
#include <cmath>

#include "src/config/config_impl.h"
#include "src/config/json_writer.h"

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
      if (std::isfinite(node.number)) {
        json.value(node.number);
      } else {
        json.literal(node.text);  // as this parser and Python's json take it
      }
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

}  // namespace zerofp8
