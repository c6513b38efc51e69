// NaN, Infinity and -Infinity, which are no JSON but which Python's json writes and reads:
// accelerate puts "steps_per_print": Infinity into every config.
//
//   const FiniteText finite = without_non_finite(text);   // JSON of the same length and lines
//   finite.numbers.at(3)                                  // what the fourth string stands for
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace zerofp8 {

// Such numbers are replaced by strings of the same length, so that errors name the right column.
struct FiniteText {
  std::string text;
  std::map<std::size_t, double> numbers;  // by the place among all strings, names of keys included
};

FiniteText without_non_finite(const std::string& text);

}  // namespace zerofp8
