// Case 41: a save that fails or is killed at any moment leaves the last complete checkpoint, and
// what it leaves behind confuses nobody.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

const std::vector<ParameterSpec> kShapes = {{.name = "a", .shape = {3, 100}},
                                            {.name = "large", .shape = {500, 400}}};
const Recipe kRecipe{
    .model = "bf16", .stage = 1, .level = "O2", .zerofp8 = R"("fp32_moments_below": 0)"};

// What two ranks have after `steps` steps.
Snapshot state_after(int steps) {
  Snapshot result;
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    for (int t = 0; t < steps; ++t) made_up_step(engine, t, comm.rank());
    const Snapshot s = snapshot(engine, model);
    if (comm.rank() == 0) result = s;
  });
  return result;
}

struct Loaded {
  std::int64_t step = -1;
  Snapshot state;
};
Loaded load(const std::string& root) {
  Loaded result;
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe, [](std::size_t, std::size_t) { return 0.0; });
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    engine.load(root);
    const Snapshot s = snapshot(engine, model);
    if (comm.rank() == 0) result = {engine.applied_steps(), s};
  });
  return result;
}

// Saves after one step; then `fail` is applied while two steps' state is saved.
template <class Save>
void expect_first_survives(const std::string& root, const Save& save_second) {
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    made_up_step(engine, 0, comm.rank());
    engine.save(root);
    made_up_step(engine, 1, comm.rank());
    const Snapshot before = snapshot(engine, model);
    save_second(engine, comm);
    EXPECT_EQ(snapshot(engine, model), before);
    EXPECT_TRUE(made_up_step(engine, 2, comm.rank()).applied);  // training goes on
  });
  const Loaded found = load(root);
  EXPECT_EQ(found.step, 1);
  EXPECT_EQ(found.state, state_after(1));
}

TEST(CheckpointCrash, Case41_FullDisk) {
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  for (const rlim_t bytes : {rlim_t{0}, rlim_t{100}, rlim_t{4096}, rlim_t{300000}}) {
    const TemporaryFolder root("full");
    expect_first_survives(root.path(), [&](Engine& engine, Communicator& comm) {
      comm.barrier(std::chrono::seconds(20));
      if (comm.rank() == 0) {
        const rlimit small{bytes, old.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &small);
      }
      comm.barrier(std::chrono::seconds(20));
      EXPECT_THROW(engine.save(root.path()), CheckpointError) << bytes;
      comm.barrier(std::chrono::seconds(20));
      if (comm.rank() == 0) ::setrlimit(RLIMIT_FSIZE, &old);
      comm.barrier(std::chrono::seconds(20));
    });
    for (const auto& entry : fs::directory_iterator(root.path())) {
      EXPECT_NE(entry.path().filename().string().rfind(".tmp", 0), 0u) << entry.path();
    }
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
}

TEST(CheckpointCrash, Case41_FoldersThatCannotBeWritten) {
  const TemporaryFolder root("unwritable");
  std::ofstream(root.path() + "/file") << "x";
  for (const std::string& bad : {root.path() + "/file", root.path() + "/file/below",
                                 std::string("/proc/zerofp8"), std::string()}) {
    expect_first_survives(root.path(), [&](Engine& engine, Communicator&) {
      try {
        engine.save(bad);
        ADD_FAILURE() << "saved in " << bad;
      } catch (const CheckpointError& e) {
        EXPECT_NE(std::string(e.what()).find("nothing was saved"), std::string::npos) << e.what();
      }
    });
    fs::remove_all(root.path() + "/step-00000001");
    fs::remove(root.path() + "/latest");
  }
}

// Something stands in the way at the very end.
TEST(CheckpointCrash, Case41_LatestCannotBeReplaced) {
  const TemporaryFolder root("latest");
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    made_up_step(engine, 0, comm.rank());
    if (comm.rank() == 0) fs::create_directories(root.path() + "/latest/in the way");
    comm.barrier(std::chrono::seconds(20));
    EXPECT_THROW(engine.save(root.path()), CheckpointError);
  });
}

