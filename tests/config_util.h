// Short ways to parse and resolve a config in tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "zerofp8/config.h"
#include "zerofp8/error.h"

namespace zerofp8 {

inline Settings settings_of(const std::string& text, const Launch& launch = {},
                            const Arguments& arguments = {}) {
  return resolve(Config::parse(text, "test.json"), launch, arguments);
}

// The ConfigError that `text` must give, in parse() or resolve().
inline ConfigError error_of(const std::string& text, const Launch& launch = {},
                            const Arguments& arguments = {}) {
  try {
    settings_of(text, launch, arguments);
  } catch (const ConfigError& error) {
    return error;
  }
  ADD_FAILURE() << "accepted: " << text;
  return ConfigError("", "", "", "");
}

// True for "not yet supported", false for a mistake.
inline bool is_unsupported(const std::string& text, const Launch& launch = {}) {
  try {
    settings_of(text, launch);
  } catch (const UnsupportedError&) {
    return true;
  } catch (const ConfigError&) {
  }
  return false;
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_MENTIONS(text, part) EXPECT_TRUE(mentions(text, part)) << (text)

}  // namespace zerofp8
