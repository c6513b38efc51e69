// Cases 35 and 36: block scales and sums of many ranks, seen in the engine's reduced gradient.
#include "tests/engine_reduced.h"

namespace zerofp8::test {
namespace {

// Case 35, in the engine's buffers: zero, tiny and mixed blocks.
TEST(EngineAccumulation, Case35_BlocksOfZeroAndTinyAmax) {
  for (const char* dtype : {"fp8_e4m3", "fp8_e5m2", "fp16"}) {
    for (const int stage : {0, 1, 2}) {
      for (const double x : {0.0, 1e-40, 0x1p-149, 0x1p-126, 1e38}) {
        const Recipe recipe{.stage = stage, .accumulation = dtype, .wire = dtype};
        if (std::string(dtype) == "fp16" && x > 1) continue;  // plain fp16 on the wire
        const auto g = reduced(recipe, 1, [&](Engine& engine, int) { add_constant(engine, 0, x); });
        for (const float y : g) {
          EXPECT_TRUE(std::isfinite(y));
          EXPECT_TRUE(x != 0 || y == 0);
          // The floor of the scale, 2^-127: half of its smallest step may be lost besides 6.25 %.
          if (std::string(dtype) != "fp16") {
            EXPECT_NEAR(y, x, std::max(x * 0.0625, 0x1p-127 * 0x1p-9)) << dtype;
          }
        }
      }
    }
  }
}

TEST(EngineAccumulation, Case35_LaterSmallMicroBatchesDoNotClipEarlierOnes) {
  for (const int stage : {0, 1, 2}) {
    const Recipe recipe{.stage = stage, .accumulation = "fp8", .micro_batches = 3};
    const auto g = reduced(
        recipe, 1,
        [](Engine& engine, int) {
          for (const std::vector<double>& x :
               {std::vector<double>{8, 0, 0, 0}, {0, 2, 0, 0}, {0, 0, 1, 0}}) {
            add(engine, 0, x);
            engine.end_micro_batch();
          }
        },
        kOne, true);
    EXPECT_EQ(g, (std::vector<float>{8, 2, 1, 0}));
  }
}

// Case 36: no saturation, no quiet rank flushed, one division.
TEST(EngineAccumulation, Case36_SumsOfManyRanksInNarrowFormats) {
  for (const int stage : {0, 1, 2}) {
    for (const char* wire : {"fp8_e4m3", "fp8_e5m2"}) {
      const Recipe recipe{.stage = stage, .accumulation = "fp32", .wire = wire};
      const auto same = reduced(recipe, 8, [](Engine& e, int) { add_constant(e, 0, 448.0); });
      for (const float x : same) EXPECT_NEAR(x, 448.0f, 448 * 0x1p-21);
      const auto mixed = reduced(recipe, 8, [](Engine& e, int rank) {
        add(e, 0, rank == 0 ? std::vector<double>{1, 0, 0, 0} : std::vector<double>{0, 1e-6, 0, 0});
      });
      EXPECT_NEAR(mixed[0], 0.125, 0.125 * 0.0625);
      EXPECT_NEAR(mixed[1], 8.75e-7, 8.75e-7 * 0.0625);
    }
    const Recipe recipe{.stage = stage, .wire = "fp16"};
    const auto g = reduced(recipe, 4, [](Engine& e, int) { add(e, 0, {40000, 1e-5, 100, 0}); });
    EXPECT_EQ(g[0], 40000.0f);  // the sum is beyond fp16
    EXPECT_NEAR(g[1], 1.00136e-5, 1e-10);
    EXPECT_EQ(g[2], 100.0f);
  }
}

}  // namespace
}  // namespace zerofp8::test
