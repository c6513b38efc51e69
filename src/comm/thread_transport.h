// Messages between ranks that are threads of one process: for tests and single-node experiments.
#pragma once

#include <memory>
#include <vector>

#include "src/comm/transport.h"
#include "zerofp8/communicator.h"

namespace zerofp8 {

// One transport per rank, connected with each other.
std::vector<std::shared_ptr<Transport>> make_thread_transports(
    int size, std::size_t chunk_bytes = kDefaultChunkBytes);

// make_thread_communicators with another chunk size, so that tests can split small payloads.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     std::size_t chunk_bytes);

}  // namespace zerofp8
