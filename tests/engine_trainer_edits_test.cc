// Gradients that a trainer throws away or scales after backward, and state that comes from
// elsewhere.
#include "tests/engine_fixture.h"
#include "tests/messages.h"

namespace zerofp8::test {
namespace {

struct Cell {
  int ranks, stage;
  const char* level;
  std::string name() const { return fmt::format("{}_ranks_stage_{}_{}", ranks, stage, level); }
};
void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.name(); }

class TrainerEdits : public testing::TestWithParam<Cell> {
 protected:
  Recipe recipe(int micro_batches = 1) const {
    return {.model = "bf16",
            .stage = GetParam().stage,
            .level = GetParam().level,
            .micro_batches = micro_batches,
            .weight_decay = 0.1,
            .zerofp8 = R"("fp32_moments_below": 0)"};
  }
  bool sharded() const { return GetParam().stage == 2; }
};
std::vector<Cell> cells() {
  std::vector<Cell> list;
  for (const int ranks : {1, 2, 4}) {
    for (const int stage : {0, 1, 2}) {
      for (const char* level : {"O0", "O2"}) list.push_back({ranks, stage, level});
    }
  }
  return list;
}
INSTANTIATE_TEST_SUITE_P(All, TrainerEdits, testing::ValuesIn(cells()),
                         [](const auto& cell) { return cell.param.name(); });

std::vector<ParameterSpec> two() {
  return {{.name = "kept", .shape = {300}}, {.name = "dropped", .shape = {7, 131}}};
}
void give(Engine& engine, int parameter, int step, int rank, int micro_batch) {
  const auto& spec = engine.parameters()[std::size_t(parameter)].spec;
  add(engine, parameter,
      made_up_gradients(step, rank, micro_batch, std::size_t(parameter),
                        std::size_t(spec.numel())));
}

// Discarded between micro-batches or at the end, on all ranks: the bits of a run that never gave
// it.
TEST_P(TrainerEdits, DiscardedIsAsIfItHadNotBeenGiven) {
  for (const bool reduced : {false, true}) {
    run_ranks(GetParam().ranks, [&](Communicator& comm) {
      Snapshot ends[2];
      double norms[2] = {0, 0};
      for (const bool discards : {false, true}) {
        Model model(two(), recipe(2));
        Engine engine(recipe(2).settings(comm.size()), model.parameters(), {.data = &comm},
                      quiet());
        for (int t = 0; t < 3; ++t) {
          give(engine, 0, t, comm.rank(), 0);
          if (discards) give(engine, 1, t, comm.rank(), 0);
          engine.end_micro_batch();
          if (discards && !reduced) engine.discard_gradient(1);
          // Only in step 1 a later micro-batch counts again.
          give(engine, 0, t, comm.rank(), 1);
          if (t == 1 && !reduced) give(engine, 1, t, comm.rank(), 1);
          engine.end_micro_batch();
          if (discards && reduced) {
            engine.reduce_gradients();
            engine.discard_gradient(1);
          }
          const StepReport report = engine.step();
          EXPECT_TRUE(report.applied);
          EXPECT_EQ(report.unused_parameters, t == 1 && !reduced ? 0 : 1);
          norms[discards] += report.grad_norm;
        }
        ends[discards] = snapshot(engine, model);
      }
      EXPECT_TRUE(ends[0] == ends[1]) << reduced;
      if (!reduced) {
        EXPECT_EQ(norms[0], norms[1]);
      }
    });
  }
}

// Zeroed at any time: the bits of a run that was given zeros, with weight decay and moments going
// on.
TEST_P(TrainerEdits, ZeroedIsAsIfItHadBeenZeros) {
  for (const bool reduced : {false, true}) {
    run_ranks(GetParam().ranks, [&](Communicator& comm) {
      Snapshot ends[2];
      for (const bool zeroes : {false, true}) {
        Model model(two(), recipe());
        Engine engine(recipe().settings(comm.size()), model.parameters(), {.data = &comm}, quiet());
        for (int t = 0; t < 3; ++t) {
          for (const int i : {0, 1}) {
            if (t != 1 || i == 0 || zeroes) {
              give(engine, i, t, comm.rank(), 0);
            } else {
              add_constant(engine, i, 0.0);
            }
          }
          engine.end_micro_batch();
          if (t == 1 && reduced) engine.reduce_gradients();
          if (t == 1 && zeroes) engine.discard_gradient(1, true);
          EXPECT_EQ(engine.step().unused_parameters, 0);
        }
        ends[zeroes] = snapshot(engine, model);
      }
      EXPECT_TRUE(ends[0] == ends[1]) << reduced;
    });
  }
}

// A local accumulator on one rank only: its contribution is gone, NaNs in it as well.
TEST_P(TrainerEdits, DiscardedOnOneRank) {
  if (sharded()) return;  // compared over ranks, see below
  run_ranks(GetParam().ranks, [&](Communicator& comm) {
    Snapshot ends[2];
    for (const bool discards : {false, true}) {
      Model model(two(), recipe());
      Engine engine(recipe().settings(comm.size()), model.parameters(), {.data = &comm}, quiet());
      give(engine, 0, 0, comm.rank(), 0);
      if (comm.rank() != 0) give(engine, 1, 0, comm.rank(), 0);
      if (comm.rank() == 0 && discards) {
        add_constant(engine, 1, std::nan(""));
        engine.discard_gradient(1);
      }
      engine.end_micro_batch();
      EXPECT_TRUE(engine.step().applied);
      ends[discards] = snapshot(engine, model);
    }
    EXPECT_TRUE(ends[0] == ends[1]);
  });
}

// Twice the gradient of half the size: the same bits, since powers of two are exact everywhere.
TEST_P(TrainerEdits, ScaledIsAsIfItHadBeenSmaller) {
  run_ranks(GetParam().ranks, [&](Communicator& comm) {
    Snapshot ends[2];
    for (const bool scales : {false, true}) {
      Model model(two(), recipe());
      Engine engine(recipe().settings(comm.size()), model.parameters(), {.data = &comm}, quiet());
      for (int t = 0; t < 3; ++t) {
        give(engine, 0, t, comm.rank(), 0);
        std::vector<double> g = made_up_gradients(t, comm.rank(), 0, 1, model.numel(1));
        for (double& x : g) x *= scales ? 4 : 1;
        add(engine, 1, g);
        engine.end_micro_batch();
        engine.reduce_gradients();
        if (scales) {
          engine.scale_gradient(1, 0.5);
          engine.scale_gradient(1, 0.5);
        }
        EXPECT_TRUE(engine.step().applied);
      }
      ends[scales] = snapshot(engine, model);
    }
    EXPECT_TRUE(ends[0] == ends[1]);
  });
}

// What has to be done alike is compared, and nothing is changed.
TEST_P(TrainerEdits, DifferencesAreAnErrorOnAllRanks) {
  if (GetParam().ranks == 1) return;  // nobody to differ from
  for (const int what : {0, 1, 2}) {  // a factor, a discard after the reduction, one before it
    if (what == 2 && !sharded()) continue;
    std::vector<std::string> texts(std::size_t(GetParam().ranks));
    run_ranks(GetParam().ranks, [&](Communicator& comm) {
      Model model(two(), recipe());
      Engine engine(recipe().settings(comm.size()), model.parameters(), {.data = &comm}, quiet());
      for (const int i : {0, 1}) give(engine, i, 0, comm.rank(), 0);
      engine.end_micro_batch();
      const bool last = comm.rank() == comm.size() - 1;
      if (what == 2 && last) engine.discard_gradient(1);
      engine.reduce_gradients();
      if (what == 0) engine.scale_gradient(1, last ? 0.25 : 0.5);
      if (what == 1 && last) engine.discard_gradient(1);
      const auto before = model.bytes();
      texts[std::size_t(comm.rank())] = message_of([&] { engine.step(); });
      EXPECT_EQ(before, model.bytes());
      EXPECT_EQ(engine.step_of(0), 0);
    });
    expect_contains(texts[0], "\"dropped\"");
    expect_contains(texts[0], what == 0 ? "0.25" : "discarded");
    for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  }
}

TEST_P(TrainerEdits, LargestMagnitudes) {
  run_ranks(GetParam().ranks, [&](Communicator& comm) {
    Model model(two(), recipe());
    Engine engine(recipe().settings(comm.size()), model.parameters(), {.data = &comm}, quiet());
    std::vector<double> g(model.numel(0), 0.125);
    g[211] = -96;  // the largest of its block: FP8 keeps 2^n times 1.5 exactly
    add(engine, 0, g);
    add_constant(engine, 1, comm.rank() == comm.size() - 1 ? INFINITY : 1.0);
    engine.end_micro_batch();
    engine.reduce_gradients();
    const std::vector<double> norms = engine.gradient_norms(NormKind::kInfinity);
    EXPECT_EQ(norms[0], 96);
    EXPECT_TRUE(std::isnan(norms[1]));
  });
}

// State that was read from one engine and set in another: the same, and it trains on alike.
TEST_P(TrainerEdits, StateGoesFromOneEngineToAnother) {
  run_ranks(GetParam().ranks, [&](Communicator& comm) {
    Model from_model(two(), recipe()), to_model(two(), recipe());
    Engine from(recipe().settings(comm.size()), from_model.parameters(), {.data = &comm}, quiet());
    Engine to(recipe().settings(comm.size()), to_model.parameters(), {.data = &comm}, quiet());
    for (int t = 0; t < 3; ++t) made_up_step(from, t, comm.rank());
    for (const int i : {0, 1}) {
      for (const StateKind kind : {StateKind::kExpAvg, StateKind::kExpAvgSq, StateKind::kMaster}) {
        to.set_full_state(i, kind, from.full_state(i, kind));
      }
      to.set_step(i, from.step_of(i));
    }
    EXPECT_TRUE(snapshot(from, from_model) == snapshot(to, to_model));
    StateCounters counters = to.counters();
    EXPECT_EQ(counters.guard_c, from.counters().guard_c);
    counters.applied = from.applied_steps();  // feeds the random streams
    to.restore_counters(counters);
    made_up_step(from, 3, comm.rank());
    made_up_step(to, 3, comm.rank());
    EXPECT_TRUE(snapshot(from, from_model) == snapshot(to, to_model));
  });
}

TEST(TrainerEditsAlone, Refused) {
  const Recipe recipe{.stage = 2};
  run_ranks(1, [&](Communicator& comm) {
    Model model(two(), recipe);
    EngineOptions options = quiet();
    options.capturable = false;
    Engine engine(recipe.settings(1), model.parameters(), {.data = &comm}, options);
    const auto text = [](const std::function<void()>& f) { return message_of(f); };
    expect_contains(text([&] { engine.discard_gradient(2); }), "no parameter 2");
    expect_contains(text([&] { engine.scale_gradient(0, 1); }), "reduce_gradients");
    add_constant(engine, 0, 1.0);
    expect_contains(text([&] { engine.discard_gradient(0); }), "end_micro_batch");
    engine.reduce_gradients();
    expect_contains(text([&] { engine.scale_gradient(0, NAN); }), "finite");
    const std::vector<float> values(300, -1.0f);
    expect_contains(text([&] { engine.set_full_state(1, StateKind::kExpAvg, values); }), "917");
    expect_contains(text([&] { engine.set_full_state(0, StateKind::kExpAvgSq, values); }), "-1");
    expect_contains(text([&] { engine.set_full_state(0, StateKind::kGradient, values); }),
                    "master");
  });
}

}  // namespace
}  // namespace zerofp8::test
