// What a backend has to provide: messages between two ranks that do not block. All collectives are
// written once over this (exchange.h), so a backend knows nothing of them, of dtypes or of
// time-outs.
//
//   std::unique_ptr<Request> request = transport.post_send(peer, tag, bytes);
//   while (!request->test()) transport.idle(waited);
//
// Messages of one sender, receiver and tag arrive in the order in which they were posted.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "src/comm/context_ids.h"

namespace zerofp8 {

// Largest message handed to a backend: MPI counts are 32-bit ints, so anything below INT_MAX works.
inline constexpr std::size_t kDefaultChunkBytes = std::size_t{1} << 30;

// One message under way. The destructor withdraws it if it is still pending; its memory may be
// freed after that.
class Request {
 public:
  virtual ~Request() = default;
  // True once the message is through. Throws CommError where it never can be. Not called again
  // after it was true.
  virtual bool test() = 0;
};

class Transport {
 public:
  explicit Transport(std::size_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string backend() const = 0;

  // `bytes` has 1 to chunk_bytes() bytes, stays alive until test() is true or the request is gone,
  // and has the same size on both sides. `tag` is 0 to max_tag().
  virtual std::unique_ptr<Request> post_send(int peer, int tag,
                                             std::span<const std::byte> bytes) = 0;
  virtual std::unique_ptr<Request> post_recv(int peer, int tag, std::span<std::byte> bytes) = 0;
  virtual int max_tag() const = 0;

  // Gives the core away for a moment because nothing has moved for `waited`.
  virtual void idle(std::chrono::microseconds waited) = 0;
  // Ends an idle() in progress, where the backend can. Called from other threads.
  virtual void wake() {}

  // Longer payloads are split into messages of this size (chunks.h). Equal on all ranks.
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  ContextIds& context_ids() { return context_ids_; }

 private:
  std::size_t chunk_bytes_;
  ContextIds context_ids_;
};

}  // namespace zerofp8
