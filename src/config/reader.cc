#include "src/config/reader.h"

#include "zerofp8/error.h"

namespace zerofp8 {

const Value* Reader::find(std::string_view path) const {
  const Value* value = written_.find(path);
  if (value && value->is_auto()) unresolved_auto(*value);
  return value;
}

bool Reader::is_auto(std::string_view path) const {
  const Value* value = written_.find(path);
  return value && value->is_auto();
}

void Reader::unresolved_auto(const Value& value) {
  const Key* key = find_key(canonical_path(value.pointer));
  throw ConfigError(value.pointer, "\"auto\", and the caller supplied no value for it",
                    key ? allowed_text(*key) : "", "write the value itself");
}

Setting<bool> Reader::boolean(std::string_view path) const {
  if (const Value* value = find(path)) {
    return {std::get<bool>(value->data), Origin::kKey, value->pointer};
  }
  return {find_key(path)->standard == "true", Origin::kDefault, ""};
}

Setting<std::string> Reader::text(std::string_view path) const {
  if (const Value* value = find(path)) {
    return {std::get<std::string>(value->data), Origin::kKey, value->pointer};
  }
  return {std::string(find_key(path)->standard), Origin::kDefault, ""};
}

Setting<double> Reader::number(std::string_view path) const {
  if (const Value* value = find(path)) {
    return {std::get<double>(value->data), Origin::kKey, value->pointer};
  }
  return {std::stod(std::string(find_key(path)->standard)), Origin::kDefault, ""};
}

void require_agreement(const Value& a, const Value& b, bool same) {
  if (same) return;
  throw ConfigError(a.pointer, a.text + ", but " + b.pointer + " says " + b.text,
                    "one of the two keys, or the same value in both", "remove one of them");
}

}  // namespace zerofp8
