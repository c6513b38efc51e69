// Transient buffers that are kept for the next step: after the first step nothing is allocated any
// more.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "zerofp8/buffer.h"

namespace zerofp8 {

class BufferPool;

// A buffer on loan; goes back to its pool when it dies. The pool must outlive it.
class PooledBuffer {
 public:
  PooledBuffer() = default;
  PooledBuffer(BufferPool& pool, Buffer buffer) : pool_(&pool), buffer_(std::move(buffer)) {}
  PooledBuffer(PooledBuffer&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), buffer_(std::move(other.buffer_)) {}
  PooledBuffer& operator=(PooledBuffer&& other) noexcept;
  ~PooledBuffer() { give_back(); }

  std::byte* data() { return buffer_.data(); }
  template <class T>
  T* as() {
    return buffer_.as<T>();
  }
  explicit operator bool() const { return pool_ != nullptr; }

 private:
  void give_back();
  BufferPool* pool_ = nullptr;
  Buffer buffer_;
};

// Not thread-safe: belongs to one engine.
class BufferPool {
 public:
  explicit BufferPool(Allocator& allocator) : allocator_(&allocator) {}
  // At least `bytes` bytes, not cleared: the smallest free buffer that is large enough, else a new
  // one.
  PooledBuffer acquire(std::size_t bytes);

 private:
  friend class PooledBuffer;
  Allocator* allocator_;
  std::vector<Buffer> free_;
};

}  // namespace zerofp8
