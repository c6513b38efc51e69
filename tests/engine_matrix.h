// One cell of the supported combinations: three steps of the engine against float64.
//
// 1. The reduced gradient. The reference is the plain average; the engine may differ by what its
//    formats round, added up over what is rounded (see gradient_bound): with FP32 accumulation and
//    wire not at all, because the test's gradients have exact sums.
// 2. The step. float64 AdamW is fed the engine's own reduced gradient, which (1) has judged. Errors
//    of stored moments are carried along as intervals [x - d, x + d] (see StepReference), so the
//    bound on the weights after three steps is derived and not tuned.
// 3. Norm, clip coefficient, step counts, and the same weights on every rank.
#pragma once

#include <algorithm>

#include "tests/engine_fixture.h"

namespace zerofp8::test {

inline constexpr int kBlock = 128;
inline constexpr double kFp32Half = 0x1p-24;  // half an ulp of FP32, relative

// Rounding to nearest of one stored number: at most `relative` times it, or `absolute` times the
// largest magnitude of its block (block-scaled), or `floor` (plain fp16).
struct Rounds {
  double relative = 0, absolute = 0, floor = 0;
  double error(double x, double amax) const {
    return std::max({relative * x, absolute * amax, floor}) * (1 + 0x1p-18);
  }
};
inline Rounds rounding_of(DType dtype, bool block_scaled) {
  switch (dtype) {
    case DType::kBf16:
      return {0x1p-8, 0, 0x1p-134};
    case DType::kFp16:
      // Block scaled: amax is in (2^14, 2^15], half the smallest step is 2^-25.
      return block_scaled ? Rounds{0x1p-11, 0x1p-25 / 0x1p14, 0} : Rounds{0x1p-11, 0, 0x1p-25};
    case DType::kE4m3:
      return {0x1p-4, 0x1p-10 / 448, 0};
    case DType::kE5m2:
      return {0x1p-3, 0x1p-17 / 57344, 0};
    default:
      return {};
  }
}

struct CellGradients {  // [rank][micro-batch][element] of one parameter, loss scale included
  std::vector<std::vector<std::vector<double>>> g;
};

// Sums of magnitudes of one block and the largest of them.
struct Magnitudes {
  std::vector<double> x;
  double amax = 0;
};

// Largest error of sum over ranks and micro-batches, for the elements [begin, end) of one block.
// Accumulating: each of A roundings acts on a partial sum of at most the sum of magnitudes, grown
// by the roundings before it, (1 + relative)^A. Sending: one more rounding, unless the
// accumulator's codes are the message; with two levels one of each rank's message and one of each
// node's sum. Error feedback: what is lost is the rounding of a residual that is itself a rounding
// error.
inline std::vector<double> gradient_bound(const Settings& s, const CellGradients& all,
                                          std::size_t begin, std::size_t end) {
  const std::size_t ranks = all.g.size(), a = all.g[0].size(), n = end - begin;
  const auto per_node = static_cast<std::size_t>(s.ranks_per_node.value);
  const Rounds acc = rounding_of(s.accumulation, true), wire = rounding_of(s.gradient_wire, false);
  const Rounds in_node = per_node > 1 ? rounding_of(s.in_node_wire, false) : Rounds{};
  const bool plain_fp16 = s.gradient_wire == DType::kFp16;
  const bool as_it_is = s.accumulation.value == s.gradient_wire.value && !plain_fp16 &&
                        !s.accumulation_sharded && per_node == 1;
  const double growth =
      std::pow(1 + acc.relative + wire.relative + in_node.relative, double(a) + 1);
  std::vector<double> bound(n);
  const auto rounds = [&](const Rounds& r, const Magnitudes& m, double times, bool feedback) {
    for (std::size_t j = 0; j < n; ++j) {
      const double e = r.error(m.x[j] * growth, m.amax * growth);
      const double largest = r.error(m.amax * growth, m.amax * growth);
      bound[j] += times * (feedback ? r.error(e, largest) : e);
    }
  };
  const auto sum = [&](std::size_t rank, std::size_t to_rank, std::size_t k, std::size_t to_k) {
    Magnitudes m{std::vector<double>(n)};
    for (std::size_t j = 0; j < n; ++j) {
      for (std::size_t r = rank; r < to_rank; ++r) {
        for (std::size_t i = k; i < to_k; ++i) m.x[j] += std::fabs(all.g[r][i][begin + j]);
      }
      m.amax = std::max(m.amax, m.x[j]);
    }
    return m;
  };
  const Magnitudes everything = sum(0, ranks, 0, a);
  const std::size_t sent = s.accumulation_sharded ? 1 : a;  // micro-batches per message
  for (std::size_t k = 0; k < a && !as_it_is; k += sent) {
    for (std::size_t r = 0; r < ranks && per_node > 1; ++r) {
      rounds(in_node, sum(r, r + 1, k, k + sent), 1, false);
    }
    for (std::size_t r = 0; r < ranks; r += per_node) {
      rounds(wire, sum(r, r + per_node, k, k + sent), 1, false);
    }
  }
  for (std::size_t r = 0; r < ranks && !s.accumulation_sharded; ++r) {
    rounds(acc, sum(r, r + 1, 0, a), double(a), s.error_feedback);
  }
  if (s.accumulation_sharded) rounds(acc, everything, double(a), s.error_feedback);
  // FP32: decoding multiplies by a scale and adds; the rank-order sum; the one division.
  const bool exact =
      s.accumulation == DType::kFp32 && s.gradient_wire == DType::kFp32 && in_node.relative == 0;
  const double roundings = exact ? 2 : double(ranks * a) * 3 + 4;
  for (std::size_t j = 0; j < n; ++j) bound[j] += roundings * kFp32Half * everything.x[j] * growth;
  return bound;
}

// float64 AdamW of one parameter, with the intervals in which the engine's stored numbers lie.
class StepReference {
 public:
  StepReference(const Settings& s, std::vector<double> p, bool fp32_moments)
      : hyper_{.lr = s.adam.value.lr,
               .beta1 = s.adam.value.beta1,
               .beta2 = s.adam.value.beta2,
               .eps = s.adam.value.eps,
               .weight_decay = s.adam.value.weight_decay},
        p_(std::move(p)),
        dp_(p_.size()),
        m_(p_.size()),
        dm_(p_.size()),
        v_(p_.size()),
        dr_(p_.size()) {
    const auto stochastic = [](DType d) -> Rounds {  // one step instead of half of one
      if (d == DType::kUe4m4) return {0x1p-4, 0x1p-10 / 496, 0};
      if (d == DType::kBf16) return {0x1p-7, 0, 0x1p-133};
      return {0x1p-10, 0x1p-24 / 0x1p14, 0};
    };
    if (!fp32_moments && s.exp_avg != DType::kFp32) {
      // Nearest for normal codes, one whole step for subnormal ones; all stochastic: twice that.
      const bool all = s.adam.value.beta1 > 0.93;
      round_m_ = rounding_of(s.exp_avg, true);
      round_m_.relative *= all ? 2 : 1;
      round_m_.absolute *= 2;
    }
    if (!fp32_moments && s.exp_avg_sq != DType::kFp32) round_r_ = stochastic(s.exp_avg_sq);
    quantised_ = round_m_.relative > 0 || round_r_.relative > 0;
    // bf16 + 8 bits: 16 significant ones; fp16 + 8: 19, and steps of 2^-32 below 2^-14.
    if (s.master == MasterWeights::kBits8) {
      round_p_ =
          s.weight == DType::kBf16 ? Rounds{0x1p-16, 0, 0x1p-134} : Rounds{0x1p-19, 0, 0x1p-33};
    } else if (s.master == MasterWeights::kBits16 && s.weight == DType::kFp16) {
      round_p_ = {0, 0, 0x1p-41};
    } else if (s.master == MasterWeights::kNone && s.weight != DType::kFp32) {  // one whole ulp
      round_p_ =
          s.weight == DType::kBf16 ? Rounds{0x1p-7, 0, 0x1p-133} : Rounds{0x1p-10, 0, 0x1p-24};
    }
  }

