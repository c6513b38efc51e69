// In the place of cuda_device.cc in builds without CUDA.
#include "zerofp8/device.h"
#include "zerofp8/error.h"

namespace zerofp8 {

std::string why_no_cuda(int) {
  return "this build has no CUDA: configure it with ZEROFP8_WITH_CUDA=ON";
}

std::unique_ptr<Device> make_cuda_device(int index, void*) {
  throw DeviceError(why_no_cuda(index));
}

}  // namespace zerofp8
