// What every communicator must do, as functions that run on each rank. Thread ranks and MPI ranks
// are held to the same checks. Expectations are computed directly from (rank, position), not by
// other collectives.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/messages.h"
#include "zerofp8/communicator.h"
#include "zerofp8/error.h"

namespace zerofp8::test {

using Bytes = std::vector<std::byte>;

// The byte at `position` of what rank `from` sends to rank `to` in round `round`.
inline std::byte pattern(int from, int to, std::size_t position, int round = 0) {
  const auto x = static_cast<std::uint64_t>(from) * 1000003u +
                 static_cast<std::uint64_t>(to) * 7919u + position * 31u +
                 static_cast<std::uint64_t>(round) * 101u + (position >> 8);
  return static_cast<std::byte>(x & 0xffu);
}

inline Bytes pattern_bytes(int from, int to, std::size_t bytes, int round = 0) {
  Bytes result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) result[i] = pattern(from, to, i, round);
  return result;
}

inline void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

// Part sizes around every limit that matters: nothing, odd, the buffered-message limit, many
// chunks.
inline const std::vector<std::size_t>& part_sizes() {
  static const std::vector<std::size_t> sizes = {0, 1, 7, 255, 4095, 4096, 4097, 70001};
  return sizes;
}

inline Bytes all_to_all_send(const Communicator& comm, std::size_t part, int round = 0) {
  Bytes send;
  for (int to = 0; to < comm.size(); ++to)
    append(send, pattern_bytes(comm.rank(), to, part, round));
  return send;
}

inline Bytes all_to_all_expected(const Communicator& comm, std::size_t part, int round = 0) {
  Bytes expected;
  for (int from = 0; from < comm.size(); ++from) {
    append(expected, pattern_bytes(from, comm.rank(), part, round));
  }
  return expected;
}

inline void check_all_to_all(Communicator& comm) {
  for (const std::size_t part : part_sizes()) {
    const Bytes send = all_to_all_send(comm, part);
    Bytes recv(send.size());
    comm.all_to_all(send, recv, {.dtype = DType::kE4m3, .label = "a2a"})->wait();
    EXPECT_EQ(recv, all_to_all_expected(comm, part)) << "part of " << part << " bytes";
  }
}

inline Bytes all_gather_expected(const Communicator& comm, std::size_t part, int round = 0) {
  Bytes expected;
  for (int from = 0; from < comm.size(); ++from)
    append(expected, pattern_bytes(from, 0, part, round));
  return expected;
}

inline void check_all_gather(Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  for (const std::size_t part : part_sizes()) {
    const Bytes send = pattern_bytes(comm.rank(), 0, part);
    Bytes recv(part * ranks);
    comm.all_gather(send, recv, {.label = "gather"})->wait();
    EXPECT_EQ(recv, all_gather_expected(comm, part)) << "part of " << part << " bytes";
  }
}

inline void check_all_gather_in_place(Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto rank = static_cast<std::size_t>(comm.rank());
  for (const std::size_t part : part_sizes()) {
    Bytes data(part * ranks, std::byte{0xee});
    const std::span<std::byte> own = std::span(data).subspan(rank * part, part);
    const Bytes mine = pattern_bytes(comm.rank(), 0, part);
    std::copy(mine.begin(), mine.end(), own.begin());
    comm.all_gather(own, data, {.label = "in place"})->wait();
    EXPECT_EQ(data, all_gather_expected(comm, part)) << "part of " << part << " bytes";
  }
}

inline void check_broadcast(Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::size_t bytes : part_sizes()) {
      const Bytes expected = pattern_bytes(root, 3, bytes);
      Bytes data = comm.rank() == root ? expected : Bytes(bytes);
      comm.broadcast(data, root, {.label = "broadcast"})->wait();
      EXPECT_EQ(data, expected) << bytes << " bytes from rank " << root;
    }
  }
}

// Values whose float sum depends on the order: the result must be the rank-order one, bit for bit.
template <class T>
void check_all_reduce_of(Communicator& comm) {
  const auto value = [](int rank, std::size_t i) {
    const double x = (rank % 2 == 0 ? 1.0 : -1.0) * (1.0 + 0.37 * rank) * std::pow(3.0, i % 19);
    return static_cast<T>(x);
  };
  for (const std::size_t count :
       {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{3001}}) {
    std::vector<T> sum(count), expected_sum(count), expected_max(count);
    for (std::size_t i = 0; i < count; ++i) {
      sum[i] = value(comm.rank(), i);
      expected_sum[i] = expected_max[i] = value(0, i);
      for (int r = 1; r < comm.size(); ++r) {
        expected_sum[i] = static_cast<T>(expected_sum[i] + value(r, i));
        expected_max[i] = std::max(expected_max[i], value(r, i));
      }
    }
    std::vector<T> max = sum;
    comm.all_reduce(std::span(sum), ReduceOp::kSum);
    comm.all_reduce(std::span(max), ReduceOp::kMax);
    EXPECT_EQ(sum, expected_sum);
    EXPECT_EQ(max, expected_max);
  }
}

