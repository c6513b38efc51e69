// Hyper-parameters that cannot be, or that differ between ranks: the same error on all of them,
// also on other pipeline stages; nothing is changed, and set right the same step goes on.
#include <chrono>
#include <limits>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Change {
  const char* name;
  void (*make)(AdamOptions&);
};
constexpr Change kFaults[] = {
    {"lr", [](AdamOptions& o) { o.lr = kNan; }},
    {"lr", [](AdamOptions& o) { o.lr = -1; }},
    {"lr", [](AdamOptions& o) { o.lr = kInfinity; }},
    {"lr", [](AdamOptions& o) { o.lr = 1e39; }},
    {"weight_decay", [](AdamOptions& o) { o.weight_decay = kNan; }},
    {"weight_decay", [](AdamOptions& o) { o.weight_decay = -0.1; }},
    {"eps", [](AdamOptions& o) { o.eps = 0; }},
    {"eps", [](AdamOptions& o) { o.eps = -1; }},
    {"eps", [](AdamOptions& o) { o.eps = 1e-50; }},  // 0 in FP32
    {"betas", [](AdamOptions& o) { o.beta1 = 1; }},
    {"betas", [](AdamOptions& o) { o.beta2 = 1.5; }},
    {"betas", [](AdamOptions& o) { o.beta2 = kNan; }},
};

const std::vector<ParameterSpec> kShapes = {{.name = "a", .shape = {3, 100}},
                                            {.name = "b", .shape = {7}}};

// 2 stages x 2 data ranks, the error on one rank, on one slice or on all.
TEST(EngineHyper, FaultsStopAllStagesAndTheStepGoesOnWhenMended) {
  for (const char* level : {"O0", "O2"}) {
    const Recipe recipe{.stage = 1, .level = level};
    for (const Change& fault : kFaults) {
      for (const std::vector<int>& at : {std::vector<int>{2}, {0, 1}, {0, 1, 2, 3}}) {
        SCOPED_TRACE(fmt::format("{} {} on {}", level, fault.name, fmt::join(at, ",")));
        const auto begin = std::chrono::steady_clock::now();
        std::vector<std::string> texts(4);
        run_ranks(4, [&](Communicator& comm) {
          comm.set_timeout(std::chrono::seconds(20));
          const int rank = comm.rank();
          const auto data = comm.split(rank / 2, rank);
          const auto stages = comm.split(rank % 2, rank);
          Model model(kShapes, recipe);
          Engine engine(recipe.settings(2, 2), model.parameters(),
                        {.data = data.get(), .model = stages.get()}, quiet());
          made_up_step(engine, 0, rank % 2);
          const auto weights = model.bytes();
          const AdamOptions good = engine.group(0);
          if (std::find(at.begin(), at.end(), rank) != at.end()) fault.make(engine.group(0));
          add_constant(engine, 0, 1.0);
          try {
            engine.step();
            ADD_FAILURE() << "rank " << rank << " went on";
          } catch (const ArgumentError& e) {
            texts[static_cast<std::size_t>(rank)] = e.what();
          }
          EXPECT_EQ(model.bytes(), weights);
          EXPECT_EQ(engine.step_of(0), 1);
          engine.group(0) = good;
          EXPECT_TRUE(engine.step().applied);
          EXPECT_EQ(engine.step_of(0), 2);
        });
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
        for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
        EXPECT_FALSE(texts[0].empty());
        // A rank alone differs from its neighbour, too, and may be told of that first.
        if (at.size() > 1) {
          EXPECT_NE(texts[0].find(std::string(fault.name) + ": given"), std::string::npos)
              << texts[0];
        }
      }
    }
  }
}

TEST(EngineHyper, FaultsAreFoundAtTheStart) {
  for (const Change& fault : kFaults) {
    const Recipe recipe;
    const auto comm = make_self_communicator();
    Model model(kShapes, recipe);
    EngineOptions options = quiet();
    options.groups.resize(1);
    fault.make(options.groups[0]);
    EXPECT_THROW(Engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, options),
                 ArgumentError)
        << fault.name;
  }
}

TEST(EngineHyper, TrainerScalesThatDifferAreAnError) {
  const Recipe recipe{.stage = 1};
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, recipe);
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    engine.set_trainer_loss_scale(comm.rank() == 0 ? 1 : 4);
    add_constant(engine, 0, 1.0);
    EXPECT_THROW(engine.step(), ArgumentError);
  });
}

TEST(EngineHyper, ScalesWithoutAnInverseInFp32AreRefused) {
  const Recipe recipe;
  const auto comm = make_self_communicator();
  Model model(kShapes, recipe);
  Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  for (const double scale : {0.0, -1.0, kNan, kInfinity, 1e300, 1e-300}) {
    EXPECT_THROW(engine.set_trainer_loss_scale(scale), ArgumentError) << scale;
  }
  for (const double divisor : {-3.0, kNan, kInfinity}) {
    auto specs = kShapes;
    specs[0].reduce_group = "experts";
    Model experts(specs, recipe);
    EXPECT_THROW(
        Engine(recipe.settings(1), experts.parameters(),
               {.data = comm.get(), .reduce = {{"experts", {comm.get(), divisor}}}}, quiet()),
        ArgumentError)
        << divisor;
  }
}

TEST(EngineHyper, NamesHaveToBeUtf8) {
  const Recipe recipe;
  const auto comm = make_self_communicator();
  const auto engine_of = [&](const std::string& name) {
    Model model({{.name = name, .shape = {4}}}, recipe);
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
  };
  for (const char* name :
       {"a", "", "gewicht.\xC3\xA4", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\x9F\xBF"}) {
    EXPECT_NO_THROW(engine_of(name)) << name;
  }
  for (const char* name : {"\xFF", "a\x80", "\xC3", "\xC0\xAF", "\xE0\x80\xAF", "\xED\xA0\x80",
                           "\xF4\x90\x80\x80", "\xE2\x82", "\xF0\x9F\x98"}) {
    EXPECT_THROW(engine_of(name), ArgumentError) << name;
  }
}

TEST(EngineHyper, ParametersBeyond2To50ElementsAreRefused) {
  const Recipe recipe;
  const auto comm = make_self_communicator();
  float weight = 0;
  try {
    Engine engine(recipe.settings(1),
                  {{{.name = "huge", .shape = {std::int64_t{1} << 62}}, &weight}},
                  {.data = comm.get()}, quiet());
    ADD_FAILURE();
  } catch (const ArgumentError& e) {
    EXPECT_NE(std::string(e.what()).find("\"huge\" has 4611686018427387904 elements"),
              std::string::npos)
        << e.what();
  }
}

// With beta2 = 0 there is no bound on an update: an fp16 weight may leave its range in one step.
TEST(EngineHyper, Fp16WeightsStayFiniteWithoutASecondMoment) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    const Recipe recipe{
        .model = "fp16", .level = level, .lr = 0.5, .beta2 = 0, .fp16 = R"("loss_scale": 1)"};
    const auto comm = make_self_communicator();
    Model model(kShapes, recipe);
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, quiet());
    for (int t = 0; t < 6; ++t) {
      add_constant(engine, 0, t % 2 == 0 ? 60000.0 : 1e-7);
      engine.step();
      for (std::size_t j = 0; j < 300; ++j) ASSERT_TRUE(std::isfinite(model.at(0, j))) << level;
    }
  }
}

}  // namespace
}  // namespace zerofp8::test
