// O0 on FP32 weights against LibTorch's Adam and AdamW over 1,000 steps fed the same gradients.
//
// Bound, per element after T steps: each step rounds p once or twice on either side (2 * 2^-24 |p|
// at most, together) and the update differs by a few roundings of m, v, the root and the quotient
// (16 * 2^-24 of an update of about lr, in all). Errors of m and v decay with their betas, so they
// do not add up over steps. T times that:
//   |difference| <= T * 2^-24 * (2 max|p| + 16 lr)
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <random>

#include "zerofp8/engine.h"
#include "zerofp8/zerofp8.h"

namespace zerofp8 {
namespace {

struct Options {
  const char* name;
  const char* type;
  double lr, beta2, eps, weight_decay;
};
void PrintTo(const Options& s, std::ostream* out) { *out << s.name; }

class TorchAdam : public testing::TestWithParam<Options> {};

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const Options& s, const torch::Tensor& p) {
  const auto betas = std::make_tuple(0.9, s.beta2);
  if (std::string(s.type) == "AdamW") {
    return std::make_unique<torch::optim::AdamW>(
        std::vector<torch::Tensor>{p},
        torch::optim::AdamWOptions(s.lr).betas(betas).eps(s.eps).weight_decay(s.weight_decay));
  }
  return std::make_unique<torch::optim::Adam>(
      std::vector<torch::Tensor>{p},
      torch::optim::AdamOptions(s.lr).betas(betas).eps(s.eps).weight_decay(s.weight_decay));
}

TEST_P(TorchAdam, StaysWithinTheStatedBound) {
  const Options s = GetParam();
  constexpr int kSteps = 1000;
  constexpr std::int64_t kElements = 1000;
  const Config config = Config::parse(
      R"({"optimizer": {"type": ")" + std::string(s.type) + R"(", "params": {"lr": )" +
      std::to_string(s.lr) + R"(, "betas": [0.9, )" + std::to_string(s.beta2) +
      R"(], "eps": 1e-8, "weight_decay": )" + std::to_string(s.weight_decay) + "}}}");
  const auto comm = make_self_communicator();
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> weight(kElements), scale(kElements);
  for (float& w : weight) w = normal(random);
  for (float& x : scale) x = std::exp(2 * normal(random));
  torch::Tensor p = torch::tensor(weight).set_requires_grad(true);
  const auto optimizer = torch_optimizer(s, p);
  Engine engine(resolve(config, {}), {{{.name = "w", .shape = {kElements}}, weight.data()}},
                {.data = comm.get()});
  double largest = 0;
  for (int t = 0; t < kSteps; ++t) {
    std::vector<float> gradient(kElements);
    for (std::int64_t i = 0; i < kElements; ++i) gradient[i] = scale[i] * (0.3f + normal(random));
    p.mutable_grad() = torch::tensor(gradient);
    optimizer->step();
    engine.add_gradient(0, gradient.data(), DType::kFp32);
    ASSERT_TRUE(engine.step().applied);
    for (const float w : weight) largest = std::max<double>(largest, std::fabs(w));
  }
  const double bound = kSteps * 0x1p-24 * (2 * largest + 16 * s.lr);
  double worst = 0;
  for (std::int64_t i = 0; i < kElements; ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(weight[i]) - p[i].item<double>()));
  }
  EXPECT_LE(worst, bound);
  EXPECT_GT(worst, 0) << "two implementations that round differently cannot agree in every bit";
  RecordProperty("worst_over_bound", std::to_string(worst / bound));
}

INSTANTIATE_TEST_SUITE_P(Options, TorchAdam,
                         testing::Values(Options{"AdamW", "AdamW", 1e-3, 0.999, 1e-8, 0.0},
                                         Options{"AdamWDecay", "AdamW", 1e-2, 0.95, 1e-8, 0.1},
                                         Options{"Adam", "Adam", 1e-3, 0.999, 1e-8, 0.0},
                                         Options{"AdamL2", "Adam", 1e-2, 0.95, 1e-8, 0.1}),
                         [](const auto& setup) { return std::string(setup.param.name); });

}  // namespace
}  // namespace zerofp8
