// What happens between replays of a captured step: steps outside of the graph, weights and states
// that are written, hyper-parameters, and agreements that do not come.
#include <gtest/gtest.h>

#include "tests/recorded_engine.h"

namespace zerofp8::test {
namespace {

// A step with a gradient of the first parameter only.
void give_one(Engine& engine, int t, int rank) {
  add(engine, 0, gradients(t, rank, 0, 0, 1));
  engine.end_micro_batch();
}
void replay(Recorded& run, int t) {
  run.gradients.fill(t);
  run.engine.write_groups();
  run.device->replay();
}

// Where two engines share a communicator, which counts the bytes of both.
Told without_wire(const StepReport& report) {
  Told t = told(report);
  t.payload = 0;
  return t;
}

struct OnHost {
  OnHost(const Row& row, Communicator& comm)
      : model(odd_shapes(), row.recipe, Model::sines, make_cpu_device()),
        engine(row.recipe.settings(row.ranks), model.parameters(), {.data = &comm},
               options_on(model)) {}
  StepReport step(int t, int rank) {
    give_all(engine, model, t, rank, kRow.recipe.micro_batches);
    return engine.step();
  }
  Model model;
  Engine engine;
};

const Row kAlone{"alone", kRow.recipe, 1};

// One rank has a communicator of host memory, over which nothing travels.
TEST(EngineReplays, OneRankNeedsNoCommunicatorOfTheDevice) {
  const auto comm = make_self_communicator();
  OnHost host(kAlone, *comm);
  Recorded run(kAlone, *comm, {}, true);
  host.step(0, 0);
  run.warm_up();
  run.capture();
  for (int t = 1; t < 3; ++t) {
    host.step(t, 0);
    replay(run, t);
  }
  EXPECT_TRUE(snapshot(run.engine, run.model) == snapshot(host.engine, host.model));
}

// A step outside of the graph, of fewer parameters, is a step; the next replay is of all again.
TEST(EngineReplays, AStepOutsideOfTheGraph) {
  run_ranks(2, [&](Communicator& comm) {
    const int rank = comm.rank();
    OnHost host(kRow, comm);
    Recorded run(kRow, comm);
    host.step(0, rank);
    run.warm_up();
    run.capture();
    host.step(1, rank);
    replay(run, 1);
    for (Engine* engine : {&host.engine, &run.engine}) give_one(*engine, 2, rank);
    const StepReport expected_one = host.engine.step(), one = run.engine.step();
    EXPECT_EQ(difference(without_wire(one), without_wire(expected_one)), "");
    EXPECT_EQ(one.unused_parameters, 5);
    const StepReport expected = host.step(4, rank);
    replay(run, 4);
    const StepReport report = *run.engine.fetch_report();
    EXPECT_EQ(difference(without_wire(report), without_wire(expected)), "");
    EXPECT_EQ(report.micro_batches, 2);
    EXPECT_EQ(report.unused_parameters, 0);
    EXPECT_EQ(run.engine.step_of(0), 4);
    EXPECT_EQ(run.engine.step_of(1), 3);
    EXPECT_TRUE(snapshot(run.engine, run.model) == snapshot(host.engine, host.model));
  });
}

void write(Engine& engine, Model& model, int t) {
  for (std::size_t j = 0; j < 5; ++j) model.set(4, j, 0.25 * (1 + t));
  engine.weight_changed(4);
}

// Written to before each step: masters follow what was written only, if the graph knows of it.
TEST(EngineReplays, WritesThatTheGraphKnowsOf) {
  const auto comm = make_self_communicator();
  OnHost host(kAlone, *comm);
  Recorded run(kAlone, *comm);
  for (int t = 0; t < 5; ++t) {
    if (t == 3) continue;  // is skipped
    write(host.engine, host.model, t);
    write(run.engine, run.model, t);
    host.step(t, 0);
    if (t == 0) {
      run.warm_up();
      run.capture();
    } else {
      replay(run, t);
    }
  }
  EXPECT_TRUE(snapshot(run.engine, run.model) == snapshot(host.engine, host.model));
}

TEST(EngineReplays, WritesThatBeginAfterTheCapture) {
  const auto comm = make_self_communicator();
  std::vector<std::string> lines;
  Recorded run(kAlone, *comm, [&](const std::string& line) {
    if (line.find("between replays") != line.npos) lines.push_back(line);
  });
  run.warm_up();
  run.capture();
  for (int t = 1; t < 5; ++t) {
    write(run.engine, run.model, t);
    const std::vector<float> masters = run.engine.full_state(4, StateKind::kMaster);
    for (std::size_t j = 0; j < masters.size(); ++j) {
      EXPECT_EQ(masters[j], run.model.at(4, j)) << "step " << t << ", element " << j;
    }
    replay(run, t);
  }
  ASSERT_EQ(lines.size(), 1u);
  expect_parts(lines[0], {"\"over\"", "capture the step again", "told once"});
  // Captured again, it has the bits of a step on the host.
  OnHost host(kAlone, *comm);
  write(host.engine, host.model, 0);  // it knows of such writes, too
  const TemporaryFolder folder("replays");
  run.engine.save(folder.path());
  host.engine.load(folder.path());
  run.engine.load(folder.path());
  run.gradients.fill(1);
  for (int t = 1; t < 3; ++t) {
    write(host.engine, host.model, t);
    write(run.engine, run.model, t);
    host.step(1, 0);
    if (t == 1) run.warm_up();
    if (t == 1) run.device->forget();
    if (t == 1) run.capture();
    if (t == 2) replay(run, 1);
  }
  EXPECT_TRUE(snapshot(run.engine, run.model) == snapshot(host.engine, host.model));
}

// State and weights put back between replays; the graph goes on with them, also where it keeps
// copies of weights.
TEST(EngineReplays, StateIsPutBack) {
  const auto comm = make_self_communicator();
  Recorded run(kAlone, *comm);
  write(run.engine, run.model, 0);
  run.warm_up();
  run.capture();
  replay(run, 1);
  std::vector<std::vector<std::byte>> pieces, weights = run.model.bytes();
  for (const StatePiece& piece : run.engine.state_pieces()) {
    run.engine.read_piece(piece, pieces.emplace_back(piece.bytes.size()).data());
  }
  const StateCounters counters = run.engine.counters();
  EXPECT_EQ(counters.applied, 2);
  const auto go_on = [&] {
    for (const int t : {2, 4}) replay(run, t);
    return snapshot(run.engine, run.model);
  };
  const Snapshot first = go_on();
  const std::vector<StatePiece> now = run.engine.state_pieces();
  for (std::size_t i = 0; i < now.size(); ++i) run.engine.write_piece(now[i], pieces[i].data());
  for (std::size_t i = 0; i < run.model.count(); ++i) {
    run.device->upload(run.model.parameters()[i].weight, weights[i].data(),
                       run.model.numel(i) * size_of(kAlone.recipe.dtype()));
  }
  run.engine.restore_counters(counters);
  EXPECT_FALSE(run.engine.fetch_report().has_value());  // nothing has run since
  EXPECT_TRUE(go_on() == first);
}

TEST(EngineReplays, ANewBeta1NeedsAStepAndANewCapture) {
  const auto comm = make_self_communicator();
  OnHost host(kAlone, *comm);
  Recorded run(kAlone, *comm);
  host.step(0, 0);
  run.warm_up();
  run.capture();
  run.engine.group(0).beta1 = host.engine.group(0).beta1 = 0.95;
  expect_parts(error_of<ArgumentError>([&] { run.engine.write_groups(); }),
               {"beta1 of group 0", "make one ordinary step", "capture the step again"});
  host.step(0, 0);
  run.gradients.fill(0);
  run.warm_up();
  run.device->forget();
  run.capture();
  host.step(1, 0);
  replay(run, 1);
  EXPECT_TRUE(snapshot(run.engine, run.model) == snapshot(host.engine, host.model));
}

// What a capture has recorded before it failed did not run: the steps after it know nothing of it.
TEST(EngineReplays, ACaptureThatFailsLeavesNothingBehind) {
  for (const int stage : {1, 2}) {
    Row row = kAlone;
    row.recipe.stage = stage;
    const auto comm = make_self_communicator();
    OnHost host(row, *comm);
    Recorded run(row, *comm);
    const auto fail = [&] {
      EXPECT_THROW(run.capture(), DeviceError);
      run.device->end();
      run.device->forget();
      run.engine.discard_gradients();  // of a capture that failed before the step
    };
    fail();  // no step before: memory is missing
    host.step(0, 0);
    run.warm_up();
    run.engine.group(0).lr = 0.5;
    fail();  // within the step: would repeat 0.5 for ever
    run.engine.group(0).lr = 1e-3;
    host.step(1, 0);
    run.gradients.fill(1);
    run.warm_up();
    run.capture();
    host.step(2, 0);
    replay(run, 2);
    EXPECT_TRUE(snapshot(run.engine, run.model) == snapshot(host.engine, host.model)) << stage;
  }
}

// A write that the next step has to follow, and a capture instead of that step.
TEST(EngineReplays, AWriteBeforeACaptureNeedsAStep) {
  const auto comm = make_self_communicator();
  Recorded run(kAlone, *comm);
  run.warm_up();
  run.device->begin();
  expect_parts(error_of<DeviceError>([&] { run.engine.weight_changed(4); }),
               {"\"over\" was written from outside", "make one ordinary step, then capture"});
  run.device->end();
}

// An all-gather that is aborted brings nothing.
class BringsNothing final : public ForwardingCommunicator {
 public:
  BringsNothing(Communicator& comm, Device& device)
      : ForwardingCommunicator(&comm_), comm_(comm, device) {}
  bool broken = false;
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    if (broken && options.label == "agreement on the step") return std::make_unique<Nothing>();
    return comm_.all_gather(send, recv, options);
  }

 private:
  class Nothing final : public Work {
    bool done() const override { return true; }
    void wait() override {}
  };
  StagedCommunicator comm_;
};

TEST(EngineReplays, PartsThatDoNotComeSkipTheStep) {
  run_ranks(2, [&](Communicator& comm) {
    Model model(odd_shapes(), kRow.recipe, Model::sines, make_emulated_device());
    BringsNothing broken(comm, *model.device());
    EngineOptions options = options_on(model);
    options.capturable = true;
    Engine engine(kRow.recipe.settings(2), model.parameters(), {.data = &broken}, options);
    EXPECT_TRUE(made_up_step(engine, 0, comm.rank()).applied);
    const Snapshot before = snapshot(engine, model);
    broken.broken = true;
    expect_parts(error_of<ArgumentError>([&] { made_up_step(engine, 1, comm.rank()); }),
                 {"ranks disagree"});
    EXPECT_TRUE(snapshot(engine, model) == before);
    EXPECT_EQ(engine.skipped_steps(), 1);
  });
}

}  // namespace
}  // namespace zerofp8::test