// A child that trains and saves is killed as soon as the parent sees a certain file.
void kill_child_when(const std::string& root, const std::function<bool()>& seen) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    try {
      run_ranks(2, [&](Communicator& comm) {
        Model model(kShapes, kRecipe);
        Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
        for (int t = 0; t < 200; ++t) {
          made_up_step(engine, t, comm.rank());
          engine.save(root);
        }
      });
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!seen() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  EXPECT_TRUE(seen() || std::chrono::steady_clock::now() < end) << "the child was too slow";
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
}

TEST(CheckpointCrash, Case41_KilledWhileSaving) {
  const auto any = [](const fs::path& root, const std::string& folder, const std::string& file) {
    std::error_code ignored;
    for (fs::directory_iterator it(root, ignored), end; it != end; it.increment(ignored)) {
      if (it->path().filename().string().rfind(folder, 0) != 0) continue;
      if (file.empty()) return true;
      for (fs::directory_iterator in(it->path(), ignored); in != end; in.increment(ignored)) {
        if (in->path().filename().string().find(file) != std::string::npos) return true;
      }
    }
    return false;
  };
  for (const char* step : {"step-00000001", "step-00000003"}) {
    for (const char* moment : {"", "data-00000", "data-00001", "model-00000.json", "index.json"}) {
      const TemporaryFolder root("killed");
      kill_child_when(root.path(), [&] {
        // After that step's folder is complete, when the next save has come so far.
        return fs::exists(fs::path(root.path()) / "latest") &&
               any(root.path(), step, "index.json") && any(root.path(), ".tmp-", moment);
      });
      const Loaded found = load(root.path());
      ASSERT_GE(found.step, step[12] - '0');
      EXPECT_EQ(found.state, state_after(int(found.step))) << moment;
      // And the run can go on saving there.
      run_ranks(2, [&](Communicator& comm) {
        Model model(kShapes, kRecipe);
        Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
        engine.load(root.path());
        made_up_step(engine, engine.applied_steps(), comm.rank());
        engine.save(root.path());
      });
      EXPECT_EQ(load(root.path()).state, state_after(int(found.step) + 1));
    }
  }
}

TEST(CheckpointCrash, Case41_LeftoversAreIgnored) {
  const TemporaryFolder root("leftovers");
  const fs::path path(root.path());
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    made_up_step(engine, 0, comm.rank());
    engine.save(root.path());
    if (comm.rank() == 0) {
      for (const char* name : {".tmp-0123", ".tmp-0123456789abcdef", ".tmp-my-other-files12",
                               ".tmp-aaaaaaaaaaaaaaaa", ".tmp-bbbbbbbbbbbbbbbb"}) {
        fs::create_directories(path / name);
        std::ofstream(path / name / "index.json") << "{";
        const auto hours_ago = fs::file_time_type::clock::now() - std::chrono::hours(2);
        const bool folder_is_old = name != std::string(".tmp-aaaaaaaaaaaaaaaa");
        const bool file_is_old = name != std::string(".tmp-bbbbbbbbbbbbbbbb");
        if (file_is_old) fs::last_write_time(path / name / "index.json", hours_ago);
        if (folder_is_old) fs::last_write_time(path / name, hours_ago);
      }
      fs::create_directories(path / "step-00000099");
      std::ofstream(path / "step-00000099" / "model-00000.json") << "{";
      std::ofstream(path / "latest.tmp") << "step-00000099";
    }
    comm.barrier(std::chrono::seconds(20));
    engine.save(root.path());  // the same step again
    made_up_step(engine, 1, comm.rank());
    engine.save(root.path());
  });
  EXPECT_FALSE(fs::exists(path / ".tmp-0123456789abcdef"));  // a killed save's
  EXPECT_TRUE(fs::exists(path / ".tmp-aaaaaaaaaaaaaaaa"));   // saves of others, under way
  EXPECT_TRUE(fs::exists(path / ".tmp-bbbbbbbbbbbbbbbb"));
  EXPECT_TRUE(fs::exists(path / ".tmp-0123"));  // names that no save gives
  EXPECT_TRUE(fs::exists(path / ".tmp-my-other-files12"));
  EXPECT_EQ(load(root.path()).step, 2);
  std::ofstream(path / "latest") << "step-00000099\n";  // names one that is not complete
  EXPECT_EQ(load(root.path()).step, 2);
  fs::remove(path / "latest");
  EXPECT_EQ(load(root.path()).step, 2);
  EXPECT_EQ(load((path / "step-00000001").string()).step, 1);
}

