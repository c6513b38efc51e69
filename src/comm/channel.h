// The queue of one communicator: collectives wait here for their turn, in call order. Callers push,
// the progress thread advances the one at the head.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "src/comm/exchange.h"
#include "src/comm/links.h"
#include "src/comm/work_state.h"
#include "zerofp8/communicator.h"

namespace zerofp8 {

class Channel {
 public:
  Channel(Transport& transport, const Group& group, int context);

  // Any thread. push() throws CommError with the first failure's story if there was one.
  std::shared_ptr<WorkState> push(ExchangePlan plan);
  bool has_work() const;
  WireBytes bytes_sent() const;
  void request_close();
  void wait_until_closed();

  // Progress thread only. True if anything moved.
  bool advance();

 private:
  struct Item {
    Exchange exchange;
    std::shared_ptr<WorkState> state;
  };
  void complete_head();
  void fail(const Failure& failure);
  void close();
  void tell_all(Envelope::Kind kind, const Failure* failure) noexcept;

  mutable std::mutex mutex_;
  std::condition_variable closed_changed_;
  std::deque<std::unique_ptr<Item>> queue_;
  std::uint64_t calls_ = 0;
  const InterruptFlag interrupted_ = std::make_shared<std::atomic<bool>>(false);
  std::optional<Failure> failure_;
  bool closing_ = false;
  bool closed_ = false;
  WireBytes sent_;

  std::optional<Links> links_;  // progress thread only; gone once closed
};

}  // namespace zerofp8
