// Files that are not what they should be are refused by name on all ranks, and nothing of the
// engine changes.
#include <fstream>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

namespace fs = std::filesystem;

std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_all(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

const std::vector<ParameterSpec> kShapes = {{.name = "a", .shape = {3, 100}},
                                            {.name = "b", .shape = {7}}};
const Recipe kRecipe{
    .model = "bf16", .stage = 1, .level = "O3", .zerofp8 = R"("fp32_moments_below": 0)"};

// Saves after `steps` steps on two ranks; returns the checkpoint's folder.
fs::path save_one(const std::string& root, int steps) {
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    for (int t = 0; t < steps; ++t) made_up_step(engine, t, comm.rank());
    engine.save(root);
  });
  return fs::path(root) / fmt::format("step-{:08d}", steps);
}

// Loads with this recipe and shapes on two ranks; all of them must throw the same CheckpointError
// with `named` in it, and keep their state.
void expect_refused(const std::string& root, const std::string& named,
                    const Recipe& recipe = kRecipe,
                    const std::vector<ParameterSpec>& shapes = kShapes,
                    const std::vector<AdamOptions>& groups = {}) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](Communicator& comm) {
    Model model(shapes, recipe);
    EngineOptions options = quiet();
    options.groups = groups;
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, options);
    made_up_step(engine, 77, comm.rank());
    const Snapshot before = snapshot(engine, model);
    try {
      engine.load(root);
      ADD_FAILURE() << "loaded, though " << named << " should be refused";
    } catch (const CheckpointError& e) {
      texts[std::size_t(comm.rank())] = e.what();
    }
    EXPECT_EQ(snapshot(engine, model), before) << named;
    EXPECT_EQ(engine.applied_steps(), 1);
    EXPECT_TRUE(made_up_step(engine, 78, comm.rank()).applied);
  });
  EXPECT_NE(texts[0].find(named), std::string::npos) << texts[0] << "\n  should name " << named;
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(CheckpointDamage, EveryFileTruncatedChangedOrMissing) {
  const TemporaryFolder root("damage");
  const fs::path folder = save_one(root.path(), 3);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  ASSERT_EQ(files.size(), 4u);  // two shards, the index of the model and of the run
  for (const fs::path& file : files) {
    const std::string whole = read_all(file);
    const std::string name = file.filename().string();
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{4}, whole.size() / 2, whole.size() - 1}) {
      write_all(file, whole.substr(0, size));
      expect_refused(root.path(), name);
    }
    for (const std::size_t at :
         {std::size_t{0}, std::size_t{9}, whole.size() / 3, whole.size() / 2, whole.size() - 2}) {
      std::string changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ 1);
      write_all(file, changed);
      expect_refused(root.path(), name);
    }
    write_all(file, whole + "x");
    expect_refused(root.path(), name);
    fs::remove(file);
    expect_refused(root.path(), name == "index.json" ? "no complete checkpoint" : name);
    write_all(file, whole);
  }
  run_ranks(2, [&](Communicator& comm) {  // whole again
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    engine.load(root.path());
    EXPECT_EQ(engine.applied_steps(), 3);
  });
}

// A digit of the run's index: step count, learning rate, loss scale.
TEST(CheckpointDamage, ADigitOfTheRunsIndex) {
  const TemporaryFolder root("digit");
  const fs::path index = save_one(root.path(), 3) / "index.json";
  const std::string whole = read_all(index);
  int digits = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    if (std::isdigit(static_cast<unsigned char>(whole[at])) == 0 || digits++ % 5 != 0) continue;
    std::string changed = whole;
    changed[at] = changed[at] == '4' ? '5' : '4';
    write_all(index, changed);
    expect_refused(root.path(), "index.json");
  }
}

TEST(CheckpointDamage, SwappedAndForeignFiles) {
  const TemporaryFolder root("swap"), other("other");
  const fs::path folder = save_one(root.path(), 3), foreign = save_one(other.path(), 4);
  const std::string first = "model-00000.data-00000-of-00002.safetensors";
  const std::string second = "model-00000.data-00001-of-00002.safetensors";
  const std::string a = read_all(folder / first), b = read_all(folder / second);
  write_all(folder / first, b);
  write_all(folder / second, a);
  expect_refused(root.path(), "safetensors");
  write_all(folder / first, a);
  write_all(folder / second, b);
  for (const auto& entry : fs::directory_iterator(foreign)) {
    const std::string name = entry.path().filename().string();
    const std::string whole = read_all(folder / name);
    write_all(folder / name, read_all(entry.path()));
    // A foreign index.json names files of its own checkpoint: those that lie here are refused.
    expect_refused(root.path(), name == "index.json" ? "model-00000.json" : name);
    write_all(folder / name, whole);
  }
  for (const char* text : {"{}", "[]", "null", "{\"zerofp8_checkpoint\": 1}", "not json",
                           "{\"zerofp8_checkpoint\": 99, \"id\": \"x\"}"}) {
    const std::string whole = read_all(folder / "index.json");
    write_all(folder / "index.json", text);
    expect_refused(root.path(), "index.json");
    write_all(folder / "index.json", whole);
  }
}

