// Memory of each device under test, and copies to and from it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/emulated_device.h"

namespace zerofp8::test {

inline constexpr int kBlock = 128;

inline const std::vector<std::unique_ptr<Device>>& devices() {
  static const std::vector<std::unique_ptr<Device>> all = make_devices_under_test();
  return all;
}
inline std::vector<Device*> device_list() {
  std::vector<Device*> list;
  for (const auto& device : devices()) list.push_back(device.get());
  return list;
}

class DeviceTest : public testing::TestWithParam<Device*> {
 protected:
  Device& device() { return *GetParam(); }
  // What it is compared with.
  static Device& cpu() {
    static const std::unique_ptr<Device> device = make_cpu_device();
    return *device;
  }

  Buffer upload(const void* host, std::size_t bytes) {
    Buffer memory(device().allocator(), Component::kTransient, bytes);
    device().upload(memory.data(), host, bytes);
    return memory;
  }
  template <class T>
  Buffer upload(const std::vector<T>& host) {
    return upload(host.data(), host.size() * sizeof(T));
  }
  Buffer zeros(std::size_t bytes) {
    Buffer memory(device().allocator(), Component::kTransient, bytes);
    device().zero(memory.data(), bytes);
    return memory;
  }
  template <class T>
  std::vector<T> download(Buffer& memory) {
    std::vector<T> host(memory.size() / sizeof(T));
    device().download(host.data(), memory.data(), memory.size());
    return host;
  }
  std::uint32_t download_amax(Buffer& memory) { return download<std::uint32_t>(memory)[0]; }
};

}  // namespace zerofp8::test

// For the file that uses it.
#define ZEROFP8_ON_ALL_DEVICES(Suite)                                          \
  INSTANTIATE_TEST_SUITE_P(All, Suite, testing::ValuesIn(test::device_list()), \
                           [](const auto& param) {                             \
                             const std::string name = param.param->name();     \
                             return name.substr(0, name.find(':'));            \
                           })
