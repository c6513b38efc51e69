#include "src/comm/exchange.h"

#include <fmt/format.h>

#include <algorithm>

#include "src/comm/chunks.h"
#include "zerofp8/error.h"

namespace zerofp8 {

std::uint64_t ExchangePlan::bytes_to_others() const {
  std::uint64_t bytes = 0;
  for (const Part& part : parts) bytes += part.send.size();
  return bytes;
}

Exchange::Exchange(ExchangePlan plan, std::uint64_t call)
    : plan_(std::move(plan)), call_(call), states_(plan_.parts.size()) {}

Envelope Exchange::hello_for(const ExchangePlan::Part& part, const Links& links) const {
  Envelope hello;
  hello.collective = plan_.kind;
  hello.root = plan_.root;
  hello.dtype = plan_.dtype;
  hello.call = call_;
  hello.send_bytes = part.send.size();
  hello.recv_bytes = part.recv.size();
  hello.chunk_bytes = links.chunk_bytes();
  hello.set_text(plan_.label);
  return hello;
}

void Exchange::start(Links& links) {
  started_ = true;
  // The clock starts when the call reaches the head of the queue: earlier calls have deadlines of
  // their own.
  deadline_ = Links::Clock::now() + plan_.timeout;
  unfinished_ = plan_.parts.size();
  for (const ExchangePlan::Part& part : plan_.parts) links.post(part.peer, hello_for(part, links));
  if (plan_.copy_own) plan_.copy_own();
}

bool Exchange::advance(Links& links) {
  bool moved = false;
  if (!started_) {
    start(links);
    moved = true;
  }
  moved |= links.poll();
  check_aborts(links);
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].finished) continue;
    if (!states_[i].greeted) moved |= greet(links, i);
    if (states_[i].greeted) moved |= move_chunks(i);
  }
  if (done()) {
    // A late rank finds the hellos of ranks that have given up since: their notes come behind.
    links.poll();
    check_aborts(links);
  } else {
    check_deadline(links);
  }
  return moved;
}

// Takes the peer's hello, if it has come, and posts the payload.
bool Exchange::greet(Links& links, std::size_t index) {
  const ExchangePlan::Part& part = plan_.parts[index];
  PartState& state = states_[index];
  const Envelope* theirs = links.front(part.peer);
  if (theirs == nullptr) return false;
  const Envelope mine = hello_for(part, links);
  const Group& group = links.group();
  if (theirs->kind == Envelope::Kind::kBye) {
    throw CommError(
        fmt::format("{} closed its communicator and takes no part in {}; look at why it stopped",
                    group.name(part.peer), describe(mine)),
        {part.peer});
  }
  if (!agree(mine, *theirs)) {
    // Both ends make this text, so it names the lower rank first to read the same on both.
    const bool me_first = group.rank < part.peer;
    const std::string ours = group.name(group.rank) + " is in " + describe(mine);
    const std::string other = group.name(part.peer) + " is in " + describe(*theirs);
    throw CommError(
        fmt::format("ranks disagree: {}; {}; all ranks must make the same calls in the "
                    "same order with sizes that fit",
                    me_first ? ours : other, me_first ? other : ours));
  }
  links.pop(part.peer);
  state.greeted = true;
  const auto recv = [&](std::span<std::byte> bytes) { return links.recv(part.peer, bytes); };
  const auto send = [&](std::span<const std::byte> bytes) { return links.send(part.peer, bytes); };
  post_chunks(part.recv, links.chunk_bytes(), state.requests, recv);
  post_chunks(part.send, links.chunk_bytes(), state.requests, send);
  return true;
}

bool Exchange::move_chunks(std::size_t index) {
  PartState& state = states_[index];
  const std::size_t removed =
      std::erase_if(state.requests, [](const auto& request) { return request->test(); });
  if (!state.requests.empty()) return removed != 0;
  state.finished = true;
  --unfinished_;
  return true;
}

// A peer that has failed ends this call for all, with its story, whatever state this rank is in.
void Exchange::check_aborts(const Links& links) const {
  for (int peer = 0; peer < links.group().size(); ++peer) {
    const Envelope* envelope = links.front(peer);
    if (envelope == nullptr || envelope->kind != Envelope::Kind::kAbort) continue;
    throw CommError(std::string(envelope->get_text()), envelope->get_absent());
  }
}

void Exchange::check_deadline(const Links& links) const {
  if (Links::Clock::now() < deadline_) return;
  std::vector<int> absent, late;
  std::string details;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].finished) continue;
    const int peer = plan_.parts[i].peer;
    (states_[i].greeted ? late : absent).push_back(peer);
    if (details.size() > 400)
      continue;  // the list of ranks below is complete, the details need not be
    details += fmt::format("; {} ", links.group().name(peer));
    if (states_[i].greeted) {
      details +=
          fmt::format("has called it, but {} messages with it are not through: it is slow or stuck",
                      states_[i].requests.size());
    } else {
      details += "has not called it (" + links.last_heard(peer) + ")";
    }
  }
  const std::chrono::duration<double> seconds = plan_.timeout;
  const std::string who = !absent.empty() ? "nothing has come from " + list_ranks(absent)
                                          : "data is missing between here and " + list_ranks(late);
  throw CommError(
      fmt::format(
          "{} '{}' (call {}, {} bytes to other ranks) timed out after {} s: {}{}. Such a rank "
          "has ended, hangs or makes other calls; if it is only slow, set a longer time-out",
          to_string(plan_.kind), plan_.label, call_ + 1, plan_.bytes_to_others(), seconds.count(),
          who, details),
      !absent.empty() ? absent : late);
}

}  // namespace zerofp8
