// Quantised moments over many steps, through the engine on one rank, against float64 Adam fed the
// same gradients: elements that fall silent, blocks that decay, amax drops, outliers.
#include <array>
#include <random>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

constexpr std::size_t kElements = 256;  // two blocks
constexpr double kLr = 1e-3;

struct Moments {
  const char* name;
  const char* level;
  const char* keys;
  const char* model;
};
constexpr Moments kMoments[] = {
    {"O0", "O0", "", "fp32"},
    {"O2", "O2", "", "fp32"},
    {"O3", "O3", "", "fp32"},
    {"O2_bf16", "O2", "", "bf16"},
    {"O3_bf16", "O3", "", "bf16"},
    {"O3_fp16", "O3", "", "fp16"},
    {"bf16_bf16", "O0", R"(, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16")", "fp32"},
    {"fp16_fp16", "O0", R"(, "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16")", "fp32"},
    {"fp8_fp32", "O0", R"(, "exp_avg_dtype": "fp8_e4m3")", "fp32"},
    {"fp32_fp8", "O0", R"(, "exp_avg_sq_dtype": "fp8_ue4m4")", "fp32"},
    {"bf16_fp8", "O0", R"(, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8_ue4m4")", "fp32"},
};

struct Betas {
  double beta1, beta2;
};
constexpr Betas kBetas[] = {{0.9, 0.95}, {0.9, 0.999}, {0.95, 0.999}};

// Trains the engine and float64 Adam side by side; `gradient` fills the gradient of a step.
class SideBySide {
 public:
  SideBySide(const Moments& moments, const Betas& betas)
      : recipe_{.model = moments.model,
                .level = moments.level,
                .accumulation = "fp32",  // what is judged are the moments
                .wire = "fp32",
                .lr = kLr,
                .beta1 = betas.beta1,
                .beta2 = betas.beta2,
                .fp16 = R"("loss_scale": 1)",
                .zerofp8 = std::string(R"("fp32_moments_below": 0)") + moments.keys},
        betas_(betas),
        comm_(make_self_communicator()),
        model_({{.name = "w", .shape = {2, 128}}}, recipe_,
               [](std::size_t, std::size_t) { return 0.125; }),
        engine_(recipe_.settings(1), model_.parameters(), {.data = comm_.get()}, quiet()) {
    for (ref::Adam64& r : reference_) r.p = 0.125;
  }

  template <class Gradient>
  void step(const Gradient& gradient) {
    for (std::size_t j = 0; j < kElements; ++j) g_[j] = static_cast<float>(gradient(j));
    engine_.add_gradient(0, g_.data(), DType::kFp32);
    ASSERT_TRUE(engine_.step().applied);
    const ref::AdamHyper hyper{.lr = kLr, .beta1 = betas_.beta1, .beta2 = betas_.beta2};
    for (std::size_t j = 0; j < kElements; ++j) reference_[j].step(g_[j], hyper);
    ++t_;
    guard_ = betas_.beta1 * betas_.beta1 / betas_.beta2 * guard_ +
             (1 - betas_.beta1) * (1 - betas_.beta1) / (1 - betas_.beta2);
  }
  // The largest update that any sequence of gradients can cause in exact Adam.
  double largest_update() const {
    return kLr * std::sqrt(guard_ * (1 - std::pow(betas_.beta2, t_))) /
           (1 - std::pow(betas_.beta1, t_));
  }
  std::vector<float> weights() { return engine_.full_state(0, StateKind::kMaster); }
  double exact(std::size_t j) const { return reference_[j].p; }

 private:
  Recipe recipe_;
  Betas betas_;
  std::unique_ptr<Communicator> comm_;
  Model model_;
  Engine engine_;
  std::array<ref::Adam64, kElements> reference_{};
  std::array<float, kElements> g_{};
  double guard_ = 0;
  int t_ = 0;
};

std::string name_of(const Moments& m, const Betas& b) {
  return fmt::format("{} betas {} {}", m.name, b.beta1, b.beta2);
}

class Drift : public testing::TestWithParam<Moments> {};

