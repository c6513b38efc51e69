// Helpers of the tests about accumulating and reducing.
#pragma once

#include "tests/engine_fixture.h"

namespace zerofp8::test {

inline const std::vector<ParameterSpec> kOne = {{.name = "w", .shape = {1, 4}}};

// The reduced gradient of parameter 0 on `ranks` ranks, after `fill` has added what each rank has.
inline std::vector<float> reduced(const Recipe& recipe, int ranks,
                                  const std::function<void(Engine&, int rank)>& fill,
                                  const std::vector<ParameterSpec>& specs = kOne,
                                  bool loss_is_divided = false) {
  std::vector<float> result;
  run_ranks(ranks, [&](Communicator& comm) {
    Model model(specs, recipe);
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm},
                  quiet(loss_is_divided));
    fill(engine, comm.rank());
    engine.reduce_gradients();
    const std::vector<float> g = engine.full_state(0, StateKind::kGradient);
    if (comm.rank() == 0) result = g;
  });
  return result;
}

inline void micro_batches(Engine& engine, const std::vector<double>& values) {
  for (const double x : values) {
    add_constant(engine, 0, x);
    engine.end_micro_batch();
  }
}

}  // namespace zerofp8::test
