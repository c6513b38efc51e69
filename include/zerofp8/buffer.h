// Memory that is counted. Every byte that the engine keeps comes from an Allocator under the name
// of the component it serves, so that the plan's bytes can be compared with what is really held.
//
//   CpuAllocator allocator;
//   Buffer codes(allocator, Component::kExpAvg, 1 << 20);
//   allocator.bytes(Component::kExpAvg);   // 1048576
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

namespace zerofp8 {

// What a buffer is for; the rows of the plan. kTransient buffers live within one call of the
// engine.
enum class Component : std::uint8_t {
  kAccumulator,
  kReducedGradient,
  kMaster,
  kExpAvg,
  kExpAvgSq,
  kTransient,
};
inline constexpr int kComponentCount = 6;
std::string_view to_string(Component component);

// A shard holds a multiple of so many blocks: their FP32 scales fill 16 bytes, so that codes and
// scales of each rank's part of a message can be read 16 bytes at a time.
inline constexpr int kShardBlocks = 4;

// Of host or device memory. Thread-safe.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // 64-byte aligned memory, zeroed; nullptr for 0 bytes. Throws std::bad_alloc.
  void* allocate(Component component, std::size_t bytes);
  void release(Component component, void* data, std::size_t bytes) noexcept;

  std::size_t bytes(Component component) const { return bytes_[index(component)]; }
  std::size_t peak_bytes(Component component) const { return peak_[index(component)]; }
  // Bytes of all components but kTransient: the optimizer's state.
  std::size_t state_bytes() const;
  // Number of allocate() calls so far: flat over steps once a run has warmed up.
  std::uint64_t allocation_count() const { return allocations_; }

 protected:
  virtual void* do_allocate(std::size_t bytes) = 0;
  virtual void do_release(void* data, std::size_t bytes) noexcept = 0;

 private:
  static std::size_t index(Component component) { return static_cast<std::size_t>(component); }
  std::array<std::atomic<std::size_t>, kComponentCount> bytes_{}, peak_{};
  std::atomic<std::uint64_t> allocations_{0};
};

class CpuAllocator final : public Allocator {
 protected:
  void* do_allocate(std::size_t bytes) override;
  void do_release(void* data, std::size_t bytes) noexcept override;
};

// Owns one allocation. Movable, not copyable; the allocator must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Allocator& allocator, Component component, std::size_t bytes);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~Buffer() { reset(); }

  void reset() noexcept;
  bool empty() const { return bytes_ == 0; }
  std::size_t size() const { return bytes_; }
  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  std::span<std::byte> bytes() { return {data_, bytes_}; }
  std::span<const std::byte> bytes() const { return {data_, bytes_}; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(component_, other.component_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Allocator* allocator_ = nullptr;
  Component component_ = Component::kTransient;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace zerofp8
