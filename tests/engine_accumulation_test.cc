// Cases about accumulating and reducing gradients: 5, 6, 7, 8, 10, 11, 12.
#include <map>

#include "tests/engine_reduced.h"

namespace zerofp8::test {
namespace {

// Case 5: the explicit key wins in every cell, and the dtype in use can be asked for.
TEST(EngineAccumulation, Case05_AccumulatorDtypeIsTheKeysInEveryCell) {
  struct Row {
    const char* dtype;
    double sum;  // of 256 and 1
  };
  for (const Row row :
       {Row{"", 257}, Row{"fp32", 257}, Row{"bf16", 256}, Row{"fp16", 257}, Row{"fp8", 257}}) {
    for (const int stage : {0, 1, 2}) {
      for (const int stages : {1, 2}) {  // with and without a pipeline
        const Recipe recipe{
            .model = "bf16", .stage = stage, .accumulation = row.dtype, .micro_batches = 2};
        run_ranks(stages, [&](Communicator& comm) {
          const auto data = comm.split(comm.rank(), 0);
          const auto pipeline = comm.split(0, comm.rank());
          Model model(kOne, recipe);
          const Settings s = recipe.settings(1, stages);
          Engine engine(s, model.parameters(), {.data = data.get(), .model = pipeline.get()},
                        quiet(true));
          micro_batches(engine, {256, 1});
          engine.reduce_gradients();
          // One block of one value: FP8 has it at its largest code, up to FP32 rounding.
          const double tolerance = std::string(row.dtype) == "fp8" ? 257 * 0x1p-22 : 0;
          EXPECT_NEAR(engine.full_state(0, StateKind::kGradient)[0], row.sum, tolerance)
              << row.dtype << " stage " << stage << " pipeline " << stages;
          const std::string want = std::string(row.dtype).empty() ? "fp32" : row.dtype;
          EXPECT_EQ(to_string(engine.settings().accumulation), want == "fp8" ? "fp8_e4m3" : want);
          EXPECT_NE(plan_table(engine.plan()).find("accumulator"), std::string::npos);
        });
      }
    }
  }
}

// Case 6: every accumulator is cleared by the same call, after the step or skip only.
TEST(EngineAccumulation, Case06_ClearingNeitherLosesNorRepeatsGradients) {
  for (const char* dtype : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{
          .model = "bf16", .stage = stage, .accumulation = dtype, .micro_batches = 3};
      run_ranks(2, [&](Communicator& comm) {
        Model model(kOne, recipe);
        Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet(true));
        const auto seven = [&] {
          for (const double x : {1.0, 2.0, 4.0}) {
            add_constant(engine, 0, x, DType::kBf16);
            engine.end_micro_batch();
          }
          engine.reduce_gradients();
          return engine.full_state(0, StateKind::kGradient)[0];
        };
        const double tolerance = dtype[2] == '8' ? 7 * 0.125 : 0;  // E5M2 rounds twice
        EXPECT_NEAR(seven(), 7.0, tolerance) << dtype << " stage " << stage;
        engine.step();
        EXPECT_NEAR(seven(), 7.0, tolerance) << "after a step";
        engine.discard_gradients();
        engine.discard_gradients();
        EXPECT_NEAR(seven(), 7.0, tolerance) << "after two clears";
        engine.discard_gradients();
        add_constant(engine, 0, NAN);
        EXPECT_FALSE(engine.step().applied);
        EXPECT_NEAR(seven(), 7.0, tolerance) << "after a skip";
        engine.step();
        const StepReport idle = engine.step();  // nothing was added
        EXPECT_EQ(idle.grad_norm, 0);
        EXPECT_EQ(idle.unused_parameters, 1);
      });
    }
  }
}

// Case 7: accumulators are what is averaged over ranks.
TEST(EngineAccumulation, Case07_AccumulatorsAreAveragedOverRanks) {
  for (const char* model : {"fp32", "bf16", "fp16"}) {
    for (const char* dtype : {"fp32", "bf16", "fp16", "fp8"}) {
      for (const int stage : {0, 1, 2}) {
        const Recipe recipe{.model = model,
                            .stage = stage,
                            .accumulation = dtype,
                            .micro_batches = 2,
                            .fp16 = R"("loss_scale": 1)"};
        const auto g = reduced(recipe, 2, [](Engine& engine, int rank) {
          micro_batches(engine, rank == 0 ? std::vector<double>{1, 3} : std::vector<double>{5, 7});
        });
        // One value per block: FP8 has each sum as its largest code.
        for (const float x : g) EXPECT_NEAR(x, 4.0, 4 * 0x1p-21) << model << dtype << stage;
      }
    }
  }
}

