// Stands in for nccl_*.cc where zerofp8 is built without NCCL.
#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator>, int) {
  throw CommError(
      "this zerofp8 was built without NCCL; install NCCL's development files and build it with "
      "-DZEROFP8_WITH_CUDA=ON -DZEROFP8_WITH_NCCL=ON, or use another backend");
}

bool built_with_nccl() { return false; }

}  // namespace zerofp8
