#include "src/comm/links.h"

#include <fmt/format.h>

#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr int kTagsPerContext = 2;

}  // namespace

Links::Links(Transport& transport, const Group& group, int context)
    : transport_(transport),
      group_(group),
      envelope_tag_(context * kTagsPerContext),
      payload_tag_(context * kTagsPerContext + 1),
      peers_(group.members.size()) {
  if (context > transport.max_tag() / kTagsPerContext - 1) {
    throw CommError(fmt::format("{} communicators were made; the {} backend has tags for no more",
                                context, transport.backend()));
  }
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank) listen(peer);
  }
}

void Links::listen(int peer) {
  at(peer).listening = transport_.post_recv(
      member(peer), envelope_tag_, std::as_writable_bytes(std::span(&at(peer).incoming, 1)));
}

bool Links::poll() {
  bool moved = false;
  for (Peer& peer : peers_) {
    if (peer.listening == nullptr || !peer.listening->test()) continue;
    peer.listening.reset();
    peer.arrived = peer.incoming;
    peer.last_time = Clock::now();
    if (peer.incoming.kind == Envelope::Kind::kHello) peer.last_call = describe(peer.incoming);
    moved = true;
  }
  while (!outgoing_.empty() && outgoing_.front()->request->test()) {
    outgoing_.pop_front();
    moved = true;
  }
  return moved;
}

const Envelope* Links::front(int peer) const {
  return at(peer).arrived.has_value() ? &*at(peer).arrived : nullptr;
}

void Links::pop(int peer) {
  at(peer).arrived.reset();
  listen(peer);
}

void Links::post(int peer, const Envelope& envelope) {
  auto item = std::make_unique<Outgoing>();
  item->envelope = envelope;
  item->request = transport_.post_send(member(peer), envelope_tag_,
                                       std::as_bytes(std::span(&item->envelope, 1)));
  outgoing_.push_back(std::move(item));
}

std::unique_ptr<Request> Links::send(int peer, std::span<const std::byte> bytes) {
  return transport_.post_send(member(peer), payload_tag_, bytes);
}

std::unique_ptr<Request> Links::recv(int peer, std::span<std::byte> bytes) {
  return transport_.post_recv(member(peer), payload_tag_, bytes);
}

std::string Links::last_heard(int peer) const {
  const Peer& from = at(peer);
  if (from.last_call.empty()) return "never heard from on this communicator";
  const std::chrono::duration<double> ago = Clock::now() - from.last_time;
  return fmt::format("last heard from {:.1f} s ago in {}", ago.count(), from.last_call);
}

}  // namespace zerofp8
