// Where an engine of a test runs, and what it says.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/engine_fixture.h"

namespace zerofp8::test {

enum class Where { kCpu, kDevice };

// The device is the emulated one, or what ZEROFP8_TEST_DEVICE names.
inline std::shared_ptr<Device> device_at(Where where) {
  if (where == Where::kCpu) return make_cpu_device();
  const std::shared_ptr<Device> named = device_under_test();
  return named ? named : std::shared_ptr<Device>(make_emulated_device());
}
inline EngineOptions options_on(const Model& model) {
  EngineOptions options = quiet();
  options.device = model.device();
  return options;
}

template <class Error, class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}
inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
  }
}

}  // namespace zerofp8::test
