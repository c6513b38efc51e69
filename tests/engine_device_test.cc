// The engine on a device whose memory the host cannot touch (it faults): the CPU's bits, the CPU's
// checkpoints, and what is said of memory that is missing or in the wrong place.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "src/comm/staged_communicator.h"
#include "tests/engine_fixture.h"

namespace zerofp8::test {
namespace {

enum class Where { kCpu, kDevice };

std::shared_ptr<Device> device_at(Where where) {
  return where == Where::kCpu ? make_cpu_device() : std::shared_ptr<Device>(make_emulated_device());
}
EngineOptions options_on(const Model& model) {
  EngineOptions options = quiet();
  options.device = model.device();
  return options;
}

struct Row {
  const char* name;
  Recipe recipe;
  int ranks = 2;
};
std::vector<Row> rows() {
  std::vector<Row> all;
  const auto add = [&](const char* name, Recipe recipe, int ranks = 2) {
    recipe.micro_batches = std::max(recipe.micro_batches, 2);
    recipe.clipping = 0.5;
    all.push_back({name, std::move(recipe), ranks});
  };
  const std::string small = R"("fp32_moments_below": 0)";
  add("fp32_O0", {.level = "O0"});
  add("bf16_O0_stage1", {.model = "bf16", .stage = 1, .level = "O0"}, 3);
  add("bf16_O1_stage1", {.model = "bf16", .stage = 1, .level = "O1"}, 3);
  add("bf16_O2_alone", {.model = "bf16", .stage = 1, .level = "O2", .zerofp8 = small}, 1);
  add("bf16_O2_stage2", {.model = "bf16", .stage = 2, .level = "O2", .zerofp8 = small}, 3);
  add("bf16_O3_stage0", {.model = "bf16", .stage = 0, .level = "O3", .zerofp8 = small}, 2);
  add("bf16_O2_no_overlap",
      {.model = "bf16", .stage = 2, .level = "O2", .zero = R"("overlap_comm": false)"}, 2);
  add("bf16_small_buckets", {.model = "bf16",
                             .stage = 1,
                             .level = "O3",
                             .zero = R"("reduce_bucket_size": 600, "allgather_bucket_size": 600)",
                             .zerofp8 = small});
  add("bf16_no_master", {.model = "bf16",
                         .stage = 1,
                         .level = "O2",
                         .zerofp8 = small + R"(, "master_weights": "none")"});
  add("bf16_fp32_master",
      {.model = "bf16", .stage = 1, .level = "O2", .zerofp8 = R"("master_weights": "fp32")"});
  add("feedback", {.model = "bf16",
                   .stage = 1,
                   .level = "O2",
                   .accumulation = "fp8",
                   .error_feedback = true,
                   .zerofp8 = small});
  add("feedback_sharded", {.model = "bf16",
                           .stage = 2,
                           .level = "O2",
                           .accumulation = "fp8",
                           .error_feedback = true,
                           .zerofp8 = small});
  add("fp16_dynamic",
      {.model = "fp16", .stage = 1, .level = "O2", .fp16 = R"("initial_scale_power": 8)"});
  add("fp16_accumulator", {.model = "fp16",
                           .stage = 1,
                           .accumulation = "fp16",
                           .wire = "fp16",
                           .fp16 = R"("loss_scale": 16)"});
  add("many_micro_batches",
      {.model = "bf16", .stage = 2, .level = "O2", .micro_batches = 20, .zerofp8 = small});
  add("hybrid",
      {.model = "bf16",
       .stage = 1,
       .level = "O2",
       .zero = R"("zero_hpz_partition_size": 2)",
       .zerofp8 = small},
      4);
  add("two_level",
      {.model = "bf16",
       .stage = 1,
       .level = "O2",
       .zerofp8 = small + R"(, "two_level_reduce_scatter": {"ranks_per_node": 2})"},
      4);
  return all;
}

// Three steps, one of them skipped; then what every rank holds, and its norms.
struct RunResult {
  Snapshot state;
  std::vector<double> norms, of_parameters;
  std::vector<float> gradient;
  bool operator==(const RunResult&) const = default;
};
std::vector<RunResult> train(const Row& row, Where where) {
  std::vector<RunResult> runs(static_cast<std::size_t>(row.ranks));
  run_ranks(row.ranks, [&](Communicator& comm) {
    Model model(odd_shapes(), row.recipe, Model::sines, device_at(where));
    Engine engine(row.recipe.settings(row.ranks), model.parameters(), {.data = &comm},
                  options_on(model));
    RunResult& run = runs[static_cast<std::size_t>(comm.rank())];
    for (int t = 0; t < 4; ++t) {
      if (t == 2 && comm.rank() == 0) add_constant(engine, 1, INFINITY);
      if (t == 3) {  // looked at before the step, and a parameter that had two gradients
        add_constant(engine, 5, 0.25, DType::kBf16);
        add_constant(engine, 5, 0.5, DType::kBf16);
        engine.reduce_gradients();
        run.of_parameters = engine.gradient_norms();
        run.gradient = engine.full_state(5, StateKind::kGradient);
        run.norms.push_back(engine.step().grad_norm);
        continue;
      }
      const StepReport report = made_up_step(engine, t, comm.rank(), row.recipe.dtype());
      EXPECT_EQ(report.applied, t != 2);
      if (t != 2) run.norms.push_back(report.grad_norm);
    }
    run.state = snapshot(engine, model);
  });
  return runs;
}

class EngineDevice : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(All, EngineDevice, testing::ValuesIn(rows()),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(EngineDevice, HasTheBitsOfTheCpu) {
  const std::vector<RunResult> cpu = train(GetParam(), Where::kCpu);
  const std::vector<RunResult> device = train(GetParam(), Where::kDevice);
  for (std::size_t r = 0; r < cpu.size(); ++r) {
    EXPECT_EQ(cpu[r].norms, device[r].norms) << "rank " << r;
    EXPECT_EQ(cpu[r].of_parameters, device[r].of_parameters) << "rank " << r;
    EXPECT_EQ(cpu[r].gradient, device[r].gradient) << "rank " << r;
    EXPECT_TRUE(cpu[r].state == device[r].state) << "rank " << r;
  }
}

std::map<std::string, std::string> shards_in(const std::string& root) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".safetensors") continue;
    std::ifstream in(entry.path(), std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(in), {}};
    // Behind the header, which has the checkpoint's random id.
    std::uint64_t header = 0;
    std::memcpy(&header, text.data(), sizeof header);
    files[entry.path().filename().string()] = text.substr(8 + header);
  }
  return files;
}