  void step(const std::vector<float>& gradient, double clip) {
    ++t_;
    const double b1 = hyper_.beta1, b2 = hyper_.beta2;
    guard_ = b1 * b1 / b2 * guard_ + (1 - b1) * (1 - b1) / (1 - b2);
    const double c1 = 1 - std::pow(b1, t_), c2 = 1 - std::pow(b2, t_);
    const double cap =
        std::sqrt(guard_ * c2) / c1 * (1 + 0x1p-14);  // |update| / lr, Cauchy-Schwarz
    for (std::size_t begin = 0; begin < p_.size(); begin += kBlock) {
      const std::size_t end = std::min(p_.size(), begin + kBlock);
      double amax_m = 0, amax_r = 0;
      std::vector<double> high(end - begin);
      for (std::size_t j = begin; j < end; ++j) {
        one(j, double(gradient[j]) * clip, c1, c2, cap, high[j - begin]);
        amax_m = std::max(amax_m, std::fabs(m_[j]) + dm_[j]);
        amax_r = std::max(amax_r, high[j - begin]);
      }
      for (std::size_t j = begin; j < end; ++j) {
        dm_[j] += round_m_.error(std::fabs(m_[j]) + dm_[j], amax_m);
        dr_[j] += round_r_.error(high[j - begin], amax_r);
      }
    }
  }
  double p(std::size_t j) const { return p_[j]; }
  double dp(std::size_t j) const { return dp_[j]; }

