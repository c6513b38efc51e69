#include "src/comm/buffer_pool.h"

namespace zerofp8 {

PooledBuffer& PooledBuffer::operator=(PooledBuffer&& other) noexcept {
  if (this != &other) {
    give_back();
    pool_ = std::exchange(other.pool_, nullptr);
    buffer_ = std::move(other.buffer_);
  }
  return *this;
}

void PooledBuffer::give_back() {
  if (pool_ != nullptr) pool_->free_.push_back(std::move(buffer_));
  pool_ = nullptr;
}

PooledBuffer BufferPool::acquire(std::size_t bytes) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->size() >= bytes && (best == free_.end() || it->size() < best->size())) best = it;
  }
  if (best == free_.end()) return {*this, Buffer(*allocator_, Component::kTransient, bytes)};
  Buffer buffer = std::move(*best);
  free_.erase(best);
  return {*this, std::move(buffer)};
}

}  // namespace zerofp8