// Saved on one and loaded on the other, both ways: the same files, the same way on.
TEST(EngineOnDevice, ChangesPlacesWithTheCpuOverACheckpoint) {
  const Recipe recipe{
      .model = "bf16", .stage = 1, .level = "O3", .zerofp8 = R"("fp32_moments_below": 0)"};
  std::map<Where, std::map<std::string, std::string>> files;
  for (const Where first : {Where::kCpu, Where::kDevice}) {
    const TemporaryFolder folder("device");
    const auto run = [&](Where where, bool load, Snapshot& end) {
      run_ranks(2, [&](Communicator& comm) {
        Model model(odd_shapes(), recipe, Model::sines, device_at(where));
        Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, options_on(model));
        if (load) engine.load(folder.path());
        if (!load) {
          made_up_step(engine, 0, comm.rank());
          engine.save(folder.path());
        }
        made_up_step(engine, 1, comm.rank());
        const Snapshot mine = snapshot(engine, model);
        if (comm.rank() == 0) end = mine;
      });
    };
    Snapshot unbroken, resumed;
    run(first, false, unbroken);
    files[first] = shards_in(folder.path());
    run(first == Where::kCpu ? Where::kDevice : Where::kCpu, true, resumed);
    EXPECT_TRUE(unbroken == resumed);
  }
  EXPECT_EQ(files[Where::kCpu].size(), 2u);
  EXPECT_EQ(files[Where::kCpu], files[Where::kDevice]);
}

