// make_mpi_communicator with another chunk size, so that tests can split small payloads. No mpi.h
// here.
#pragma once

#include <cstddef>
#include <memory>

#include "zerofp8/communicator.h"

namespace zerofp8 {

std::unique_ptr<Communicator> make_mpi_communicator(std::size_t chunk_bytes);

}  // namespace zerofp8
