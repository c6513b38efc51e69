// Steps that are decided in device memory: the bits of those that the host decides, also when they
// are replayed from a recording, as CUDA graphs are.
#include <gtest/gtest.h>

#include "tests/recorded_engine.h"

namespace zerofp8::test {
namespace {

std::vector<Row> capturable_rows() {
  std::vector<Row> list = rows();
  std::erase_if(list, [](const Row& row) { return row.recipe.model == "fp16"; });
  return list;
}

class EngineQueued : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(All, EngineQueued, testing::ValuesIn(capturable_rows()),
                         [](const auto& param) { return std::string(param.param.name); });

// Norms, skipped steps, reports, payload bytes, weights and states; on the host and on a device
// that it cannot read.
TEST_P(EngineQueued, HasTheBitsOfAStepThatTheHostDecides) {
  const std::vector<RunResult> host = train(GetParam(), Where::kCpu);
  for (const Where where : {Where::kCpu, Where::kDevice}) {
    const std::vector<RunResult> queued = train(GetParam(), where, true);
    for (std::size_t r = 0; r < host.size(); ++r) {
      SCOPED_TRACE(r);
      EXPECT_EQ(host[r].norms, queued[r].norms);
      EXPECT_EQ(host[r].of_parameters, queued[r].of_parameters);
      EXPECT_EQ(host[r].gradient, queued[r].gradient);
      EXPECT_TRUE(host[r].state == queued[r].state);
      EXPECT_EQ(host[r].told, queued[r].told);
      EXPECT_EQ(host[r].wire, queued[r].wire);
    }
  }
}

TEST_P(EngineQueued, ReplaysOfOneCaptureAreSteps) {
  const Row& row = GetParam();
  run_ranks(row.ranks, [&](Communicator& host) {
    const Trained expected = train_on_host(row, host);
    Recorded run(row, host);
    std::vector<Told> reports{told(run.warm_up())};
    run.capture();
    ASSERT_GT(run.device->calls(), 0u);
    for (int t = 1; t < kSteps; ++t) {
      run.gradients.fill(t);
      run.engine.group(0).lr = lr_of(t);
      run.engine.write_groups();
      run.device->replay();
      reports.push_back(told(*run.engine.fetch_report()));
    }
    for (int t = 0; t < kSteps; ++t) {
      EXPECT_EQ(difference(reports[std::size_t(t)], expected.reports[std::size_t(t)]), "")
          << "step " << t << " rank " << host.rank();
    }
    EXPECT_TRUE(snapshot(run.engine, run.model) == expected.end) << "rank " << host.rank();
  });
}

// Reports are fetched when somebody asks: counters and weights are those of all replays, and what
// is saved is what another engine, of the other kind, goes on with.
TEST(EngineQueuedSteps, ManyReplaysAreFetchedAtOnceAndSaved) {
  const TemporaryFolder folder("queued");
  std::vector<std::string> lines;
  run_ranks(2, [&](Communicator& host) {
    const Trained expected = train_on_host(kRow, host);
    Recorded run(kRow, host, [&](const std::string& line) { lines.push_back(line); });
    run.warm_up();
    run.capture();
    for (int t = 1; t < 4; ++t) {
      run.gradients.fill(t);
      run.device->replay();
    }
    EXPECT_EQ(run.engine.applied_steps(), 3);
    EXPECT_EQ(run.engine.skipped_steps(), 1);
    EXPECT_EQ(run.engine.step_of(1), 3);
    // Asked for twice; told in the log once.
    EXPECT_EQ(told(*run.engine.fetch_report()), expected.reports[3]);
    EXPECT_EQ(told(*run.engine.fetch_report()), expected.reports[3]);
    run.engine.save(folder.path());

    Model model(odd_shapes(), kRow.recipe, Model::sines, make_cpu_device());
    Engine other(kRow.recipe.settings(2), model.parameters(), {.data = &host}, options_on(model));
    other.load(folder.path());
    for (int t = 4; t < kSteps; ++t) {
      other.group(0).lr = lr_of(t);
      give_all(other, model, t, host.rank(), kRow.recipe.micro_batches);
      other.step();
    }
    EXPECT_TRUE(snapshot(other, model) == expected.end);
    // And back: a graph goes on from what was loaded.
    run.engine.load(folder.path());
    for (int t = 4; t < kSteps; ++t) {
      run.gradients.fill(t);
      run.engine.group(0).lr = lr_of(t);
      run.engine.write_groups();
      run.device->replay();
    }
    EXPECT_TRUE(snapshot(run.engine, run.model) == expected.end);
  });
  std::erase_if(lines, [](const std::string& line) { return line.find("loaded") != line.npos; });
  ASSERT_EQ(lines.size(), 1u);
  expect_parts(lines[0],
               {"step 4 skipped", "non-finite gradient in parameter \"three\"", "rank 0"});
}

// What needs the host within a capture is an error that says what to do.
TEST(EngineQueuedSteps, ACaptureRefusesWhatItCannotRepeat) {
  const Row row{"row", kRow.recipe, 1};
  const auto comm = make_self_communicator();
  {
    Recorded run(row, *comm);  // no step before: memory is missing
    EXPECT_NE(error_of<DeviceError>([&] { run.capture(); }).find("within a capture"),
              std::string::npos);
  }
  Recorded run(row, *comm);
  run.warm_up();
  run.device->begin();
  run.gradients.give(run.engine);
  expect_parts(error_of<DeviceError>([&] { run.engine.step(); }),
               {"is being captured", "has not run", "after a replay"});
  run.device->end();

  Recorded other(row, *comm);
  other.warm_up();
  other.device->begin();
  other.gradients.give(other.engine);
  other.engine.group(0).lr = 0.5;
  expect_parts(error_of<DeviceError>([&] { other.engine.enqueue_step(); }),
               {"hyper-parameters were changed", "between replays"});
  other.device->end();

  Recorded fewer(row, *comm);
  fewer.warm_up();
  DeviceBytes one(*fewer.device, packed(DType::kFp32, {1.0}));
  fewer.device->begin();
  fewer.engine.add_gradient(0, one.data(), DType::kFp32);
  fewer.engine.end_micro_batch();
  expect_parts(error_of<DeviceError>([&] { fewer.engine.enqueue_step(); }),
               {"other parameters have a gradient", "run a whole step of the same kind"});
  fewer.device->end();
}

TEST(EngineQueuedSteps, ABeta1WithAnotherRoundingNeedsANewCapture) {
  const Row row{"row", kRow.recipe, 1};
  const auto comm = make_self_communicator();
  Recorded run(row, *comm);
  run.warm_up();
  run.capture();
  run.engine.group(0).beta1 = 0.92;
  run.engine.write_groups();
  run.engine.group(0).beta1 = 0.95;
  expect_parts(error_of<ArgumentError>([&] { run.engine.write_groups(); }),
               {"beta1 of group 0 was 0.9", "is 0.95 now", "capture the step again"});
}

TEST(EngineQueuedSteps, OnlyCapturableEnginesQueue) {
  const auto comm = make_self_communicator();
  Model model(odd_shapes(), kRow.recipe);
  Engine engine(kRow.recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  for (const auto& call : std::vector<std::function<void()>>{[&] { engine.enqueue_step(); },
                                                             [&] { engine.fetch_report(); },
                                                             [&] { engine.write_groups(); }}) {
    expect_parts(error_of<ArgumentError>(call), {"not capturable", "EngineOptions::capturable"});
  }
  EngineOptions options = quiet();
  options.capturable = true;
  const Recipe fp16{.model = "fp16", .fp16 = R"("initial_scale_power": 8)"};
  Model half(odd_shapes(), fp16);
  expect_parts(error_of<ArgumentError>([&] {
                 Engine refused(fp16.settings(1), half.parameters(), {.data = comm.get()}, options);
               }),
               {"capturable with /fp16/enabled", "use bf16 or fp32"});
  Engine queued(kRow.recipe.settings(1), model.parameters(), {.data = comm.get()}, options);
  expect_parts(error_of<ArgumentError>([&] { queued.set_trainer_loss_scale(2); }),
               {"a capturable engine takes 1 only"});
  EXPECT_FALSE(queued.fetch_report().has_value());  // nothing has run yet
}

// Differences and nonsense in hyper-parameters skip the step on all ranks, and are told on all.
TEST(EngineQueuedSteps, HyperParametersThatDifferOrMakeNoSense) {
  run_ranks(2, [&](Communicator& comm) {
    Model model(odd_shapes(), kRow.recipe);
    EngineOptions options = quiet();
    options.capturable = true;
    Engine engine(kRow.recipe.settings(2), model.parameters(), {.data = &comm}, options);
    EXPECT_TRUE(made_up_step(engine, 0, comm.rank()).applied);
    const Snapshot before = snapshot(engine, model);
    engine.group(0).lr = 1e-3 * (1 + comm.rank());
    expect_parts(error_of<ArgumentError>([&] { made_up_step(engine, 1, comm.rank()); }),
                 {"ranks disagree on this step", "lr 0.00"});
    engine.group(0).lr = comm.rank() == 1 ? NAN : 1e-3;
    const std::string text = error_of<ArgumentError>([&] { made_up_step(engine, 2, comm.rank()); });
    expect_parts(text,
                 {comm.rank() == 1 ? "lr: given nan" : "another rank", "skipped on all ranks"});
    EXPECT_TRUE(snapshot(engine, model) == before);
    EXPECT_EQ(engine.skipped_steps(), 2);
    engine.group(0).lr = 1e-3;
    EXPECT_TRUE(made_up_step(engine, 3, comm.rank()).applied);
  });
}

// A norm whose square is beyond FP32.
TEST(EngineQueuedSteps, TooLargeANorm) {
  const auto comm = make_self_communicator();
  const Recipe recipe{.level = "O0"};
  Model model({{.name = "w", .shape = {4}}}, recipe);
  EngineOptions options = quiet();
  options.capturable = true;
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, options);
  add(engine, 0, {3e19, 0, 0, 0});
  const StepReport report = engine.step();
  EXPECT_FALSE(report.applied);
  expect_parts(report.skip_reason, {"the gradient norm after clipping", "3e+19"});
}

}  // namespace
}  // namespace zerofp8::test