// A rank's state in files of the caller's own.
TEST(EngineOnDevice, PiecesAreReadAndWritten) {
  const Recipe recipe{.model = "bf16", .level = "O2", .zerofp8 = R"("fp32_moments_below": 0)"};
  const auto comm = make_self_communicator();
  std::map<std::string, std::vector<std::byte>> saved;
  StateCounters counters;
  std::vector<std::vector<std::byte>> weights;
  Snapshot expected;
  for (const Where where : {Where::kCpu, Where::kDevice}) {
    Model model(odd_shapes(), recipe, Model::sines, device_at(where));
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, options_on(model));
    if (where == Where::kCpu) {
      made_up_step(engine, 0, 0);
      for (const StatePiece& piece : engine.state_pieces()) {
        std::vector<std::byte>& to = saved[piece.name + std::to_string(piece.parameter)];
        to.resize(piece.bytes.size());
        engine.read_piece(piece, to.data());
      }
      counters = engine.counters();
      expected = snapshot(engine, model);
      for (std::size_t i = 0; i < model.count(); ++i) weights.push_back(model.bytes()[i]);
      continue;
    }
    for (const StatePiece& piece : engine.state_pieces()) {
      const auto& from = saved.at(piece.name + std::to_string(piece.parameter));
      ASSERT_EQ(from.size(), piece.bytes.size());
      engine.write_piece(piece, from.data());
    }
    for (std::size_t i = 0; i < model.count(); ++i) {
      for (std::size_t j = 0; j < model.numel(i); ++j) {
        model.set(i, j, read_plain(DType::kBf16, weights[i].data(), j));
      }
    }
    engine.restore_counters(counters);
    EXPECT_TRUE(snapshot(engine, model) == expected);
  }
}

template <class Error, class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}
void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
  }
}

// One rank's parameter is in host memory: all ranks say which, and what to do.
TEST(EngineOnDevice, MemoryInTheWrongPlaceIsNamed) {
  const Recipe recipe{.model = "bf16", .stage = 1};
  std::vector<float> host(5000);
  run_ranks(2, [&](Communicator& comm) {
    Model model(odd_shapes(), recipe, Model::sines, make_emulated_device());
    std::vector<Parameter> parameters = model.parameters();
    if (comm.rank() == 1) parameters[3].weight = host.data();
    expect_parts(error_of<ArgumentError>([&] {
                   Engine(recipe.settings(2), parameters, {.data = &comm}, options_on(model));
                 }),
                 {"data rank 1", "\"almost\"", "is in host memory", "emulated", "move"});
    Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, options_on(model));
    expect_parts(
        error_of<ArgumentError>([&] { engine.add_gradient(5, host.data(), DType::kFp32); }),
        {"\"large\"", "is in host memory", "emulated"});
    EXPECT_EQ(engine.step().unused_parameters, 6);  // nothing was added
  });
}

// No memory on one rank: all ranks list what the plan needs against what is free.
TEST(EngineOnDevice, OutOfMemoryListsThePlan) {
  const Recipe recipe{.model = "bf16", .stage = 1, .level = "O2"};
  run_ranks(2, [&](Communicator& comm) {
    const std::size_t pages = comm.rank() == 1 ? 8 : 1000;
    const std::shared_ptr<Device> device = make_emulated_device({.capacity = pages << 12});
    Model model(odd_shapes(), recipe, Model::sines, device);
    const std::size_t before = device->allocator().bytes(Component::kTransient);
    expect_parts(
        error_of<DeviceError>([&] {
          Engine(recipe.settings(2), model.parameters(), {.data = &comm}, options_on(model));
        }),
        {"data rank 1", "emulated", "are free", "gradient accumulator", "exp_avg", "exp_avg_sq",
         "master", "bytes", "together", "opt_level"});
    EXPECT_EQ(device->allocator().state_bytes(), 0u);
    EXPECT_EQ(device->allocator().bytes(Component::kTransient), before);
  });
}

