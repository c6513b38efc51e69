// What an error says.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

namespace zerofp8::test {

inline std::string message_of(const auto& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "looked for: " << part << "\nin: " << text;
}

}  // namespace zerofp8::test