// Case 8: the wire dtype is the one asked for; its bytes are counted.
TEST(EngineAccumulation, Case08_WireDtypeIsHonouredAndCounted) {
  struct Row {
    const char* key;
    DType dtype;
    double bytes_per_element;
  };
  for (const Row row :
       {Row{"", DType::kFp32, 4}, Row{"fp32", DType::kFp32, 4}, Row{"bf16", DType::kBf16, 2},
        Row{"fp8", DType::kE4m3, 1 + 4.0 / 128}, Row{"fp8_e5m2", DType::kE5m2, 1 + 4.0 / 128}}) {
    for (const int stage : {0, 1, 2}) {
      const Recipe recipe{.model = "bf16", .stage = stage, .wire = row.key};
      run_ranks(2, [&](Communicator& comm) {
        Model model({{.name = "w", .shape = {2, 512}}}, recipe);
        Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
        add_constant(engine, 0, 99840.0);
        engine.reduce_gradients();
        EXPECT_NEAR(engine.full_state(0, StateKind::kGradient)[1000], 99840.0,
                    99840.0 * (row.bytes_per_element < 2 ? 0x1p-21 : 0));
        const StepReport report = engine.step();
        double expected = 512 * row.bytes_per_element;  // half of the elements to the other rank
        if (row.dtype == DType::kFp32 && stage == 0) expected += 512 * 4;  // reduced shards
        if (row.dtype == DType::kBf16 && stage > 0) expected += 512 * 2;   // weights
        EXPECT_EQ(double(report.wire.of(row.dtype)), expected) << row.key << " stage " << stage;
        EXPECT_EQ(engine.settings().gradient_wire.value, row.dtype);
      });
    }
  }
}

TEST(EngineAccumulation, Case08_Fp16WireOverflowIsASkipOnAllRanks) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{
        .model = "bf16", .stage = stage, .top = R"("communication_data_type": "fp16")"};
    run_ranks(2, [&](Communicator& comm) {
      Model model(kOne, recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      const Snapshot before = snapshot(engine, model);
      add_constant(engine, 0, 99840.0);
      const StepReport report = engine.step();
      EXPECT_FALSE(report.applied);
      EXPECT_EQ(report.bad_parameter, "w");
      EXPECT_EQ(report.skipped_steps, 1);
      EXPECT_EQ(snapshot(engine, model), before);
    });
  }
}

// Case 10: above 16 micro-batches sums are rounded stochastically. A plain sum is a random walk,
// with an error of at most ulp^2 / 4 in the square per addition: 4.5 sigma are 15 % for bf16 and an
// eighth of it for fp16. FP8 blocks are rescaled as they grow, which pulls errors back: 15 %, and
// twice that with one mantissa bit less.
TEST(EngineAccumulation, Case10_ManyMicroBatchesKeepGrowing) {
  constexpr int kA = 512;
  const std::map<std::string, double> bounds = {
      {"fp32", 1e-5}, {"bf16", 0.15}, {"fp16", 0.019}, {"fp8_e4m3", 0.15}, {"fp8_e5m2", 0.30}};
  const std::vector<ParameterSpec> specs = {{.name = "w", .shape = {2, 256}}};
  for (const char* dtype : {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}) {
    for (const int stage : {1, 2}) {
      for (const bool by_hand : {false, true}) {  // A in the config, or more calls than it says
        const Recipe recipe{
            .stage = stage, .accumulation = dtype, .micro_batches = by_hand ? 1 : kA};
        const auto g = reduced(
            recipe, 1,
            [&](Engine& engine, int) {
              std::vector<double> x(512);
              for (std::size_t j = 0; j < x.size(); ++j) x[j] = 0.05 + 0.95 * double(j) / 511;
              DeviceBytes bytes(engine.device(), packed(DType::kFp32, x));
              for (int k = 0; k < kA; ++k) {
                engine.add_gradient(0, bytes.data(), DType::kFp32);
                engine.end_micro_batch();
              }
            },
            specs, true);
        const std::string what = fmt::format("{} stage {} by hand {}", dtype, stage, by_hand);
        double bias = 0;
        for (std::size_t j = 0; j < g.size(); ++j) {
          const double exact = kA * double(static_cast<float>(0.05 + 0.95 * double(j) / 511));
          const double error = g[j] / exact - 1;
          bias += error / double(g.size());
          const double bound = bounds.at(dtype);
          EXPECT_LE(std::fabs(error), bound) << what << " element " << j;
        }
        // 512 independent errors of at most 0.05 (E4M3): the mean's deviation is about 0.002.
        EXPECT_LE(std::fabs(bias), std::string(dtype) == "fp8_e5m2" ? 0.02 : 0.01) << what;
      }
    }
  }
}

