// The memory of one call on a device under test.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "tests/device_fixture.h"
#include "tests/stored.h"

namespace zerofp8::test {

// Each piece lies between bytes that must stay as they are.
class Memory {
 public:
  explicit Memory(Device& device) : device_(device) {}
  // `shift`: from an address that is aligned to 16 bytes.
  template <class T = void>
  T* put(const void* host, std::size_t bytes, std::size_t shift = 0) {
    std::vector<std::uint8_t> around(kBefore + shift + bytes + kBehind, 0x3F);
    if (bytes != 0) std::memcpy(around.data() + kBefore + shift, host, bytes);
    pieces_.emplace_back(device_.allocator(), Component::kTransient, around.size());
    device_.upload(pieces_.back().data(), around.data(), around.size());
    return reinterpret_cast<T*>(pieces_.back().data() + kBefore + shift);
  }
  template <class T>
  T* put(const std::vector<T>& host, std::size_t shift = 0) {
    return put<T>(host.data(), host.size() * sizeof(T), shift);
  }
  View put(Stored& s) {
    const View host = s.view();
    return {host.storage, put(s.codes()), host.scales == nullptr ? nullptr : put(s.scales())};
  }
  // A caller's numbers: `n` of them, not aligned to more than themselves.
  View put_plain(Stored& s, std::int64_t n, int shift) {
    const auto size = static_cast<std::size_t>(bytes_of(s.view().storage));
    return {s.view().storage,
            put(s.view().codes, static_cast<std::size_t>(n) * size,
                static_cast<std::size_t>(shift) * size),
            nullptr};
  }
  // `count` numbers at what put() returned.
  template <class T>
  std::vector<T> get(const T* data, std::size_t count) {
    std::vector<T> host(count);
    device_.download(host.data(), data, count * sizeof(T));
    return host;
  }
  template <class T>
  T get(const T* data) {
    return get(data, 1).front();
  }
  std::uint32_t* put_amax() { return put(std::vector<std::uint32_t>(1)); }
  std::string bytes() {
    std::string all;
    for (const Buffer& piece : pieces_) {
      std::string host(piece.size(), '\0');
      device_.download(host.data(), piece.data(), host.size());
      all += host;
    }
    return all;
  }

 private:
  static constexpr std::size_t kBefore = 32, kBehind = 48;
  Device& device_;
  std::vector<Buffer> pieces_;
};

}  // namespace zerofp8::test
