// Writes JSON: canonical configs, plans and the schema. Keys come out in the order of the calls.
//
//   JsonWriter json;
//   json.begin_object().key("bytes").value(std::int64_t{16}).end_object();
//   json.text();
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zerofp8 {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag);
  JsonWriter& value(std::int64_t number);
  JsonWriter& value(int number) { return value(static_cast<std::int64_t>(number)); }
  JsonWriter& value(double number);  // whole numbers without a fraction; non-finite ones as null
  JsonWriter& null();
  JsonWriter& literal(std::string_view text);  // as it is: no quotes
  template <class T>
  JsonWriter& field(std::string_view name, const T& item) {
    return key(name).value(item);
  }
  const std::string& text() const { return text_; }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void before_value();
  void new_line();

  std::string text_;
  std::vector<bool> has_items_;  // one entry per open bracket
  bool after_key_ = false;
};

// `text` as a JSON string with its quotes.
std::string json_quoted(std::string_view text);

}  // namespace zerofp8
