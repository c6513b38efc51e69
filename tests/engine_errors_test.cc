// Misuse and differences between ranks: an error that names what is wrong, on every rank, and no
// hang.
#include <atomic>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::vector<ParameterSpec> shapes() {
  return {{.name = "a", .shape = {3, 100}}, {.name = "b", .shape = {7}}};
}

// All ranks must throw an Error of type E with the same text, which has every one of `parts`.
template <class E>
void expect_on_all_ranks(int ranks, const std::vector<std::string>& parts,
                         const std::function<void(Communicator&)>& run) {
  const auto begin = std::chrono::steady_clock::now();
  const Outcomes outcomes = run_ranks_to_the_end(ranks, [&](Communicator& comm) {
    comm.set_timeout(seconds(20));
    run(comm);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
  for (const RankOutcome& rank : outcomes.ranks) {
    ASSERT_TRUE(rank.error) << "a rank went on; expected " << parts[0];
    try {
      std::rethrow_exception(rank.error);
    } catch (const E&) {
    } catch (const std::exception& e) {
      ADD_FAILURE() << "another type of error: " << e.what();
    }
    EXPECT_EQ(rank.what, outcomes.ranks[0].what);
    for (const std::string& part : parts) {
      EXPECT_NE(rank.what.find(part), std::string::npos) << rank.what << "\n  should have " << part;
    }
  }
}

TEST(EngineErrors, ConfigsThatDifferBetweenRanks) {
  struct Row {
    Recipe odd;
    const char* part;
  };
  const Recipe base{.model = "fp16", .stage = 1, .level = "O2"};
  const auto change = [&](const auto& edit) {
    Recipe r = base;
    edit(r);
    return r;
  };
  const Row rows[] = {
      {change([](Recipe& r) { r.stage = 2; }), "stage"},
      {change([](Recipe& r) { r.lr = 0.5; }), "lr 0.5"},
      {change([](Recipe& r) { r.beta1 = 0.5; }), "betas 0.5"},
      {change([](Recipe& r) { r.eps = 1e-6; }), "eps"},
      {change([](Recipe& r) { r.weight_decay = 0.5; }), "weight decay 0.5"},
      {change([](Recipe& r) { r.accumulation = "bf16"; }), "accumulation bf16"},
      {change([](Recipe& r) { r.error_feedback = true; }), "error feedback true"},
      {change([](Recipe& r) { r.wire = "bf16"; }), "gradient wire bf16"},
      {change([](Recipe& r) { r.level = "O3"; }), "exp_avg_sq"},
      {change([](Recipe& r) { r.clipping = 1; }), "clipping"},
      {change([](Recipe& r) { r.micro_batches = 2; }), "micro-batches 2"},
      {change([](Recipe& r) { r.zerofp8 = R"("seed": 3)"; }), "seed 3"},
      {change([](Recipe& r) { r.zerofp8 = R"("block_size": 64)"; }), "block size 64"},
      {change([](Recipe& r) { r.zerofp8 = R"("shard_group_size": 1)"; }), "shard ranks 1"},
      {change(
           [](Recipe& r) { r.zerofp8 = R"("two_level_reduce_scatter": {"ranks_per_node": 3})"; }),
       "ranks per node 3"},
      {change([](Recipe& r) {
         r.zerofp8 =
             R"("two_level_reduce_scatter": {"ranks_per_node": 1, "in_node_dtype": "bf16"})";
       }),
       "in-node wire bf16"},
      {change([](Recipe& r) { r.zerofp8 = R"("master_weights": "none")"; }), "master none"},
      {change([](Recipe& r) { r.zerofp8 = R"("fp32_moments_below": 0)"; }), "fp32 moments"},
      {change([](Recipe& r) { r.zero = R"("reduce_bucket_size": 5)"; }), "buckets 5"},
      {change([](Recipe& r) { r.zero = R"("overlap_comm": true)"; }), "overlap"},
      {change([](Recipe& r) { r.fp16 = R"("loss_scale": 8)"; }), "loss scale"},
      {change([](Recipe& r) { r.fp16 = R"("loss_scale_window": 8)"; }), "window 8"},
      {change([](Recipe& r) { r.fp16 = R"("hysteresis": 8)"; }), "hysteresis 8"},
      {change([](Recipe& r) { r.fp16 = R"("min_loss_scale": 8)"; }), "minimum 8"},
      {change([](Recipe& r) { r.model = "bf16"; }), "weight bf16"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.part);
    expect_on_all_ranks<CommError>(3, {"differ", row.part, "1"}, [&](Communicator& comm) {
      const Recipe& recipe = comm.rank() == 1 ? row.odd : base;
      Model model(shapes(), recipe);
      Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
    });
  }
}

TEST(EngineErrors, ModelsThatDifferBetweenRanks) {
  struct Row {
    std::vector<ParameterSpec> odd;
    const char* part;
  };
  auto name = shapes(), shape = shapes(), order = shapes(), norm = shapes(), more = shapes();
  name[1].name = "other";
  shape[0].shape = {100, 3};
  std::swap(order[0], order[1]);
  norm[0].counts_in_norm = false;
  more.push_back({.name = "c", .shape = {1}});
  for (const Row& row : {Row{name, "other"}, Row{shape, "(100, 3)"}, Row{order, "parameter b"},
                         Row{norm, "in norm false"}, Row{more, "3 parameters"}}) {
    SCOPED_TRACE(row.part);
    for (const int odd : {0, 2}) {
      expect_on_all_ranks<CommError>(3, {"parameter", row.part}, [&](Communicator& comm) {
        const Recipe recipe{.stage = 2};
        Model model(comm.rank() == odd ? row.odd : shapes(), recipe);
        Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
      });
    }
  }
}

// A difference inside one slice, one reduce group or between tied copies is told to all ranks.
TEST(EngineErrors, DifferencesInsideOneGroupReachAllRanks) {
  const Recipe recipe{.stage = 1};
  expect_on_all_ranks<CommError>(4, {"odd"}, [&](Communicator& world) {
    const auto data = world.split(world.rank() / 2, world.rank());
    const auto slices = world.split(2 + world.rank() % 2, world.rank());
    Model model({{.name = world.rank() == 3 ? "odd" : "w", .shape = {4}}}, recipe);
    Engine engine(recipe.settings(2, 2), model.parameters(),
                  {.data = data.get(), .model = slices.get()}, quiet());
  });
  expect_on_all_ranks<CommError>(4, {"experts", "odd"}, [&](Communicator& world) {
    const auto pair = world.split(world.rank() % 2, world.rank());
    Model model(
        {{.name = world.rank() == 3 ? "odd" : "e", .shape = {4}, .reduce_group = "experts"}},
        recipe);
    Groups groups{.data = &world};
    groups.reduce["experts"] = {pair.get(), 0};
    Engine engine(recipe.settings(4), model.parameters(), groups, quiet());
  });
  expect_on_all_ranks<CommError>(2, {"tied", "(5)"}, [&](Communicator& world) {
    const auto data = world.split(world.rank(), 0);
    Model model({{.name = "w", .shape = {world.rank() == 1 ? 5 : 4}, .tied = "w"}}, recipe);
    Groups groups{.data = data.get(), .model = &world};
    groups.tied["w"] = &world;
    Engine engine(recipe.settings(1, 2), model.parameters(), groups, quiet());
  });
}

// What one rank alone can see is wrong.
TEST(EngineErrors, ArgumentsThatOneRankRefuses) {
  const Recipe recipe{.model = "bf16", .stage = 1};
  using Edit = std::function<void(std::vector<Parameter>&)>;
  struct Row {
    Edit edit;
    std::vector<std::string> parts;
  };
  const Row rows[] = {
      {[](auto& p) { p[1].weight = nullptr; }, {"\"b\"", "weight is null"}},
      {[](auto& p) { p[0].spec.dtype = DType::kFp16; }, {"\"a\" is fp16", "bf16", "/fp16/enabled"}},
      {[](auto& p) { p[0].spec.group = 1; }, {"\"a\" is in group 1", "1 groups"}},
      {[](auto& p) { p[0].spec.group = -1; }, {"group -1"}},
      {[](auto& p) { p[0].spec.reduce_group = "x"; }, {"\"x\" is not in groups.reduce"}},
      {[](auto& p) { p[0].spec.tied = "y"; }, {"\"y\" is not in groups.tied"}},
      {[](auto& p) { p[1].spec.name = "a"; }, {"\"a\" is registered twice"}},
      {[](auto& p) { p[1].spec.shape = {-2}; }, {"\"b\"", "-2"}},
  };
  for (const Row& row : rows) {
    for (const int odd : {0, 2}) {
      SCOPED_TRACE(row.parts[0]);
      auto parts = row.parts;
      parts.push_back(fmt::format("rank {}", odd));
      expect_on_all_ranks<ArgumentError>(3, parts, [&](Communicator& comm) {
        Model model(shapes(), recipe);
        auto parameters = model.parameters();
        if (comm.rank() == odd) row.edit(parameters);
        Engine engine(recipe.settings(3), parameters, {.data = &comm}, quiet());
      });
    }
  }
  expect_on_all_ranks<ArgumentError>(3, {"4 data-parallel ranks", "has 3"},
                                     [&](Communicator& comm) {
                                       Model model(shapes(), recipe);
                                       Engine engine(recipe.settings(comm.rank() == 1 ? 4 : 3),
                                                     model.parameters(), {.data = &comm}, quiet());
                                     });
  expect_on_all_ranks<ArgumentError>(2, {"\"x\" has no communicator"}, [&](Communicator& comm) {
    Model model(shapes(), recipe);
    Groups groups{.data = &comm};
    if (comm.rank() == 1) groups.reduce["x"] = {};
    Engine engine(recipe.settings(2), model.parameters(), groups, quiet());
  });
  Model model(shapes(), recipe);
  EXPECT_THROW(Engine(recipe.settings(1), model.parameters(), {}, quiet()), ArgumentError);
}

TEST(EngineErrors, AReduceGroupIsAPartOfTheDataRanks) {
  const Recipe recipe;
  expect_on_all_ranks<ArgumentError>(
      2, {"\"all\" has 2 ranks", "groups.data 1"}, [&](Communicator& world) {
        const auto data = world.split(world.rank(), 0);
        Model model(shapes(), recipe);
        Groups groups{.data = data.get(), .model = &world};
        groups.reduce["all"] = {&world, 0};
        Engine engine(recipe.settings(1, 2), model.parameters(), groups, quiet());
      });
}

// A rank that never comes is named.
TEST(EngineErrors, AbsentRanksAreNamed) {
  for (const bool at_construction : {true, false}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{.stage = stage};
      std::atomic<int> failed{0};
      run_ranks(3, [&](Communicator& comm) {
        comm.set_timeout(milliseconds(300));
        const bool absent = comm.rank() == 1;
        std::unique_ptr<Engine> engine;
        Model model(shapes(), recipe);
        try {
          if (!absent || !at_construction) {
            engine = std::make_unique<Engine>(recipe.settings(3), model.parameters(),
                                              Groups{.data = &comm}, quiet());
          }
          if (!absent) {
            add_constant(*engine, 0, 1.0);
            engine->step();
            ADD_FAILURE() << "went on without rank 1";
          }
        } catch (const CommError& e) {
          EXPECT_EQ(e.absent_ranks(), std::vector<int>{1}) << e.what();
          ++failed;
        }
        while (failed < 2) std::this_thread::sleep_for(milliseconds(5));
      });
      EXPECT_EQ(failed, 2);
    }
  }
}

TEST(EngineErrors, CallsInTheWrongOrderOrWithTheWrongThing) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.model = "bf16", .stage = stage};
    run_ranks(2, [&](Communicator& comm) {
      Model model(shapes(), recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      const std::vector<float> ones(300, 1.0f);
      DeviceBytes g(engine.device(), std::as_bytes(std::span(ones)));
      for (const DType bad : {DType::kE4m3, DType::kE5m2, DType::kUe4m4}) {
        EXPECT_THROW(engine.add_gradient(0, g.data(), bad), ArgumentError);
      }
      EXPECT_THROW(engine.add_gradient(-1, g.data(), DType::kFp32), ArgumentError);
      EXPECT_THROW(engine.add_gradient(2, g.data(), DType::kFp32), ArgumentError);
      EXPECT_THROW(engine.add_gradient(0, nullptr, DType::kFp32), ArgumentError);
      EXPECT_THROW(engine.full_state(2, StateKind::kMaster), ArgumentError);
      EXPECT_THROW(engine.full_state(-1, StateKind::kMaster), ArgumentError);
      EXPECT_THROW(engine.step_of(2), ArgumentError);
      EXPECT_THROW(engine.group(1), ArgumentError);
      EXPECT_THROW(engine.group(-1), ArgumentError);
      // None of these counts as a gradient.
      EXPECT_EQ(engine.step().unused_parameters, 2);
      EXPECT_EQ(engine.step_of(0), 0);
      engine.add_gradient(0, g.data(), DType::kFp32);
      engine.reduce_gradients();
      EXPECT_THROW(engine.add_gradient(0, g.data(), DType::kFp32), ArgumentError);
      EXPECT_THROW(engine.end_micro_batch(), ArgumentError);
      engine.reduce_gradients();  // once more is nothing
      EXPECT_TRUE(engine.step().applied);
      engine.add_gradient(0, g.data(), DType::kFp32);
      EXPECT_TRUE(engine.step().applied);
      EXPECT_EQ(engine.step_of(0), 2);
    });
  }
}

// Hyper-parameters that differ at a step stop all ranks before anything is changed; set right, the
// same step goes on.
TEST(EngineErrors, HyperParametersThatDifferAtAStep) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.stage = stage, .level = "O2"};
    run_ranks(3, [&](Communicator& comm) {
      Model model(shapes(), recipe);
      Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
      made_up_step(engine, 0, comm.rank());
      const Snapshot before = snapshot(engine, model);
      engine.group(0).lr = comm.rank() == 2 ? 0.5 : 0.25;
      add_constant(engine, 0, 1.0);
      try {
        engine.step();
        ADD_FAILURE() << "ranks with different learning rates went on";
      } catch (const ArgumentError& e) {
        for (const char* part : {"0.5", "0.25", "rank 2"}) {
          EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
        }
      }
      EXPECT_EQ(snapshot(engine, model), before);
      engine.group(0).lr = 0.25;
      EXPECT_TRUE(engine.step().applied);
      EXPECT_EQ(engine.step_of(0), 2);
    });
  }
}

}  // namespace
}  // namespace zerofp8::test
