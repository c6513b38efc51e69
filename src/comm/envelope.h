// The note that two ranks exchange before the payload of a collective. It says which call the
// sender is in and how many bytes it sends and expects, so that ranks which make different calls,
// or the same call with different sizes, learn so instead of hanging or mixing up memory. Payload
// is posted only to a rank whose note has come: so a time-out can tell "has not called" from
// "called, but its data is late", and withdrawing never leaves a large message without a receiver.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zerofp8/dtype.h"

namespace zerofp8 {

enum class Collective : std::uint32_t {
  kAllToAll,
  kAllGather,
  kBroadcast,
  kAllReduce,
  kGatherControl,
  kBarrier,
};
std::string_view to_string(Collective kind);

// A plain struct of fixed size: sent as it is between ranks of one program on one kind of machine.
struct Envelope {
  enum class Kind : std::uint32_t {
    kHello,  // the sender is in this call
    kAbort,  // the sender's communicator has failed; text is why
    kBye,    // the sender has closed its communicator
  };
  static constexpr std::uint64_t kMagic = 0x7a65726f66703801;  // "zerofp8", version 1
  static constexpr int kMaxAbsent = 16;

  std::uint64_t magic = kMagic;
  Kind kind = Kind::kHello;
  Collective collective = Collective::kBarrier;
  std::int32_t root = 0;
  DType dtype = DType::kFp32;
  std::array<std::uint8_t, 3> unused{};
  std::uint64_t call = 0;         // how many calls the sender had made on this communicator before
  std::uint64_t send_bytes = 0;   // that the sender sends to the receiver of this envelope
  std::uint64_t recv_bytes = 0;   // that it expects from it
  std::uint64_t chunk_bytes = 0;  // both sides must cut payloads alike; 0: nothing is cut
  std::int32_t absent_count = 0;
  std::array<std::int32_t, kMaxAbsent> absent{};
  std::array<char, 420> text{};  // kHello: label; kAbort: story; cut if longer

  void set_text(std::string_view value);
  std::string_view get_text() const;
  void set_absent(std::span<const int> ranks);
  std::vector<int> get_absent() const;
};

// Whether the two ends of a pair make the same call with sizes that fit. Labels are compared too:
// two buckets of one size, called in different orders, differ in nothing else.
bool agree(const Envelope& mine, const Envelope& theirs);

// "call 5: all_to_all 'grads' of fp32, sending 8 bytes and expecting 12". Calls count from 1.
std::string describe(const Envelope& hello);

}  // namespace zerofp8
