// The engine on a device whose memory the host cannot touch (it faults): the CPU's bits and the
// CPU's checkpoints.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "tests/engine_rows.h"

namespace zerofp8::test {
namespace {

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
    EXPECT_EQ(cpu[r].told, device[r].told) << "rank " << r;
    EXPECT_EQ(cpu[r].wire, device[r].wire) << "rank " << r;
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

}  // namespace
}  // namespace zerofp8::test
