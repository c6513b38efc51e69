// What all ranks agree on before an update: the norm, whether anything was not finite, which
// parameters had a gradient anywhere.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "src/optim/adam_scalars.h"
#include "src/optim/engine_impl.h"
#include "zerofp8/error.h"
#include "zerofp8/random.h"

namespace zerofp8 {
namespace {

constexpr std::size_t kNamesBytes = 1024;

// One rank's part of the agreement; plain bytes on the wire.
struct Part {
  ExactSum sum;
  std::int32_t bad = 0;        // 1: a sum was not finite; 2: so was a gradient of this rank
  std::int32_t bad_rank = -1;  // data rank
  std::int32_t failed = 0;     // a communicator failed while the device was at work
};

template <class T>
std::vector<T> gather(Communicator& comm, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  comm.gather_control(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

// Adds up; `worst` is the first part with the gravest flag.
Part combine(const std::vector<Part>& parts, int& worst) {
  Part total;
  worst = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    total.sum.add(parts[i].sum);
    total.failed |= parts[i].failed;
    if (parts[i].bad <= total.bad) continue;
    total.bad = parts[i].bad;
    total.bad_rank = parts[i].bad_rank;
    worst = static_cast<int>(i);
  }
  return total;
}

}  // namespace

// Squares of one segment of this rank's shard.
void Engine::Impl::add_squares(const BucketState& b, const Segment& s, std::int64_t* limbs,
                               std::uint32_t* amax) {
  const int block = settings.block_size;
  const std::int64_t at = b.shard_begin - b.state_begin + s.offset;
  device->sum_squares({.x = b.gradient.main.at(at, block),
                       .residual = b.gradient.residual ? b.gradient.residual.at(at, block) : View{},
                       .factor = b.gradient.factor,
                       .elements = s.padded,
                       .block = block,
                       .limbs = limbs,
                       .amax = amax});
}

// Each logical element once: this rank's shard, unless another copy of it counts.
void Engine::Impl::count_squares() {
  for (BucketState& b : buckets) {
    for (const Segment& s : b.shard_segments) {
      const bool counts = b.first_replica && parameters[s.parameter].spec.counts_in_norm;
      add_squares(b, s, counts ? words->norm() : words->not_counted(),
                  words->received(s.parameter));
    }
  }
}

// Also the moment in which the host learns what was not finite.
ExactSum Engine::Impl::local_sum_squares() {
  count_squares();
  words->fetch();
  for (std::size_t i = 0; i < states.size(); ++i) {
    states[i].bad_source = words->bad_given(i);
    states[i].bad_sum = words->bad_received(i);
  }
  return words->sum();
}

std::vector<double> Engine::Impl::gradient_norms(NormKind kind) {
  struct Sum {
    std::int64_t limbs[ExactLimbs::kWords];
    std::uint32_t amax, padding;
  };
  std::vector<Sum> sums(parameters.size());
  PooledBuffer memory = pool.acquire(sums.size() * sizeof(Sum));
  device->zero(memory.data(), sums.size() * sizeof(Sum));
  for (const BucketState& b : buckets) {
    if (!b.first_replica || b.gradient.main.codes == nullptr) continue;
    for (const Segment& s : b.shard_segments) {
      Sum* sum = memory.as<Sum>() + s.parameter;
      add_squares(b, s, sum->limbs, &sum->amax);
    }
  }
  device->download(sums.data(), memory.data(), sums.size() * sizeof(Sum));
  // Of this rank's shards: squares, which add up, or maxima; NaN counts as more than any.
  const bool largest = kind == NormKind::kInfinity;
  std::vector<double> squares(parameters.size(), 0.0);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const double part = largest ? static_cast<double>(std::bit_cast<float>(sums[i].amax))
                                : ExactSum(sums[i].limbs).value();
    const double none = largest ? INFINITY : std::nan("");
    squares[i] = not_finite(sums[i].amax) ? none : part;
  }
  for (Communicator* comm : reduce_comms) {
    std::vector<double> theirs;
    for (std::size_t i = 0; i < squares.size(); ++i) {
      if (reduce_comm_of(static_cast<int>(i)) == comm) theirs.push_back(squares[i]);
    }
    comm->all_reduce(std::span(theirs), largest ? ReduceOp::kMax : ReduceOp::kSum);
    std::size_t at = 0;
    for (std::size_t i = 0; i < squares.size(); ++i) {
      if (reduce_comm_of(static_cast<int>(i)) == comm) squares[i] = theirs[at++];
    }
  }
  for (double& x : squares) {
    x = largest ? (std::isinf(x) ? std::nan("") : x) : std::sqrt(x);
  }
  return squares;
}

// A rank that had micro-batches, but fewer than another one: what it left out is missing in the
// average. Said once, and no error: where ranks use different layers, a backward pass may give this
// rank's parameters nothing, and re-entrant checkpoints count by segments.
void Engine::Impl::look_at_counts(const std::vector<std::int64_t>& counts) {
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  for (std::size_t r = 0; r < counts.size() && !told_of_counts; ++r) {
    if (counts[r] == 0 || counts[r] == most) continue;
    told_of_counts = true;
    log(fmt::format(
        "zerofp8: data rank {} ended its step after micro-batch {} of {}; the average counts what "
        "is missing as zeros: if that is not meant, give all ranks the same number of "
        "micro-batches (said once)",
        r, counts[r], most));
  }
}

// A parameter is used if any rank of its reduce group, or any holder of a tied copy, had a
// gradient.
void Engine::Impl::agree_on_use() {
  for (ParameterState& state : states) state.used_anywhere = false;
  for (Communicator* comm : reduce_comms) {
    std::vector<std::uint8_t> mine;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (reduce_comm_of(static_cast<int>(i)) == comm) mine.push_back(states[i].used);
    }
    const std::size_t counts_at = mine.size();
    if (comm == groups.data) mine.resize(counts_at + sizeof micro_batches);
    std::memcpy(mine.data() + counts_at, &micro_batches, mine.size() - counts_at);
    const std::size_t n = mine.size();
    std::vector<std::uint8_t> all(n * static_cast<std::size_t>(comm->size()));
    comm->gather_control(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
    std::size_t at = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (reduce_comm_of(static_cast<int>(i)) != comm) continue;
      for (int r = 0; r < comm->size(); ++r) {
        states[i].used_anywhere |= all[static_cast<std::size_t>(r) * n + at] != 0;
      }
      ++at;
    }
    if (comm != groups.data) continue;
    std::vector<std::int64_t> counts(static_cast<std::size_t>(comm->size()));
    for (std::size_t r = 0; r < counts.size(); ++r) {
      std::memcpy(&counts[r], all.data() + r * n + counts_at, sizeof counts[r]);
    }
    look_at_counts(counts);
  }
  std::map<std::string, BucketState*> tied;
  for (BucketState& b : buckets) {
    if (b.tied_comm != nullptr) tied[b.bucket->tied] = &b;
  }
  for (auto& [name, b] : tied) {
    ParameterState& state = states[b->bucket->placements.front().parameter];
    std::int32_t used = state.used_anywhere;
    b->tied_comm->all_reduce(std::span(&used, 1), ReduceOp::kMax);
    state.used_anywhere = used != 0;
  }
}