TEST(EngineAccumulation, Case10_SixteenMicroBatchesRoundToNearest) {
  for (const bool feedback : {false, true}) {
    const Recipe recipe{.accumulation = "fp8", .error_feedback = feedback, .micro_batches = 16};
    const auto g = reduced(recipe, 1,
                           [](Engine& engine, int) {
                             std::vector<double> x(256);
                             for (std::size_t j = 0; j < x.size(); ++j)
                               x[j] = 0.05 + 0.95 * double(j) / 255;
                             for (int k = 0; k < 16; ++k) add(engine, 0, x);
                           },
                           {{.name = "w", .shape = {2, 128}}});
    for (std::size_t j = 0; j < g.size(); ++j) {
      const double exact = 0.05 + 0.95 * double(j) / 255;
      EXPECT_NEAR(g[j] / exact, 1, feedback ? 0.00625 : 0.0625) << j << " feedback " << feedback;
    }
  }
}

TEST(EngineAccumulation, Case10_BeyondItsLimitBf16Warns) {
  const Recipe recipe{.accumulation = "bf16", .micro_batches = 512};
  const auto comm = make_self_communicator();
  Model model(kOne, recipe);
  EngineOptions options = quiet();
  std::vector<std::string> lines;
  options.log = [&](const std::string& line) { lines.push_back(line); };
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, options);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("256"), std::string::npos) << lines[0];
}

// Case 11: one division by A, on every stage, however the batch is cut.
TEST(EngineAccumulation, Case11_DividedByAOnce) {
  for (const int stage : {0, 1, 2}) {
    for (const char* dtype : {"fp32", "fp8"}) {
      const Recipe recipe{.stage = stage, .accumulation = dtype, .micro_batches = 8};
      run_ranks(2, [&](Communicator& comm) {  // two pipeline stages
        const auto data = comm.split(comm.rank(), 0);
        Model model(kOne, recipe);
        Engine engine(recipe.settings(1, 2), model.parameters(),
                      {.data = data.get(), .model = &comm}, quiet());
        for (int outer = 0; outer < 3; ++outer) {
          micro_batches(engine, std::vector<double>(8, 1.0));
          engine.reduce_gradients();
          EXPECT_NEAR(engine.full_state(0, StateKind::kGradient)[3], 1.0, 0x1p-20);
          engine.step();
        }
      });
      const Recipe nested{.stage = stage, .accumulation = dtype, .micro_batches = 12};
      const auto g = reduced(nested, 1, [](Engine& engine, int) {
        for (int outer = 0; outer < 3; ++outer) micro_batches(engine, {1, 1, 1, 1});
      });
      EXPECT_NEAR(g[0], 1.0, 0x1p-20);
    }
  }
}

TEST(EngineAccumulation, Case11_NormDoesNotDependOnTheSplitIntoMicroBatches) {
  std::vector<double> norms;
  for (const int a : {1, 2, 3, 4, 6, 12}) {
    const Recipe recipe{.stage = 1, .micro_batches = a};
    const auto comm = make_self_communicator();
    Model model(kOne, recipe);
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
    for (int k = 0; k < a; ++k) {  // 12 samples: the mean of each micro-batch is what is given
      double mean = 0;
      for (int i = 0; i < 12 / a; ++i) mean += (k * (12 / a) + i) * a / 12.0;
      micro_batches(engine, {mean});
    }
    norms.push_back(engine.step().grad_norm);
  }
  for (const double norm : norms) EXPECT_NEAR(norm, 5.5 * 2, 1e-5);
}

// Case 12: more backward passes than the config says add up.
TEST(EngineAccumulation, Case12_AccumulatingByHand) {
  for (const int stage : {0, 1, 2}) {
    for (const bool ended : {false, true}) {
      const Recipe recipe{.stage = stage};
      const auto g = reduced(recipe, 2, [&](Engine& engine, int) {
        add_constant(engine, 0, 1.0);
        if (ended) engine.end_micro_batch();
        add_constant(engine, 0, 2.0);
      });
      for (const float x : g) EXPECT_EQ(x, 3.0f);
    }
  }
}

