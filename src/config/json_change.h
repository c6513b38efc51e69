// One value of a parsed document, changed on the command line: zerofp8 plan --set /path=value.
#pragma once

#include <string_view>

#include "src/config/json_node.h"

namespace zerofp8 {

// Sets the value at a JSON pointer; objects on the way are made. Throws ConfigError for a pointer
// without a leading '/', or one that goes through a value that is no object.
void set_at(JsonNode& root, std::string_view pointer, JsonNode value);

}  // namespace zerofp8