 private:
  // Before moments are stored: m_, dm_, v_, dr_ (of the root) and p_, dp_ of element j.
  void one(std::size_t j, double g, double c1, double c2, double cap, double& high) {
    const double b1 = hyper_.beta1, b2 = hyper_.beta2;
    const double r_old = std::sqrt(v_[j]);
    m_[j] = b1 * m_[j] + (1 - b1) * g;
    v_[j] = b2 * v_[j] + (1 - b2) * g * g;
    dm_[j] = b1 * dm_[j] + 4 * kFp32Half * (std::fabs(m_[j]) + dm_[j] + std::fabs(g));
    const double fresh = (1 - b2) * g * g, r = std::sqrt(v_[j]);
    const double low_old = std::max(0.0, r_old - dr_[j]), high_old = r_old + dr_[j];
    double low = std::sqrt(b2 * low_old * low_old + fresh);
    high = std::sqrt(b2 * high_old * high_old + fresh);
    if (quantised_) high = std::max(high, (std::fabs(m_[j]) + dm_[j]) / std::sqrt(guard_));
    low *= 1 - 8 * kFp32Half;
    high *= 1 + 8 * kFp32Half;
    dr_[j] = std::max(high - r, r - low);
    const auto ratio = [&](double m, double root) {
      const double u = m / c1 / (root / std::sqrt(c2) + hyper_.eps);
      return std::clamp(u, -cap, cap);
    };
    const double exact = ratio(m_[j], r);
    double worst = 0;
    for (const double m : {m_[j] - dm_[j], m_[j] + dm_[j]}) {
      for (const double root : {low, high}) {
        worst = std::max(worst, std::fabs(ratio(m, root) - exact));
      }
    }
    worst += 8 * kFp32Half * std::fabs(exact);
    p_[j] = p_[j] * (1 - hyper_.lr * hyper_.weight_decay) - hyper_.lr * exact;
    dp_[j] += hyper_.lr * worst + 3 * kFp32Half * (std::fabs(p_[j]) + hyper_.lr);
    dp_[j] += round_p_.error(std::fabs(p_[j]) + dp_[j], 0);
  }

  ref::AdamHyper hyper_;
  std::vector<double> p_, dp_, m_, dm_, v_, dr_;
  Rounds round_m_, round_r_, round_p_;
  bool quantised_ = false;
  double guard_ = 0;
  int t_ = 0;
};

// One rank's run of a cell. Rank 0 compares; all ranks must end with its weights.
class CellRun {
 public:
  CellRun(const Recipe& recipe, Communicator& comm)
      : recipe_(recipe),
        comm_(comm),
        settings_(recipe.settings(comm.size())),
        model_(odd_shapes(), recipe),
        engine_(settings_, model_.parameters(), {.data = &comm}, quiet()) {
    for (std::size_t i = 0; judge() && i < model_.count(); ++i) {
      std::vector<double> p(model_.numel(i));
      for (std::size_t j = 0; j < p.size(); ++j) p[j] = model_.at(i, j);
      const auto below = static_cast<std::size_t>(settings_.fp32_moments_below.value);
      const bool small = model_.specs()[i].shape.size() <= 1 || p.size() < below;
      references_.emplace_back(settings_, std::move(p), below > 0 && small);
    }
  }

