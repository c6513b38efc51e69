// What a user of the library writes first: a config, one parameter, one step.
#include <zerofp8/engine.h>
#include <zerofp8/zerofp8.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  using namespace zerofp8;
  const auto comm = make_self_communicator();
  const Settings settings = resolve(
      Config::parse(
          R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}})"),
      {});
  std::vector<float> weight(17, 1.0f);
  const std::vector<float> gradient(17, 0.5f);
  Engine engine(settings, {{{.name = "w", .shape = {17}}, weight.data()}}, {.data = comm.get()});
  engine.add_gradient(0, gradient.data(), DType::kFp32);
  const StepReport report = engine.step();
  // Adam's first step moves by lr: 1 * (1 - 0.1 * 0.1) - 0.1 = 0.89.
  const bool right = report.applied && std::fabs(weight[16] - 0.89f) < 1e-6f;
  std::printf("zerofp8 %s: weight %.6f\n", version(), weight[16]);
  return right ? 0 : 1;
}