// Distinct ones, in the same order on all ranks.
std::vector<Communicator*> Engine::Impl::payload_comms() const {
  std::vector<Communicator*> all;
  const auto add = [&](Communicator* comm) {
    if (comm != nullptr && std::find(all.begin(), all.end(), comm) == all.end()) {
      all.push_back(comm);
    }
  };
  if (device_step) {  // the parts of a step
    add(groups.data);
    add(groups.model);
  }
  for (const BucketState& b : buckets) {
    for (Communicator* comm : {b.reduce_ranks.in_node, b.reduce_ranks.across, b.shard_comm,
                               b.replica_comm, b.tied_comm}) {
      add(comm);
    }
  }
  return all;
}

// What a device received may be without meaning then, although everything that was queued has run.
std::string Engine::Impl::failure_on_device() const {
  for (const Communicator* comm : payload_comms()) {
    if (const std::string failure = comm->failure(); !failure.empty()) return failure;
  }
  return "";
}

void Engine::Impl::agree() {
  Part part;
  part.sum = local_sum_squares();
  for (const ParameterState& state : states) {
    part.bad = std::max(part.bad, state.bad_source ? 2 : state.bad_sum ? 1 : 0);
  }
  part.bad_rank = part.bad != 0 ? data_rank() : -1;
  const std::string failure = failure_on_device();
  part.failed = !failure.empty();
  int rank = 0, slice = 0;
  Part total = combine(gather(*groups.data, part), rank);
  if (groups.model != nullptr) total = combine(gather(*groups.model, total), slice);
  if (total.failed != 0) throw CommError(first_error(groups.data, groups.model, failure));
  agreed = {};
  agreed.bad = total.bad != 0;
  agreed.bad_rank = total.bad_rank;
  agreed.norm = agreed.bad ? std::nan("") : std::sqrt(total.sum.value());
  agreed.clip = agreed.bad ? 1.0 : clip_coefficient(agreed.norm, settings.gradient_clipping);
  if (agreed.bad) name_bad_parameters(rank, slice);
}

