// Short ways to parse, resolve and plan a config in tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "zerofp8/config.h"
#include "zerofp8/error.h"
#include "zerofp8/plan.h"

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

inline constexpr std::int64_t kElements = 1'024'000;  // 8000 blocks of 128

inline Settings bf16_at(const std::string& level, int stage, int ranks,
                        const std::string& more = "", const std::string& zero = "") {
  return settings_of(
      "{\"bf16\":{\"enabled\":true},\"zero_optimization\":{\"stage\":" + std::to_string(stage) +
          zero + "},\"zerofp8\":{\"opt_level\":\"" + level + "\"}" + more + "}",
      {.data_ranks = ranks});
}

inline Plan plan_of(const Settings& settings, std::int64_t parameters = kElements) {
  return make_plan(settings, uniform_size(parameters, settings));
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_MENTIONS(text, part) EXPECT_TRUE(mentions(text, part)) << (text)

}  // namespace zerofp8
