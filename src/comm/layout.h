// Which part of a buffer goes where, and the mistakes in it that one rank can see alone. Every
// backend checks the same way before it does anything: an ArgumentError does no harm.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "src/comm/envelope.h"

namespace zerofp8 {

// Part `index` of `parts` equal ones.
template <class Byte>
std::span<Byte> equal_part(std::span<Byte> whole, int index, int parts) {
  const std::size_t bytes = whole.size() / static_cast<std::size_t>(parts);
  return whole.subspan(static_cast<std::size_t>(index) * bytes, bytes);
}

// memcpy that allows the null pointers of empty spans and does nothing in place.
void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to);

// The three throw ArgumentError.
void check_all_to_all(std::span<const std::byte> send, std::span<const std::byte> recv, int ranks,
                      std::string_view label);
// send must be apart from recv or be part `rank` of it.
void check_gather(Collective kind, std::span<const std::byte> send, std::span<const std::byte> recv,
                  int rank, int ranks, std::string_view label);
void check_root(int root, int ranks, std::string_view label);

}  // namespace zerofp8
