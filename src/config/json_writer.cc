#include "src/config/json_writer.h"

#include <fmt/format.h>

#include <cmath>

namespace zerofp8 {

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

void JsonWriter::new_line() {
  text_ += '\n';
  text_.append(2 * has_items_.size(), ' ');
}

void JsonWriter::before_value() {
  if (after_key_ || has_items_.empty()) {
    after_key_ = false;
    return;
  }
  if (has_items_.back()) text_ += ',';
  has_items_.back() = true;
  new_line();
}

JsonWriter& JsonWriter::open(char bracket) {
  before_value();
  text_ += bracket;
  has_items_.push_back(false);
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  const bool had_items = has_items_.back();
  has_items_.pop_back();
  if (had_items) new_line();
  text_ += bracket;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  before_value();
  text_ += json_quoted(name) + ": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  before_value();
  text_ += json_quoted(text);
  return *this;
}

JsonWriter& JsonWriter::value(bool flag) {
  before_value();
  text_ += flag ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::value(std::int64_t number) {
  before_value();
  text_ += fmt::to_string(number);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  // Beyond 2^53 a double no longer says which whole number was meant.
  if (number == std::floor(number) && std::fabs(number) <= 0x1p53) {
    return value(static_cast<std::int64_t>(number));
  }
  if (!std::isfinite(number)) return null();
  before_value();
  text_ += fmt::to_string(number);
  return *this;
}

JsonWriter& JsonWriter::literal(std::string_view text) {
  before_value();
  text_ += text;
  return *this;
}

JsonWriter& JsonWriter::null() { return literal("null"); }

}  // namespace zerofp8
