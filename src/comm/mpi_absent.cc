// Stands in for mpi_transport.cc where zerofp8 is built without MPI.
#include "src/comm/mpi_transport.h"
#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8 {

std::unique_ptr<Communicator> make_mpi_communicator(std::size_t) { return make_mpi_communicator(); }

std::unique_ptr<Communicator> make_mpi_communicator() {
  throw CommError(
      "this zerofp8 was built without MPI; install Open MPI's development files and build it with "
      "-DZEROFP8_WITH_MPI=ON, or use another backend");
}

bool built_with_mpi() { return false; }

}  // namespace zerofp8
