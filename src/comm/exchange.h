// The one algorithm below all collectives: each rank has at most one message for, and one from,
// each of its peers. A collective only says which memory goes where (the files named after them);
// the exchange says hello, checks that both ends agree, moves the chunks and watches the clock,
// without ever blocking.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/comm/envelope.h"
#include "src/comm/links.h"
#include "zerofp8/communicator.h"

namespace zerofp8 {

struct ExchangePlan {
  struct Part {
    int peer = 0;
    std::span<const std::byte> send;
    std::span<std::byte> recv;
  };
  Collective kind = Collective::kBarrier;
  std::string label;
  int root = 0;
  DType dtype = DType::kFp32;
  bool control = false;  // counted as control bytes instead of under dtype
  std::chrono::milliseconds timeout{0};
  std::vector<Part> parts;              // without this rank itself
  std::function<void()> copy_own = {};  // this rank's message to itself

  // Bytes for other ranks, as WireBytes counts them.
  std::uint64_t bytes_to_others() const;
};

class Exchange {
 public:
  // `call` is the number of earlier calls on the communicator.
  Exchange(ExchangePlan plan, std::uint64_t call);

  // Goes on as far as is possible without waiting; true if anything moved. Throws CommError on a
  // time-out, on a mismatch between ranks and where a peer has failed or is gone.
  bool advance(Links& links);
  bool done() const { return unfinished_ == 0 && started_; }
  const ExchangePlan& plan() const { return plan_; }

 private:
  struct PartState {
    bool greeted = false;
    bool finished = false;
    std::vector<std::unique_ptr<Request>> requests;  // chunks not yet through
  };
  void start(Links& links);
  Envelope hello_for(const ExchangePlan::Part& part, const Links& links) const;
  bool greet(Links& links, std::size_t index);
  bool move_chunks(std::size_t index);
  void check_aborts(const Links& links) const;
  void check_deadline(const Links& links) const;

  ExchangePlan plan_;
  const std::uint64_t call_;
  bool started_ = false;
  Links::Clock::time_point deadline_{};
  std::size_t unfinished_ = 0;
  std::vector<PartState> states_;
};

}  // namespace zerofp8