TEST(CheckpointDamage, NotACheckpointAtAll) {
  const TemporaryFolder root("nothing");
  expect_refused(root.path(), root.path());
  expect_refused(root.path() + "/absent", "absent");
  write_all(fs::path(root.path()) / "file", "x");
  expect_refused(root.path() + "/file", "file");
  write_all(fs::path(root.path()) / "latest", "step-00000001\n");
  expect_refused(root.path(), "step-00000001");
}

// A checkpoint is not a place for others: loading it would find the old one.
TEST(CheckpointDamage, SavingIntoACheckpointIsRefused) {
  const TemporaryFolder root("into");
  const std::string folder = save_one(root.path(), 1).string();
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    engine.load(folder);
    made_up_step(engine, 1, comm.rank());
    try {
      engine.save(folder);
      ADD_FAILURE() << "saved into " << folder;
    } catch (const CheckpointError& e) {
      EXPECT_NE(std::string(e.what()).find("is a checkpoint itself"), std::string::npos)
          << e.what();
    }
    engine.save(root.path());
    engine.load(root.path());
    EXPECT_EQ(engine.applied_steps(), 2);
  });
}

// Without a latest, the newest complete folder, also beside damaged ones, counts.
TEST(CheckpointDamage, NewestCompleteFolderIsFound) {
  const TemporaryFolder root("newest");
  const fs::path older = save_one(root.path(), 1);
  save_one(root.path(), 2);
  for (int i = 0; i < 11; ++i) save_one(root.path(), 3);  // step-00000003, -2, ..., -11
  write_all(older / "index.json", "{");
  fs::remove(fs::path(root.path()) / "latest");
  std::string log;
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    EngineOptions options = quiet();
    options.log = [&](const std::string& line) { log += line; };
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, options);
    engine.load(root.path());
    EXPECT_EQ(engine.applied_steps(), 3);
  });
  EXPECT_NE(log.find("step-00000003-11 "), std::string::npos) << log;
  EXPECT_NE(log.find((older / "index.json").string()), std::string::npos) << log;
}

TEST(CheckpointDamage, OtherModel) {
  const TemporaryFolder root("model");
  save_one(root.path(), 2);
  auto shapes = kShapes;
  shapes[0].shape = {100, 3};
  expect_refused(root.path(), "\"a\" has shape (3, 100), the model's has (100, 3)", kRecipe,
                 shapes);
  shapes[0].shape = {301};
  expect_refused(root.path(), "\"a\"", kRecipe, shapes);
  shapes = kShapes;
  shapes[1].name = "c";
  expect_refused(root.path(), "c", kRecipe, shapes);
  shapes = kShapes;
  shapes.push_back({.name = "extra", .shape = {5}});
  expect_refused(root.path(), "extra", kRecipe, shapes);
  shapes = {kShapes[0]};
  expect_refused(root.path(), "b", kRecipe, shapes);
  expect_refused(root.path(), "group", kRecipe, kShapes, {{}, {}});
}

TEST(CheckpointDamage, OtherFormats) {
  const TemporaryFolder root("format");
  save_one(root.path(), 2);
  const auto with = [](const std::string& keys) {
    Recipe recipe = kRecipe;
    recipe.zerofp8 = keys;
    return recipe;
  };
  const std::string below = R"("fp32_moments_below": 0)";
  expect_refused(root.path(), "exp_avg_dtype", with(below + R"(, "exp_avg_dtype": "bf16")"));
  expect_refused(root.path(), "exp_avg_sq_dtype", with(below + R"(, "exp_avg_sq_dtype": "fp16")"));
  expect_refused(root.path(), "master_weights", with(below + R"(, "master_weights": "bits16")"));
  expect_refused(root.path(), "block_size", with(below + R"(, "block_size": 64)"));
  expect_refused(root.path(), "fp32_moments_below", with(R"("fp32_moments_below": 4096)"));
  Recipe fp16 = kRecipe;
  fp16.model = "fp16";
  expect_refused(root.path(), "dtype of parameter", fp16);
  Recipe level = kRecipe;
  level.level = "O0";
  expect_refused(root.path(), "exp_avg", level);
}

}  // namespace
}  // namespace zerofp8::test
