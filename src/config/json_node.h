// A parsed JSON document without any JSON library: what parse.cc makes and check.cc reads.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zerofp8 {

struct JsonNode {
  enum class Kind : std::uint8_t { kNull, kBool, kInteger, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  std::int64_t integer = 0;
  double number = 0;  // also set for integers
  std::string text;   // strings: the value; numbers: as written in the file
  std::vector<JsonNode> items;
  std::vector<std::pair<std::string, JsonNode>> members;  // in the order of the file
};

}  // namespace zerofp8