// The last file of a save fails: the error says that the checkpoint is there, and it is.
TEST(CheckpointCrash, Case41_OnlyLatestCannotBeWritten) {
  const TemporaryFolder root("latest");
  fs::create_directories(fs::path(root.path()) / "latest" / "in the way");
  run_ranks(2, [&](Communicator& comm) {
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(2), model.parameters(), {.data = &comm}, quiet());
    made_up_step(engine, 0, comm.rank());
    try {
      engine.save(root.path());
      ADD_FAILURE() << "latest was a folder";
    } catch (const CheckpointError& e) {
      EXPECT_NE(std::string(e.what()).find("complete in step-00000001"), std::string::npos)
          << e.what();
    }
  });
  EXPECT_EQ(load(root.path() + "/step-00000001").step, 1);
}

// Called on one rank only: an error that names the absent ranks, within the time-out.
TEST(CheckpointCrash, Case41_SaveOnOneRankOnly) {
  const TemporaryFolder root("alone");
  std::atomic<bool> done{false};
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(3, [&](Communicator& comm) {
    comm.set_timeout(milliseconds(500));
    Model model(kShapes, kRecipe);
    Engine engine(kRecipe.settings(3), model.parameters(), {.data = &comm}, quiet());
    if (comm.rank() == 0) {
      try {
        engine.save(root.path());
        ADD_FAILURE() << "saved alone";
      } catch (const CommError& e) {
        EXPECT_EQ(e.absent_ranks(), (std::vector<int>{1, 2})) << e.what();
      }
      done = true;
    }
    while (!done) std::this_thread::sleep_for(milliseconds(5));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  EXPECT_FALSE(fs::exists(root.path() + "/latest"));
}

// Also where one rank only is in the middle of a step and has buckets under way.
TEST(CheckpointCrash, LoadingInTheMiddleOfAStepAndSavingInAMicroBatchAreRefused) {
  for (const int stage : {0, 1, 2}) {
    Recipe recipe = kRecipe;
    recipe.stage = stage;
    recipe.zero = R"("overlap_comm": true, "reduce_bucket_size": 1)";
    const TemporaryFolder root("middle");
    run_ranks(2, [&](Communicator& comm) {
      comm.set_timeout(std::chrono::seconds(20));
      Model model(kShapes, recipe);
      Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
      const auto expect_refused = [&] {
        EXPECT_THROW(engine.save(root.path()), ArgumentError);
        EXPECT_THROW(engine.load(root.path()), ArgumentError);
      };
      // Between micro-batches: the state of the last step.
      const auto expect_saved = [&] {
        engine.save(root.path());
        EXPECT_THROW(engine.load(root.path()), ArgumentError);
      };
      engine.save(root.path());
      if (comm.rank() == 1) {
        add_constant(engine, 1, 1.0);
        add_constant(engine, 0, 1.0);
      }
      expect_refused();
      if (comm.rank() == 0) add_constant(engine, 0, 1.0);
      engine.end_micro_batch();
      expect_saved();
      engine.reduce_gradients();
      expect_saved();
      EXPECT_NEAR(engine.full_state(1, StateKind::kGradient)[0], 0.5, 1e-6);
      engine.step();
      engine.save(root.path());
      if (comm.rank() == 0) add_constant(engine, 1, 1.0);
      engine.discard_gradients();
      engine.load(root.path());
      EXPECT_EQ(engine.step().grad_norm, 0);
    });
  }
}

}  // namespace
}  // namespace zerofp8::test
