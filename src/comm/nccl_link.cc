#include "src/comm/nccl_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "src/comm/group.h"
#include "zerofp8/error.h"

namespace zerofp8 {
namespace {

constexpr char kAsking[] = "what each rank waits for";

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

// The same words on every rank: all of them read the same notes.
Failure compare(const NcclCall& call, const std::vector<Envelope>& notes) {
  for (std::size_t r = 0; r < notes.size(); ++r) {
    if (notes[r].kind != Envelope::Kind::kAbort) continue;
    return {fmt::format("rank {} has failed: {}", r, notes[r].get_text()), notes[r].get_absent()};
  }
  for (std::size_t r = 1; r < notes.size(); ++r) {
    if (agree(notes[0], notes[r])) continue;
    return {fmt::format("ranks disagree: rank 0 waits in {}; rank {} waits in {}; all ranks must "
                        "make the same calls in the same order with sizes that fit",
                        describe(notes[0]), r, describe(notes[r])),
            {}};
  }
  return {fmt::format("{} made no progress within {} s, though all ranks are in it: a device or a "
                      "link hangs, or the streams that it waits for; if they are only slow, set a "
                      "longer time-out",
                      describe(call), seconds(call.timeout)),
          {}};
}

}  // namespace

std::string describe(const NcclCall& call) {
  return fmt::format("{} '{}' (call {}, {} bytes to other ranks)", to_string(call.note.collective),
                     call.note.get_text(), call.note.call + 1, call.bytes_to_others);
}

void NcclLink::close() noexcept {
  if (handle_ != nullptr && !failed_) handle_->finish(patience(timeout()));
  std::lock_guard lock(asking_);
  watch_.reset();  // ends the note, if that is still under way
  note_.reset();
}

std::chrono::milliseconds NcclLink::patience(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(10));
}

Failure NcclLink::failure() const {
  std::lock_guard lock(mutex_);
  return failure_.value_or(Failure{});
}

bool NcclLink::record(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (failure_.has_value()) return false;
  failure_ = failure;
  failed_ = true;
  return true;
}

void NcclLink::fail(const Failure& failure) {
  if (!record(failure)) return;
  if (handle_ != nullptr) handle_->abort();
  leave_note(failure);
}

void NcclLink::fail_timed_out(const NcclCall& call) {
  // Caller and watchdog may come at once; the second has to wait for the first one's reason.
  std::lock_guard lock(asking_);
  if (failed_) return;
  if (record(find_reason(call)) && handle_ != nullptr) handle_->abort();
}

Failure NcclLink::find_reason(const NcclCall& call) {
  const std::string timed_out =
      fmt::format("{} timed out after {} s", describe(call), seconds(call.timeout));
  if (watch_ == nullptr || asked_) {
    return {timed_out + ": the device, or a stream that it waits for, hangs", {}};
  }
  asked_ = true;
  const auto wait = patience(call.timeout);
  try {
    std::vector<Envelope> notes(static_cast<std::size_t>(watch_->size()));
    watch_->set_timeout(wait);
    watch_
        ->all_gather(std::as_bytes(std::span(&call.note, 1)),
                     std::as_writable_bytes(std::span(notes)), {.label = kAsking})
        ->wait();
    return compare(call, notes);
  } catch (const CommError& error) {
    if (error.absent_ranks().empty()) {
      return {fmt::format("{}; the other ranks cannot be asked why: {}", timed_out, error.what()),
              {}};
    }
    return {fmt::format("{}: nothing has come from {}, also not what is being waited for there "
                        "({}). Such a rank has ended, hangs or makes no call, or makes calls of "
                        "several communicators in another order; if it is only slow, set a longer "
                        "time-out",
                        timed_out, list_ranks(error.absent_ranks()), error.what()),
            error.absent_ranks()};
  }
}

// Ranks that wait for this one ask when their time-out has come; the note stays until then.
void NcclLink::leave_note(const Failure& failure) noexcept {
  std::lock_guard lock(asking_);
  if (watch_ == nullptr || asked_) return;
  asked_ = true;
  own_note_.kind = Envelope::Kind::kAbort;
  own_note_.set_text(failure.story);
  own_note_.set_absent(failure.absent_ranks);
  try {
    other_notes_.resize(static_cast<std::size_t>(watch_->size()));
    // Theirs may have begun just now.
    watch_->set_timeout(2 * timeout() + patience(timeout()));
    note_ = watch_->all_gather(std::as_bytes(std::span(&own_note_, 1)),
                               std::as_writable_bytes(std::span(other_notes_)), {.label = kAsking});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "zerofp8: cannot tell other ranks why this one stops: %s\n", error.what());
  }
}

}  // namespace zerofp8
