#include "src/config/reader.h"

#include <algorithm>

#include "zerofp8/error.h"

namespace zerofp8 {

const Value* Reader::find(std::string_view path) const {
  const Value* value = written_.find(path);
  if (!value || !value->is_auto()) return value;
  assume(path, find_key(path)->standard);
  return nullptr;
}

bool Reader::is_auto(std::string_view path) const {
  const Value* value = written_.find(path);
  return value && value->is_auto();
}

void Reader::assume(std::string_view path, std::string_view value) const {
  const Value& written = *written_.find(path);
  if (!arguments_.assume_auto) {
    throw ConfigError(written.pointer, "\"auto\", and the caller supplied no value for it",
                      allowed_text(*find_key(path)), "write the value itself");
  }
  const std::string text = written.pointer + ' ' + std::string(value.empty() ? "none" : value);
  if (std::find(assumed_.begin(), assumed_.end(), text) == assumed_.end()) {
    assumed_.push_back(text);
  }
}

Setting<bool> Reader::boolean(std::string_view path) const {
  if (const Value* value = find(path)) {
    return {std::get<bool>(value->data), Origin::kKey, value->pointer};
  }
  return {find_key(path)->standard == "true", Origin::kDefault, default_where(path)};
}

Setting<std::string> Reader::text(std::string_view path) const {
  if (const Value* value = find(path)) {
    return {std::get<std::string>(value->data), Origin::kKey, value->pointer};
  }
  return {std::string(find_key(path)->standard), Origin::kDefault, default_where(path)};
}

Setting<double> Reader::number(std::string_view path) const {
  if (const Value* value = find(path)) {
    return {std::get<double>(value->data), Origin::kKey, value->pointer};
  }
  return {std::stod(std::string(find_key(path)->standard)), Origin::kDefault, default_where(path)};
}

void require_agreement(const Value& a, const Value& b, bool same) {
  if (same) return;
  throw ConfigError(a.pointer, a.text + ", but " + b.pointer + " says " + b.text,
                    "one of the two keys, or the same value in both", "remove one of them");
}

}  // namespace zerofp8