// no_sync is to add without ending the micro-batch: the same bits as deferring it by config.
TEST(EngineAccumulation, Case12_NoSyncHasTheBitsOfDeferring) {
  for (const char* level : {"O0", "O2"}) {
    for (const int stage : {0, 1}) {
      const Recipe recipe{.stage = stage, .level = level, .micro_batches = 4};
      std::vector<std::vector<float>> all;
      for (const bool no_sync : {false, true}) {
        all.push_back(reduced(recipe, 2,
                              [&](Engine& engine, int rank) {
                                for (int k = 0; k < 4; ++k) {
                                  add(engine, 0, made_up_gradients(0, rank, k, 0, 300));
                                  if (!no_sync || k == 3) engine.end_micro_batch();
                                }
                              },
                              {{.name = "w", .shape = {3, 100}}}));
      }
      EXPECT_EQ(all[0], all[1]) << level << stage;
    }
  }
}

// Late gradients (a bucket that has left already) of only some ranks are added, too.
TEST(EngineAccumulation, Case12_LateGradientsOfSomeRanksAreAdded) {
  const std::vector<ParameterSpec> specs = {{.name = "a", .shape = {2, 100}},
                                            {.name = "b", .shape = {3}}};
  for (const bool overlap : {false, true}) {
    for (const char* bucket : {"1", "1000"}) {
      const Recipe recipe{
          .stage = 2,
          .micro_batches = 2,
          .zero = fmt::format(R"("overlap_comm": {}, "reduce_bucket_size": {})", overlap, bucket)};
      run_ranks(3, [&](Communicator& comm) {
        Model model(specs, recipe);
        Engine engine(recipe.settings(3), model.parameters(), {.data = &comm}, quiet());
        for (int k = 0; k < 2; ++k) {
          add_constant(engine, 1, 3.0);
          add_constant(engine, 0, 6.0);
          if (comm.rank() == 1) add_constant(engine, 1, 9.0);
          if (comm.rank() == 2 && k == 1) add_constant(engine, 0, 12.0);
          engine.end_micro_batch();
        }
        engine.reduce_gradients();
        EXPECT_NEAR(engine.full_state(0, StateKind::kGradient)[199], 8.0, 1e-6);
        EXPECT_NEAR(engine.full_state(1, StateKind::kGradient)[2], 6.0, 1e-6);
      });
    }
  }
}

// Whether a bucket has left when the second gradient comes depends on its size; the bits do not.
TEST(EngineAccumulation, Case44_LateGradientsHaveTheSameBitsInEveryBucket) {
  const std::vector<ParameterSpec> specs = {{.name = "a", .shape = {3, 300}},
                                            {.name = "b", .shape = {200}},
                                            {.name = "c", .shape = {2, 128}}};
  for (const char* dtype : {"fp32", "bf16", "fp16", "fp8"}) {
    for (const char* wire : {"fp32", "fp8"}) {
      for (const int a : {2, 20}) {  // 20: stochastic, so the random stream is tested, too
        std::optional<Snapshot> first;
        for (const char* bucket : {"1", "700", "100000"}) {
          for (const bool overlap : {false, true}) {
            const Recipe recipe{
                .stage = 2,
                .accumulation = dtype,
                .wire = wire,
                .micro_batches = a,
                .zero = fmt::format(R"("overlap_comm": {}, "reduce_bucket_size": {})", overlap,
                                    bucket)};
            run_ranks(2, [&](Communicator& comm) {
              Model model(specs, recipe);
              Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
              for (int k = 0; k < a; ++k) {
                for (const int i : {2, 0, 0, 1, 2, 2}) {
                  if (comm.rank() == 1 && i == 2 && k % 2 == 0) continue;
                  add(engine, i,
                      made_up_gradients(i, comm.rank(), k, std::size_t(i),
                                        specs[std::size_t(i)].numel()));
                }
                engine.end_micro_batch();
              }
              engine.step();
              const Snapshot mine = snapshot(engine, model);
              if (comm.rank() != 0) return;
              if (!first) first = mine;
              EXPECT_EQ(mine, *first) << recipe.name() << " bucket " << bucket << " A " << a;
            });
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
