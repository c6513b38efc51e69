// What one communicator uses of the transport: two tags of its own, and per peer the stream of
// envelopes that has come from it. Peers are ranks of the group. Used by the progress thread only.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/comm/envelope.h"
#include "src/comm/group.h"
#include "src/comm/transport.h"

namespace zerofp8 {

class Links {
 public:
  using Clock = std::chrono::steady_clock;

  // Listens to all peers at once, so that a note that a peer has failed or gone is seen in any
  // state.
  Links(Transport& transport, const Group& group, int context);

  // Takes in envelopes that have come; true if there was one.
  bool poll();
  // The oldest envelope of the peer that was not popped, or nullptr.
  const Envelope* front(int peer) const;
  void pop(int peer);
  // Sends an envelope and keeps it alive until it is through.
  void post(int peer, const Envelope& envelope);

  std::unique_ptr<Request> send(int peer, std::span<const std::byte> bytes);
  std::unique_ptr<Request> recv(int peer, std::span<std::byte> bytes);

  // "last heard from 2.1 s ago in call 3: ...", for time-out errors.
  std::string last_heard(int peer) const;
  const Group& group() const { return group_; }
  std::size_t chunk_bytes() const { return transport_.chunk_bytes(); }

 private:
  struct Peer {
    Envelope incoming;                   // where the posted receive writes
    std::unique_ptr<Request> listening;  // null while `arrived` waits to be popped
    std::optional<Envelope> arrived;
    std::string last_call;
    Clock::time_point last_time{};
  };
  struct Outgoing {
    Envelope envelope;
    std::unique_ptr<Request> request;  // declared last: withdrawn before its memory goes
  };
  void listen(int peer);
  int member(int peer) const { return group_.members[static_cast<std::size_t>(peer)]; }
  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& at(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }

  Transport& transport_;
  const Group group_;
  const int envelope_tag_;
  const int payload_tag_;
  std::vector<Peer> peers_;
  std::deque<std::unique_ptr<Outgoing>> outgoing_;
};

}  // namespace zerofp8