  void run() {
    for (int t = 0; t < 3 && !testing::Test::HasFatalFailure(); ++t) step(t);
    for (std::size_t i = 0; i < model_.count() && !testing::Test::HasFatalFailure(); ++i) {
      check_weights(i);
    }
  }

 private:
  bool judge() const { return comm_.rank() == 0; }
  std::vector<double> gradient(int t, int rank, int k, std::size_t i) const {
    std::vector<double> g = made_up_gradients(t, rank, k, i, model_.numel(i));
    for (double& x : g) x *= engine_.loss_scale();
    return g;
  }

  void step(int t) {
    for (int k = 0; k < recipe_.micro_batches; ++k) {
      for (std::size_t i = 0; i < model_.count(); ++i) {
        add(engine_, int(i), gradient(t, comm_.rank(), k, i),
            (t + k) % 2 == 0 ? recipe_.dtype() : DType::kFp32);
      }
      engine_.end_micro_batch();
    }
    engine_.reduce_gradients();
    double squares = 0;
    std::vector<std::vector<float>> found;
    for (std::size_t i = 0; i < model_.count(); ++i) {
      found.push_back(engine_.full_state(int(i), StateKind::kGradient));
      for (const float x : found[i]) squares += double(x) * x;
      if (judge()) check_gradient(t, i, found[i]);
    }
    const double norm = std::sqrt(squares);
    ASSERT_NEAR(engine_.grad_norm() / norm, 1, 1e-12);
    const StepReport report = engine_.step();
    ASSERT_TRUE(report.applied);
    const double clip =
        recipe_.clipping > 0 ? std::min(1.0, recipe_.clipping / (norm + 1e-6)) : 1.0;
    ASSERT_NEAR(report.clip_coefficient, clip, 1e-7 * clip);
    for (std::size_t i = 0; i < references_.size(); ++i) references_[i].step(found[i], clip);
  }

  void check_gradient(int t, std::size_t i, const std::vector<float>& found) const {
    CellGradients all;
    for (int r = 0; r < comm_.size(); ++r) {
      all.g.emplace_back();
      for (int k = 0; k < recipe_.micro_batches; ++k)
        all.g[std::size_t(r)].push_back(gradient(t, r, k, i));
    }
    const double divisor = double(comm_.size()) * recipe_.micro_batches * engine_.loss_scale();
    for (std::size_t begin = 0; begin < found.size(); begin += kBlock) {
      const std::size_t end = std::min(found.size(), begin + kBlock);
      const std::vector<double> bound = gradient_bound(settings_, all, begin, end);
      for (std::size_t j = begin; j < end; ++j) {
        double sum = 0;
        for (const auto& rank : all.g) {
          for (const auto& micro : rank) sum += micro[j];
        }
        ASSERT_LE(std::fabs(found[j] - sum / divisor), bound[j - begin] / divisor)
            << "step " << t << ", parameter " << i << " element " << j << ": gradient " << found[j]
            << ", reference " << sum / divisor;
      }
    }
  }

  void check_weights(std::size_t i) {
    const std::vector<float> master = engine_.full_state(int(i), StateKind::kMaster);
    ASSERT_EQ(engine_.step_of(int(i)), 3);
    for (std::size_t j = 0; judge() && j < model_.numel(i); ++j) {
      ASSERT_LE(std::fabs(master[j] - references_[i].p(j)), references_[i].dp(j))
          << "parameter " << i << " element " << j << ": master " << master[j] << ", reference "
          << references_[i].p(j);
      // The weight is the master rounded to nearest.
      const bool rounded = recipe_.model != "fp32" && settings_.master != MasterWeights::kNone;
      const double half = rounded ? format_of(recipe_.dtype()).ulp(master[j]) / 2 : 0;
      ASSERT_LE(std::fabs(model_.at(i, j) - master[j]), half) << "parameter " << i << " " << j;
    }
    const auto mine = model_.bytes()[i];
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(comm_.size()));
    comm_.gather_control(mine, all);
    ASSERT_TRUE(std::equal(mine.begin(), mine.end(), all.begin()));
  }

  const Recipe& recipe_;
  Communicator& comm_;
  Settings settings_;
  Model model_;
  Engine engine_;
  std::vector<StepReference> references_;
};

inline void check_cell(const Recipe& recipe, Communicator& comm) { CellRun(recipe, comm).run(); }

}  // namespace zerofp8::test
