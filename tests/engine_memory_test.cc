// Bytes: what the allocator and the wire counted against the plan, and no growth (case 46).
#include <malloc.h>

#include <fstream>
#include <map>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

std::vector<ParameterSpec> large_shapes() {
  return {{.name = "embedding", .shape = {128, 256}},
          {.name = "up", .shape = {256, 192}},
          {.name = "bias", .shape = {64}},
          {.name = "down", .shape = {192, 256}}};
}

StepReport constant_step(Engine& engine) {
  static const std::vector<float> kGradient(1 << 20, 0.5f);
  for (int k = 0; k < engine.settings().batch.accumulation_steps; ++k) {
    for (int i = 0; i < static_cast<int>(engine.parameters().size()); ++i) {
      engine.add_gradient(i, kGradient.data(), DType::kFp32);
    }
    engine.end_micro_batch();
  }
  return engine.step();
}

std::int64_t numel_of(const std::vector<ParameterSpec>& specs) {
  std::int64_t sum = 0;
  for (const ParameterSpec& s : specs) sum += s.numel();
  return sum;
}

void expect_planned(const Engine& engine, const std::string& what) {
  const Plan& plan = engine.plan();
  EXPECT_EQ(engine.allocator().state_bytes(), std::size_t(plan.state_bytes())) << what;
  std::map<Component, std::int64_t> rows;
  for (const PlanRow& row : plan.rows) rows[row.component] += row.bytes;
  for (const Component c : {Component::kAccumulator, Component::kReducedGradient,
                            Component::kMaster, Component::kExpAvg, Component::kExpAvgSq}) {
    EXPECT_EQ(engine.allocator().bytes(c), std::size_t(rows[c])) << what << " " << to_string(c);
  }
}

// State bytes per parameter of one rank, weight included, as counted; checked against the plan
// before and after a step.
double counted_bytes(const Recipe& recipe, int ranks,
                     const std::vector<ParameterSpec>& specs = large_shapes()) {
  double result = 0;
  run_ranks(ranks, [&](Communicator& comm) {
    Model model(specs, recipe);
    Engine engine(recipe.settings(ranks), model.parameters(), {.data = &comm}, quiet());
    const std::string what = fmt::format("{} on {} ranks", recipe.name(), ranks);
    expect_planned(engine, what);
    constant_step(engine);
    expect_planned(engine, what);
    const auto n = double(numel_of(model.specs()));
    const double weight = double(size_of(recipe.dtype()));
    if (comm.rank() == 0) result = double(engine.allocator().state_bytes()) / n + weight;
    EXPECT_NEAR(double(engine.allocator().state_bytes()) / n + weight,
                engine.plan().bytes_per_parameter(), 1e-9);
  });
  return result;
}

TEST(EngineMemory, StateBytesEqualThePlan) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    for (const char* model : {"fp32", "bf16", "fp16"}) {
      for (const int stage : {0, 1, 2}) {
        for (const int ranks : {1, 4}) {
          counted_bytes(
              {.model = model, .stage = stage, .level = level, .fp16 = R"("loss_scale": 1)"},
              ranks);
        }
      }
    }
  }
  for (const char* acc : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
    for (const char* wire : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
      for (const int stage : {0, 1, 2}) {
        for (const bool feedback : {false, true}) {
          if (feedback && acc[2] != '8') continue;
          const Recipe recipe{.model = "bf16",
                              .stage = stage,
                              .level = "O2",
                              .accumulation = acc,
                              .error_feedback = feedback,
                              .wire = wire};
          counted_bytes(recipe, 1);
          counted_bytes(recipe, 2);
          Recipe hybrid = recipe;
          hybrid.zerofp8 = R"("shard_group_size": 2)";
          if (stage > 0) counted_bytes(hybrid, 4);
        }
      }
    }
  }
}

