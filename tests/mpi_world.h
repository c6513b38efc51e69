// For tests that run under mpirun (zerofp8_mpi_test in comm.cmake): each process runs the same
// GoogleTest cases in the same order, as one rank of world().
#pragma once

#include "zerofp8/communicator.h"

namespace zerofp8::test {

// All ranks of the run; made by the main function in mpi_main.cc.
Communicator& world();

}  // namespace zerofp8::test