// Half of each block has no gradient after step 30, the other half goes on for 30,000 steps.
TEST_P(Drift, SilentElementsMoveNoMoreThanFp32s) {
  for (const Betas& betas : kBetas) {
    SideBySide run(GetParam(), betas);
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const auto silent = [](std::size_t j) { return j % 2 == 1; };
    std::vector<float> begin;
    std::vector<double> exact_begin(kElements);
    for (int t = 0; t < 30000; ++t) {
      if (t == 30) {
        begin = run.weights();
        for (std::size_t j = 0; j < kElements; ++j) exact_begin[j] = run.exact(j);
      }
      std::array<double, kElements> g;
      for (double& x : g) x = t < 30 ? normal(random) : 0;
      for (std::size_t j = 0; j < kElements && t >= 30; ++j) {
        g[j] = silent(j) ? 0 : made_up_gradient(t % 4096, 0, 0, 0, j);
      }
      run.step([&](std::size_t j) { return g[j]; });
    }
    const std::vector<float> end = run.weights();
    double sum = 0, exact_sum = 0, worst = 0;
    for (std::size_t j = 0; j < kElements; ++j) {
      if (!silent(j)) continue;
      sum += std::fabs(double(end[j]) - begin[j]);
      exact_sum += std::fabs(run.exact(j) - exact_begin[j]);
      worst = std::max(worst, std::fabs(double(end[j]) - begin[j]));
    }
    fmt::print("silent drift {}: {:.3f} of FP32's, worst element {:.2f} mean drifts\n",
               name_of(GetParam(), betas), sum / exact_sum,
               worst / (exact_sum / (kElements / 2.0)));
    EXPECT_LE(sum, 1.2 * exact_sum) << name_of(GetParam(), betas);
  }
}

// Error of the path relative to its length, and no update beyond what Adam can do at all.
struct PathError {
  double relative = 0, largest = 0;
};
template <class Gradient>
PathError follow(const Moments& moments, const Betas& betas, int steps, const Gradient& gradient) {
  SideBySide run(moments, betas);
  PathError error;
  std::vector<float> before = run.weights();
  std::vector<double> exact_before(kElements, 0.125), length(kElements);
  for (int t = 0; t < steps; ++t) {
    run.step([&](std::size_t j) { return gradient(t, j); });
    const std::vector<float> now = run.weights();
    for (std::size_t j = 0; j < kElements; ++j) {
      error.largest =
          std::max(error.largest, std::fabs(double(now[j]) - before[j]) / run.largest_update());
      length[j] += std::fabs(run.exact(j) - exact_before[j]);
      exact_before[j] = run.exact(j);
    }
    before = now;
  }
  double sum = 0, sum_length = 0;
  for (std::size_t j = 0; j < kElements; ++j) {
    sum += std::fabs(before[j] - run.exact(j));
    sum_length += length[j];
  }
  error.relative = sum / sum_length;
  return error;
}

double draw(int t, std::size_t j) { return made_up_gradient(t, 1, 0, 0, j); }

void expect_followed(const char* what, double bound,
                     const std::function<double(int, std::size_t)>& gradient, int steps) {
  for (const Moments& moments : kMoments) {
    for (const Betas& betas : kBetas) {
      const PathError error = follow(moments, betas, steps, gradient);
      const bool exact = std::string(moments.name) == "O0";
      EXPECT_LE(error.relative, exact ? 1e-3 : bound) << what << " " << name_of(moments, betas);
      // bf16 and fp16 masters of 24 bits round the weight as well.
      EXPECT_LE(error.largest, 1.01) << what << " " << name_of(moments, betas);
    }
  }
}

TEST(Following, DecayingBlocks) {
  expect_followed(
      "decay", 0.08, [](int t, std::size_t j) { return draw(t, j) * std::pow(0.99, t); }, 1000);
}
TEST(Following, AmaxDropsByAMillion) {
  expect_followed(
      "drop", 0.08, [](int t, std::size_t j) { return draw(t, j) * (t < 100 ? 1 : 1e-6); }, 1000);
}
TEST(Following, OneOutlier) {
  expect_followed(
      "outlier", 0.08,
      [](int t, std::size_t j) { return draw(t, j) * (t == 100 && j % 128 == 5 ? 1e3 : 1); }, 1000);
}

INSTANTIATE_TEST_SUITE_P(Moments, Drift, testing::ValuesIn(kMoments),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace zerofp8::test
