#include "zerofp8/buffer.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace zerofp8 {

std::string_view to_string(Component component) {
  constexpr std::string_view kNames[kComponentCount] = {
      "accumulator", "reduced gradient", "master", "exp_avg", "exp_avg_sq", "transient"};
  return kNames[static_cast<std::size_t>(component)];
}

void* Allocator::allocate(Component component, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = do_allocate(bytes);
  const std::size_t now = bytes_[index(component)].fetch_add(bytes) + bytes;
  std::atomic<std::size_t>& peak = peak_[index(component)];
  for (std::size_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) {
  }
  ++allocations_;
  return data;
}

void Allocator::release(Component component, void* data, std::size_t bytes) noexcept {
  if (data == nullptr) return;
  bytes_[index(component)] -= bytes;
  do_release(data, bytes);
}

std::size_t Allocator::state_bytes() const {
  std::size_t total = 0;
  for (int i = 0; i < kComponentCount; ++i) {
    if (static_cast<Component>(i) != Component::kTransient) total += bytes_[i];
  }
  return total;
}

void* CpuAllocator::do_allocate(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, rounded);
  if (data == nullptr) throw std::bad_alloc();
  std::memset(data, 0, rounded);
  return data;
}

void CpuAllocator::do_release(void* data, std::size_t) noexcept { std::free(data); }

Buffer::Buffer(Allocator& allocator, Component component, std::size_t bytes)
    : allocator_(&allocator),
      component_(component),
      data_(static_cast<std::byte*>(allocator.allocate(component, bytes))),
      bytes_(bytes) {}

void Buffer::reset() noexcept {
  if (allocator_ != nullptr) allocator_->release(component_, data_, bytes_);
  allocator_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace zerofp8