inline void check_all_reduce(Communicator& comm) {
  check_all_reduce_of<float>(comm);
  check_all_reduce_of<double>(comm);
  check_all_reduce_of<std::int32_t>(comm);
  check_all_reduce_of<std::int64_t>(comm);
}

// A NaN on any one rank must reach all ranks through max, whichever rank it is.
inline void check_max_keeps_nan(Communicator& comm) {
  for (int bad = 0; bad < comm.size(); ++bad) {
    float value = comm.rank() == bad ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
    comm.all_reduce(std::span(&value, 1), ReduceOp::kMax);
    EXPECT_TRUE(std::isnan(value)) << "NaN of rank " << bad << " was lost";
  }
}

inline void check_gather_control(Communicator& comm) {
  const std::int64_t own = 100 + comm.rank();
  std::vector<std::int64_t> all(static_cast<std::size_t>(comm.size())), expected(all.size());
  std::iota(expected.begin(), expected.end(), 100);
  comm.gather_control(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  EXPECT_EQ(all, expected);
}

inline void check_barrier(Communicator& comm) {
  for (int i = 0; i < 20; ++i) comm.barrier(std::chrono::seconds(60));
}

// Many collectives of mixed kinds under way at once, waited for in the reverse order.
inline void check_many_in_flight(Communicator& comm) {
  constexpr int kRounds = 60;
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto part = [](int round) { return static_cast<std::size_t>((round * 7919) % 9000); };
  std::vector<Bytes> sends, recvs, gathers;
  for (int i = 0; i < kRounds; ++i) {
    sends.push_back(all_to_all_send(comm, part(i), i));
    recvs.emplace_back(sends.back().size());
    gathers.emplace_back(part(i) * ranks);
  }
  std::vector<std::unique_ptr<Work>> works;
  std::vector<Bytes> parts;
  for (int i = 0; i < kRounds; ++i) parts.push_back(pattern_bytes(comm.rank(), 0, part(i), i));
  for (std::size_t i = 0; i < kRounds; ++i) {
    works.push_back(comm.all_to_all(sends[i], recvs[i], {.label = "flight"}));
    works.push_back(comm.all_gather(parts[i], gathers[i], {.label = "flight"}));
  }
  for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
  for (int i = 0; i < kRounds; ++i) {
    EXPECT_EQ(recvs[static_cast<std::size_t>(i)], all_to_all_expected(comm, part(i), i));
    EXPECT_EQ(gathers[static_cast<std::size_t>(i)], all_gather_expected(comm, part(i), i));
  }
  for (const auto& work : works) EXPECT_TRUE(work->done());
}

inline void check_split_order(Communicator& comm) {
  // Even and odd ranks, in descending rank order: key runs against rank.
  const auto half = comm.split(comm.rank() % 2, -comm.rank());
  const int color = comm.rank() % 2;
  const int members = (comm.size() + 1 - color) / 2;
  ASSERT_EQ(half->size(), members);
  EXPECT_EQ(half->rank(), members - 1 - comm.rank() / 2);
  EXPECT_EQ(half->backend(), comm.backend());
  std::vector<int> ranks(static_cast<std::size_t>(members));
  const int own = comm.rank();
  half->gather_control(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(ranks)));
  for (int i = 0; i < members; ++i) {
    EXPECT_EQ(ranks[static_cast<std::size_t>(i)], color + 2 * (members - 1 - i));
  }
  // Equal keys: by rank.
  const auto same = comm.split(7, 0);
  EXPECT_EQ(same->rank(), comm.rank());
  EXPECT_EQ(same->size(), comm.size());
  // Communicators of communicators work alike.
  const auto single = half->split(half->rank(), 0);
  EXPECT_EQ(single->size(), 1);
  check_all_gather(*single);
  check_all_to_all(*half);
}