// A communicator of device memory needs an engine on that device.
TEST(EngineOnDevice, ACommunicatorOfDeviceMemoryIsRefusedOnTheCpu) {
  const Recipe recipe{.model = "bf16", .stage = 1};
  run_ranks(2, [&](Communicator& comm) {
    const auto device = make_emulated_device();
    StagedCommunicator staged(comm, *device);
    Model model(odd_shapes(), recipe, Model::sines, make_cpu_device());
    expect_parts(error_of<ArgumentError>([&] {
                   Engine(recipe.settings(2), model.parameters(), {.data = &staged},
                          options_on(model));
                 }),
                 {"groups.data (threads)", "device memory", "cpu", "EngineOptions::device"});
  });
}

// State that a config wants in host memory is not put anywhere else.
TEST(EngineOnDevice, OffloadedStateIsRefused) {
  const Recipe recipe{
      .model = "bf16", .stage = 1, .zero = R"("offload_optimizer": {"device": "cpu"})"};
  run_ranks(2, [&](Communicator& comm) {
    Model model(odd_shapes(), recipe, Model::sines, make_emulated_device());
    expect_parts(error_of<ArgumentError>([&] {
                   Engine(recipe.settings(2), model.parameters(), {.data = &comm},
                          options_on(model));
                 }),
                 {"/zero_optimization/offload_optimizer/device", "emulated", "host memory"});
    Model host(odd_shapes(), recipe, Model::sines, make_cpu_device());
    EXPECT_NO_THROW(
        Engine(recipe.settings(2), host.parameters(), {.data = &comm}, options_on(host)));
  });
}

// What travels is the same, and so is what is counted.
TEST(StagedCommunicator, MovesDeviceMemory) {
  run_ranks(3, [](Communicator& comm) {
    const auto device = make_emulated_device();
    StagedCommunicator staged(comm, *device);
    EXPECT_TRUE(staged.on_device());
    EXPECT_EQ(staged.rank(), comm.rank());
    EXPECT_EQ(staged.size(), 3);
    std::vector<std::byte> mine(3 * 100);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i] = std::byte(i + 100 * std::size_t(comm.rank()));
    }
    DeviceBytes send(*device, mine), recv(*device, std::vector<std::byte>(300)),
        all(*device, std::vector<std::byte>(900));
    const std::span<const std::byte> from(static_cast<std::byte*>(send.data()), 300);
    const CallOptions options{.dtype = DType::kE4m3, .label = "staged"};
    staged.all_to_all(from, {static_cast<std::byte*>(recv.data()), 300}, options)->wait();
    const auto second =
        staged.all_gather(from, {static_cast<std::byte*>(all.data()), 900}, options);
    second->wait();
    second->wait();
    const auto got = recv.bytes(), gathered = all.bytes();
    for (std::size_t r = 0; r < 3; ++r) {
      for (std::size_t i = 0; i < 100; ++i) {
        EXPECT_EQ(got[r * 100 + i], std::byte(i + 100 * std::size_t(comm.rank()) + 100 * r));
      }
      for (std::size_t i = 0; i < 300; ++i) {
        EXPECT_EQ(gathered[r * 300 + i], std::byte(i + 100 * r));
      }
    }
    {  // without a wait: the destructor waits
      const auto unwatched =
          staged.broadcast({static_cast<std::byte*>(send.data()), 300}, 1, options);
    }
    EXPECT_EQ(send.bytes()[0], std::byte{100});
    EXPECT_EQ(staged.bytes_sent().of(DType::kE4m3), comm.bytes_sent().of(DType::kE4m3));
    EXPECT_GE(comm.bytes_sent().of(DType::kE4m3), 200u + 600u);
    const auto host = staged.split(0, comm.rank());
    EXPECT_FALSE(host->on_device());
  });
}

}  // namespace
}  // namespace zerofp8::test
