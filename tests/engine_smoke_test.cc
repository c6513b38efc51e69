#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/thread_ranks.h"
#include "zerofp8/engine.h"

namespace zerofp8 {
namespace {

std::vector<float> train(const std::string& json, int ranks, int steps) {
  std::vector<float> result;
  test::run_ranks(ranks, [&](Communicator& comm) {
    const Settings s = resolve(Config::parse(json), {.data_ranks = ranks});
    std::vector<float> w(1000), w2(300);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = std::sin(float(i));
    for (std::size_t i = 0; i < w2.size(); ++i) w2[i] = std::cos(float(i));
    Engine engine(s, {{{.name = "a", .shape = {10, 100}}, w.data()}, {{.name = "b", .shape = {300}}, w2.data()}},
                  {.data = &comm});
    for (int t = 0; t < steps; ++t) {
      for (int k = 0; k < s.batch.accumulation_steps; ++k) {
        std::vector<float> g(1000), g2(300);
        for (std::size_t i = 0; i < g.size(); ++i) g[i] = w[i] * 0.5f;
        for (std::size_t i = 0; i < g2.size(); ++i) g2[i] = w2[i] * 0.5f;
        engine.add_gradient(0, g.data(), DType::kFp32);
        engine.add_gradient(1, g2.data(), DType::kFp32);
        engine.end_micro_batch();
      }
      const StepReport r = engine.step();
      EXPECT_TRUE(r.applied);
      if (comm.rank() == 0) printf("norm %.17g wire fp32 %lu e4m3 %lu ctl %lu\n", r.grad_norm, r.wire.of(DType::kFp32), r.wire.of(DType::kE4m3), r.wire.control);
    }
    EXPECT_EQ(engine.allocator().state_bytes(), std::size_t(engine.plan().state_bytes()));
    if (comm.rank() == 0) { result = w; puts(plan_table(engine.plan()).c_str()); }
  });
  return result;
}

TEST(EngineSmoke, Runs) {
  const auto a = train(R"({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})", 1, 3);
  const auto b = train(R"({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})", 2, 3);
  EXPECT_EQ(a, b);
  const auto c = train(R"({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zerofp8": {"opt_level": "O2"}})", 2, 3);
  const auto d = train(R"({"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zerofp8": {"opt_level": "O2"}})", 4, 3);
  for (std::size_t i = 0; i < a.size(); ++i) { ASSERT_NEAR(a[i], c[i], 0.004); ASSERT_NEAR(a[i], d[i], 0.004);}
}

}  // namespace
}  // namespace zerofp8