// Parent and children at work at once, from threads that start in another order on odd ranks.
inline void check_split_concurrency(Communicator& comm) {
  const auto everyone = comm.split(0, 0);
  const auto half = comm.split(comm.rank() % 2, 0);
  std::vector<Communicator*> comms = {&comm, everyone.get(), half.get()};
  if (comm.rank() % 2 == 1) std::swap(comms[0], comms[2]);
  std::vector<std::thread> threads;
  for (Communicator* each : comms) {
    threads.emplace_back([each] {
      check_all_to_all(*each);
      check_many_in_flight(*each);
      check_all_reduce(*each);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Communicators made from two parents at once, in opposite orders on odd ranks, stay apart.
inline void check_concurrent_splits(Communicator& comm) {
  const auto a = comm.split(0, 0);
  const auto b = comm.split(0, 0);
  std::unique_ptr<Communicator> from_a, from_b;
  std::thread other;
  const bool odd = comm.rank() % 2 == 1;
  other = std::thread([&] { (odd ? from_a : from_b) = (odd ? *a : *b).split(0, 0); });
  (odd ? from_b : from_a) = (odd ? *b : *a).split(0, 0);
  other.join();
  std::thread first([&] { check_many_in_flight(*from_a); });
  check_all_gather(*from_b);
  first.join();
}

// Payload under its dtype, scalars under control, nothing for what stays on the rank.
inline void check_wire_bytes(Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  const std::uint64_t others = ranks - 1;
  const WireBytes before = comm.bytes_sent();
  Bytes send(100 * ranks), recv(100 * ranks), part(7), gathered(7 * ranks), data(33);
  comm.all_to_all(send, recv, {.dtype = DType::kE4m3})->wait();
  comm.all_gather(part, gathered, {.dtype = DType::kBf16})->wait();
  comm.broadcast(data, 0, {.dtype = DType::kFp32})->wait();
  double value = 1;
  comm.all_reduce(std::span(&value, 1), ReduceOp::kSum);
  comm.barrier(std::chrono::seconds(60));
  const WireBytes sent = comm.bytes_sent() - before;
  EXPECT_EQ(sent.of(DType::kE4m3), 100 * others);
  EXPECT_EQ(sent.of(DType::kBf16), 7 * others);
  EXPECT_EQ(sent.of(DType::kFp32), comm.rank() == 0 ? 33 * others : 0);
  EXPECT_EQ(sent.of(DType::kFp16), 0u);
  EXPECT_EQ(sent.control, 8 * others);
  EXPECT_EQ(sent.total_payload(), 107 * others + (comm.rank() == 0 ? 33 * others : 0));
  EXPECT_EQ(sent.envelopes > 0, comm.size() > 1);
}

// Mistakes that one rank can see alone: an error at the call, and nothing has been sent.
inline void check_bad_arguments(Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  Bytes small(3 * ranks), large(4 * ranks), odd(ranks + 1);
  EXPECT_THROW(comm.all_to_all(small, large, {}), ArgumentError);
  EXPECT_THROW(comm.all_to_all(small, small, {}), ArgumentError);
  if (ranks > 1) {
    Bytes odd_too(ranks + 1);
    EXPECT_THROW(comm.all_to_all(odd, odd_too, {}), ArgumentError);
  }
  EXPECT_THROW(comm.all_gather(small, odd, {}), ArgumentError);
  EXPECT_THROW(
      comm.all_gather(std::span(large).subspan(1, 3), std::span(large).first(3 * ranks), {}),
      ArgumentError);
  EXPECT_THROW(comm.broadcast(small, comm.size(), {}), ArgumentError);
  EXPECT_THROW(comm.broadcast(small, -1, {}), ArgumentError);
  int device = 0;
  const std::string text =
      message_of([&] { comm.broadcast(small, 0, {.stream = &device, .label = "weights"}); });
  expect_contains(text, "'weights'");
  expect_contains(text, "stream");
  check_all_gather(comm);
}

inline void check_same_texts(Communicator& comm) {
  check_same_on_all_ranks(comm, "config", "stage 1\nbucket 5\n");
  check_same_on_all_ranks(comm, "config", "");
  check_all_gather(comm);
}

// One rank has other text: all throw the same words, and the communicator still works.
inline void check_different_texts(Communicator& comm) {
  if (comm.size() < 2) return;
  const int odd_one = comm.size() - 1;
  const std::string common = "lr 1e-3\nstage 1\n";
  const std::string text = comm.rank() == odd_one ? common + "weight [8, 4]\nbias [4]\n"
                                                  : common + "weight [8, 8]\nbias [4]\n";
  const std::string story =
      message_of([&] { check_same_on_all_ranks(comm, "list of parameters", text); });
  expect_contains(story, "list of parameters differs between ranks");
  expect_contains(story, "line 3");
  expect_contains(story, "'weight [8, 8]'");
  expect_contains(story, "rank " + std::to_string(odd_one) + " has 'weight [8, 4]'");
  std::vector<char> own(2000, ' '), all(2000 * static_cast<std::size_t>(comm.size()));
  std::copy_n(story.begin(), std::min(story.size(), own.size()), own.begin());
  comm.gather_control(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  for (std::size_t r = 0; r < static_cast<std::size_t>(comm.size()); ++r) {
    EXPECT_EQ(std::string(all.begin() + static_cast<long>(r * 2000),
                          all.begin() + static_cast<long>(r * 2000 + 2000)),
              std::string(own.begin(), own.end()));
  }
}

struct NamedCheck {
  const char* name;
  void (*run)(Communicator&);
};
inline constexpr NamedCheck kCommChecks[] = {
    {"AllToAll", check_all_to_all},
    {"AllGather", check_all_gather},
    {"AllGatherInPlace", check_all_gather_in_place},
    {"Broadcast", check_broadcast},
    {"AllReduce", check_all_reduce},
    {"MaxKeepsNan", check_max_keeps_nan},
    {"GatherControl", check_gather_control},
    {"Barrier", check_barrier},
    {"ManyInFlight", check_many_in_flight},
    {"SplitOrder", check_split_order},
    {"SplitConcurrency", check_split_concurrency},
    {"ConcurrentSplits", check_concurrent_splits},
    {"WireBytes", check_wire_bytes},
    {"BadArguments", check_bad_arguments},
    {"SameTexts", check_same_texts},
    {"DifferentTexts", check_different_texts},
};

}  // namespace zerofp8::test
