// A communicator that moves host memory, for a device whose memory the host cannot read: payloads
// are copied to the host before they travel and to the device afterwards. Bits and byte counters
// are those of the communicator inside.
#pragma once

#include <memory>

#include "src/comm/buffer_pool.h"
#include "src/comm/forwarding_communicator.h"
#include "zerofp8/device.h"

namespace zerofp8 {

class StagedCommunicator final : public ForwardingCommunicator {
 public:
  // Both outlive it.
  StagedCommunicator(Communicator& inner, Device& device);

  bool on_device() const override { return true; }
  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override;
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override;
  // split() gives one of host memory, as the one inside.

 private:
  PooledBuffer on_host(std::span<const std::byte> data);

  Device& device_;
  BufferPool pool_;
};

}  // namespace zerofp8
