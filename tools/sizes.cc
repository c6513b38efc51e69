#include "tools/sizes.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <span>
#include <string_view>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

struct Unit {
  std::string_view name;  // lower case
  double factor;
};

constexpr Unit kCountUnits[] = {{"", 1},    {"k", 1e3}, {"m", 1e6},
                                {"b", 1e9}, {"g", 1e9}, {"t", 1e12}};
constexpr Unit kByteUnits[] = {
    {"", 1},         {"b", 1},        {"kb", 1e3},     {"mb", 1e6},     {"gb", 1e9},
    {"tb", 1e12},    {"k", 1e3},      {"m", 1e6},      {"g", 1e9},      {"t", 1e12},
    {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40},
};

std::int64_t parse(const std::string& text, std::span<const Unit> units,
                   std::string_view examples) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string suffix(end, text.data() + text.size());
  suffix.erase(0, suffix.find_first_not_of(' '));
  for (char& c : suffix) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  constexpr double kMost = 0x1p50;
  if (error == std::errc()) {
    for (const Unit& unit : units) {
      // 1.3e9 and 1.3B are not exact in binary: the nearest whole number is meant.
      const double value = std::round(number * unit.factor);
      const bool whole = std::fabs(number * unit.factor - value) <= 1e-6 * value;
      if (unit.name == suffix && whole && value >= 1 && value <= kMost) {
        return static_cast<std::int64_t>(value);
      }
    }
  }
  throw ArgumentError(
      fmt::format("given \"{}\"; allowed: a size from 1 to 2^50 such as {}", text, examples));
}

}  // namespace

std::int64_t parse_count(const std::string& text) {
  return parse(text, kCountUnits, "7e9, 7B, 350M or 7000000000");
}

std::int64_t parse_bytes(const std::string& text) {
  return parse(text, kByteUnits, "80GB, 80GiB or 8e10");
}

}  // namespace zerofp8
