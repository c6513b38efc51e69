// The device kernels on the host: every thread block, warp and lane of a launch runs one after the
// other, with the index arithmetic and lane programs that CUDA runs. Memory of this device cannot
// be touched while no call on it runs: whatever reads it from the host ends with a segmentation
// fault, as it would on a GPU.
#pragma once

#include <memory>
#include <vector>

#include "zerofp8/device.h"

namespace zerofp8::test {

struct EmulationOptions {
  unsigned max_grid = 3;   // so that a grid has to walk
  bool backwards = false;  // lanes of a warp in the opposite order
  bool protect = true;     // false: plain memory, for tests of many small calls
  std::size_t capacity = std::size_t{1} << 40;  // bytes
};
std::unique_ptr<Device> make_emulated_device(const EmulationOptions& options = {});

// The emulation, in both orders, the CPU, and CUDA where it can be used.
std::vector<std::unique_ptr<Device>> make_devices_under_test(bool protect = true);

// What engines of tests run on: the CPU, or what the environment variable ZEROFP8_TEST_DEVICE names
// (emulated, cuda). One per thread, which is a rank.
std::shared_ptr<Device> device_under_test();

}  // namespace zerofp8::test