// Tied copies have a reduced gradient of their own, also where Adam reads the accumulator
// otherwise.
TEST(EngineMemory, TiedParametersArePlanned) {
  for (const char* level : {"O0", "O2"}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{.model = "bf16", .stage = stage, .level = level};
      run_ranks(2, [&](Communicator& world) {
        const auto data = world.split(world.rank(), 0);
        auto specs = large_shapes();
        specs[0].tied = "embedding";
        Model model(specs, recipe);
        Groups groups{.data = data.get(), .model = &world};
        groups.tied["embedding"] = &world;
        Engine engine(recipe.settings(1, 2), model.parameters(), groups, quiet());
        expect_planned(engine, fmt::format("tied {} stage {}", level, stage));
      });
    }
  }
}

// The figures of the published table at d = 1 and for a quarter of the state at d = 4.
TEST(EngineMemory, BytesPerParameter) {
  struct Row {
    const char* level;
    const char* keys;
    double at_most_1, at_most_4;
  };
  for (const Row& row :
       {Row{"O0", "", 16.1, 2 + 4 + 10.1 / 4}, Row{"O1", "", 13.2, 2 + 1.04 + 14.2 / 4},
        Row{"O2", "", 7.2, 2 + 1.04 + 8.2 / 4}, Row{"O3", "", 6.2, 2 + 1.04 + 7.2 / 4},
        Row{"O2", R"("master_weights": "none")", 6.2, 2 + 1.04 + 7.2 / 4}}) {
    const Recipe recipe{.model = "bf16", .stage = 1, .level = row.level, .zerofp8 = row.keys};
    std::vector<ParameterSpec> specs = large_shapes();
    specs[0].shape = {4096, 256};  // so that the padding of small buckets does not show
    const double one = counted_bytes(recipe, 1, specs), four = counted_bytes(recipe, 4, specs);
    fmt::print("{} {}: {:.3f} bytes per parameter at d = 1, {:.3f} at d = 4\n", row.level, row.keys,
               one, four);
    EXPECT_LE(one, row.at_most_1) << row.level;
    EXPECT_LE(four, row.at_most_4) << row.level;
  }
}

// Payload bytes of a step, per dtype, against the plan's collectives.
TEST(EngineMemory, WireBytesEqualThePlan) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    for (const char* wire : {"", "fp32", "bf16", "fp16", "fp8_e5m2"}) {
      for (const int stage : {0, 1, 2}) {
        for (const char* group :
             {"", R"("shard_group_size": 2)",
              R"("two_level_reduce_scatter": {"ranks_per_node": 2})",
              R"("two_level_reduce_scatter": {"ranks_per_node": 4, "in_node_dtype": "bf16"})",
              R"("two_level_reduce_scatter": {"ranks_per_node": 2}, "shard_group_size": 2)"}) {
          if (stage == 0 && std::string_view(group).find("shard_group") != std::string::npos) {
            continue;
          }
          const bool feedback = level[1] == '3';
          const Recipe recipe{.model = "bf16",
                              .stage = stage,
                              .level = level,
                              .error_feedback = feedback,
                              .wire = wire,
                              .micro_batches = 2,
                              .zero = R"("reduce_bucket_size": 50000)",
                              .zerofp8 = group};
          run_ranks(4, [&](Communicator& comm) {
            Model model(large_shapes(), recipe);
            Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
            const StepReport report = constant_step(engine);
            std::map<DType, std::int64_t> planned;
            for (const PlanCollective& c : engine.plan().collectives) {
              if (c.operation != "control") planned[c.dtype] += c.bytes_per_step;
            }
            std::int64_t total = 0;
            for (const auto& [dtype, bytes] : planned) {
              EXPECT_EQ(report.wire.of(dtype), std::uint64_t(bytes))
                  << recipe.name() << " " << group << " " << to_string(dtype);
              total += bytes;
            }
            EXPECT_EQ(report.wire.total_payload(), std::uint64_t(total)) << recipe.name();
            EXPECT_LT(report.wire.control, 20000u);
          });
        }
      }
    }
  }
}