// Names travel only when there is something to report. The first one comes from the rank that is
// reported: data rank `rank` of each slice, model slice `slice`; there, from what it was given.
void Engine::Impl::name_bad_parameters(int rank, int slice) {
  struct Names {
    char text[kNamesBytes];
  };
  const auto merge = [](std::vector<Names> all, int first) {
    std::set<std::string> seen;
    std::string list;
    std::rotate(all.begin(), all.begin() + first, all.begin() + first + 1);
    for (const Names& names : all) {
      std::size_t begin = 0;
      const std::string text(names.text);
      while (begin < text.size()) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        const std::string name = text.substr(begin, end - begin);
        begin = end + 1;
        if (seen.size() < 8 && seen.insert(name).second) list += (list.empty() ? "" : "\n") + name;
      }
    }
    return list;
  };
  const auto pack = [](const std::string& list) {
    Names names{};
    std::memcpy(names.text, list.data(), std::min(list.size(), kNamesBytes - 1));
    return names;
  };
  std::string mine;
  for (const bool source : {true, false}) {
    for (std::size_t i = 0; i < states.size(); ++i) {
      const bool listed = source ? states[i].bad_source : states[i].bad_sum;
      if (listed && mine.size() < kNamesBytes / 2) mine += parameters[i].spec.name + "\n";
    }
  }
  std::string list = merge(gather(*groups.data, pack(mine)), rank);
  if (groups.model != nullptr) list = merge(gather(*groups.model, pack(list)), slice);
  agreed.bad_parameter = list.substr(0, list.find('\n'));
  agreed.bad_list = list;
}

// One exchange before anything is changed: does any rank's update overflow, do all data ranks mean
// the same update, and is it one? Hyper-parameters that differ would let weights drift apart
// without a word. What is wrong on one slice is told on all of them.
bool Engine::Impl::agree_on_update(bool overflow) {
  constexpr std::int32_t kOverflow = 1, kFault = 2;
  struct Vote {
    std::int64_t state;
    std::uint64_t digest, edits;
  };
  std::string fault = fault_of_groups();
  if (fault.empty()) fault = tied_edits_that_differ();
  std::string text = fmt::format("{} applied steps{}", applied, text_of(hyper));
  if (trainer_scale != 1) text += fmt::format("; the trainer's loss scale {}", trainer_scale);
  const Vote mine{!fault.empty() ? kFault
                  : overflow     ? kOverflow
                                 : 0,
                  hash_name(text), digest_of_edits()};
  std::vector<Vote> votes(static_cast<std::size_t>(groups.data->size()));
  groups.data->gather_control(std::as_bytes(std::span(&mine, 1)),
                              std::as_writable_bytes(std::span(votes)));
  std::int32_t any = 0;
  std::size_t other = 0, edited = 0;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    any = std::max(any, static_cast<std::int32_t>(votes[r].state));
    if (other == 0 && votes[r].digest != votes[0].digest) other = r;
    if (edited == 0 && votes[r].edits != votes[0].edits) edited = r;
  }
  if (other != 0 || edited != 0) any = kFault;
  if (groups.model != nullptr) groups.model->all_reduce(std::span(&any, 1), ReduceOp::kMax);
  if (any != kFault) return any != 0;
  if (other != 0) {
    const std::vector<std::string> texts = gather_texts(*groups.data, text);
    fault = fmt::format(
        "ranks disagree on this step: data rank 0 has \"{}\", data rank {} has \"{}\"; "
        "set the same hyper-parameters on every rank",
        texts[0], other, texts[other]);
  } else if (edited != 0) {
    fault = edits_that_differ(edited);
  }
  throw ArgumentError(first_error(groups.data, groups.model, fault));
}

}  // namespace zerofp8
