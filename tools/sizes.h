// Sizes as people write them on a command line.
#pragma once

#include <cstdint>
#include <string>

namespace zerofp8 {

// "7e9", "7B", "1.3b", "350M", "7000000000" -> elements. Throws ArgumentError unless it is a whole
// number from 1 to 2^50.
std::int64_t parse_count(const std::string& text);
// "80GB" (powers of 1000), "80GiB" (powers of 1024), "8e10", "512" -> bytes. Throws ArgumentError.
std::int64_t parse_bytes(const std::string& text);

}  // namespace zerofp8