TEST(EngineMemory, Fp8GradientWireIsAQuarterOfFp32s) {
  std::map<std::string, double> bytes;
  for (const char* wire : {"fp32", "fp8"}) {
    const Recipe recipe{.model = "bf16", .stage = 1, .level = "O0", .wire = wire};
    run_ranks(4, [&](Communicator& comm) {
      Model model(large_shapes(), recipe);
      Engine engine(recipe.settings(4), model.parameters(), {.data = &comm}, quiet());
      const StepReport report = constant_step(engine);
      const DType dtype = std::string(wire) == "fp32" ? DType::kFp32 : DType::kE4m3;
      if (comm.rank() == 0) bytes[wire] = double(report.wire.of(dtype));
    });
  }
  fmt::print("fp8 gradient wire: {:.4f} of fp32's\n", bytes["fp8"] / bytes["fp32"]);
  EXPECT_LE(bytes["fp8"], 0.26 * bytes["fp32"]);
}

double resident_mib() {
  std::ifstream in("/proc/self/statm");
  double pages = 0;
  in >> pages >> pages;
  return pages * double(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kAllowedMib = 1e9;  // sanitizers keep freed memory
#else
constexpr double kAllowedMib = 1;
#endif

// Case 46: 1,000 steps at A = 4, then 20 saves.
TEST(EngineMemory, Case46_ThousandStepsAndTwentySaves) {
  for (const char* zero :
       {R"("overlap_comm": false)", R"("overlap_comm": true, "reduce_bucket_size": 2000)"}) {
    for (const int stage : {1, 2}) {
      const TemporaryFolder folder("saves");
      const Recipe recipe{
          .model = "bf16", .stage = stage, .level = "O2", .micro_batches = 4, .zero = zero};
      run_ranks(2, [&](Communicator& comm) {
        Model model(odd_shapes(), recipe);
        Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
        const std::vector<std::byte> g = packed(DType::kBf16, std::vector<double>(5000, 0.5));
        double begin = 0;
        std::uint64_t allocations = 0;
        std::size_t transient = 0;
        for (int t = 0; t < 1000; ++t) {
          for (int k = 0; k < 4; ++k) {
            for (int i = 5; i >= 0; --i) engine.add_gradient(i, g.data(), DType::kBf16);
            // Late and unused gradients take other paths through the buffers.
            if (t % 7 == 0) engine.add_gradient(5, g.data(), DType::kBf16);
            engine.end_micro_batch();
          }
          engine.step();
          if (t == 9) {
            begin = resident_mib();
            allocations = engine.allocator().allocation_count();
            transient = engine.allocator().peak_bytes(Component::kTransient);
          }
        }
        EXPECT_EQ(engine.allocator().allocation_count(), allocations) << zero << stage;
        EXPECT_EQ(engine.allocator().peak_bytes(Component::kTransient), transient);
        comm.barrier(std::chrono::seconds(60));
        EXPECT_LE(resident_mib(), begin + kAllowedMib) << zero << stage;
        engine.save(folder.path());
        const double before = resident_mib();
        const std::uint64_t saved = engine.allocator().allocation_count();
        for (int i = 0; i < 20; ++i) engine.save(folder.path());
        EXPECT_EQ(engine.allocator().allocation_count(), saved);
        comm.barrier(std::chrono::seconds(60));
        EXPECT_LE(resident_mib(), before + kAllowedMib);
      });
    }
  }
}

TEST(EngineMemory, Case46_TwentyEnginesLeaveNothing) {
  double before = 0;
  for (int i = 0; i < 20; ++i) {
    const Recipe recipe{.model = "bf16", .stage = i % 3, .level = "O3", .micro_batches = 2};
    run_ranks(2, [&](Communicator& comm) {
      Model model(large_shapes(), recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      constant_step(engine);
      if (i % 2 == 0) add_constant(engine, 0, 1.0);  // destroyed in the middle of a step
      comm.barrier(std::chrono::seconds(60));
    });
    ::malloc_trim(0);
    if (i == 5) before = resident_mib();
  }
  EXPECT_LE(resident_mib(), before + kAllowedMib);
}

}  // namespace
}  // namespace zerofp8::test
