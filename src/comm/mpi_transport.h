// Parts of make_mpi_communicator, for tests and the Python package. No mpi.h here.
#pragma once

#include <cstddef>
#include <memory>

#include "zerofp8/communicator.h"

namespace zerofp8 {

class Transport;

// With another chunk size, so that tests can split small payloads.
std::unique_ptr<Communicator> make_mpi_communicator(std::size_t chunk_bytes);

// Exists only where zerofp8 is built with MPI.
std::shared_ptr<Transport> make_mpi_transport(std::size_t chunk_bytes);

}  // namespace zerofp8
