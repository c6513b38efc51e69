// What an engine on a device says of memory that is missing or in the wrong place and of
// communicators that fail behind the host's back, and the communicator that stages its payloads.
#include <gtest/gtest.h>

#include "src/comm/staged_communicator.h"
#include "tests/engine_device.h"

namespace zerofp8::test {
namespace {

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

// A communicator of device memory, as NCCL's is: what it queued may turn out to have failed only
// after its Work let the stream go on.
class LateFailure final : public ForwardingCommunicator {
 public:
  LateFailure(Communicator& comm, Device& device)
      : ForwardingCommunicator(&comm_), comm_(comm, device) {}
  std::string story;
  std::vector<std::string> labels;

  std::string failure() const override { return story; }
  std::string backend() const override { return "late"; }
  std::unique_ptr<Work> all_to_all(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    labels.push_back("all_to_all " + std::string(options.label));
    return comm_.all_to_all(send, recv, options);
  }
  std::unique_ptr<Work> all_gather(std::span<const std::byte> send, std::span<std::byte> recv,
                                   const CallOptions& options) override {
    labels.push_back("all_gather " + std::string(options.label));
    return comm_.all_gather(send, recv, options);
  }
  std::unique_ptr<Work> broadcast(std::span<std::byte> data, int root,
                                  const CallOptions& options) override {
    ADD_FAILURE() << "a broadcast of " << options.label;
    return comm_.broadcast(data, root, options);
  }

 private:
  StagedCommunicator comm_;
};

// Such a failure, on one rank, stops the step on all of them before anything is changed.
TEST(EngineOnDevice, AFailureBehindTheHostsBackStopsTheStep) {
  for (const int stage : {1, 2}) {
    const Recipe recipe{.model = "bf16", .stage = stage, .level = "O2"};
    run_ranks(2, [&](Communicator& comm) {
      Model model(odd_shapes(), recipe, Model::sines, make_emulated_device());
      LateFailure late(comm, *model.device());
      Engine engine(recipe.settings(2), model.parameters(), {.data = &late}, options_on(model));
      // Ranks are connected from the start: in a micro-batch one of them may wait elsewhere.
      EXPECT_EQ(late.labels,
                (std::vector<std::string>{"all_to_all connecting", "all_gather connecting"}));
      EXPECT_TRUE(made_up_step(engine, 0, comm.rank()).applied);
      const auto weights = model.bytes();
      if (comm.rank() == 1) late.story = "cuda:1 has fallen off the bus";
      expect_parts(error_of<CommError>([&] { made_up_step(engine, 1, comm.rank()); }),
                   {"cuda:1 has fallen off the bus"});
      EXPECT_EQ(model.bytes(), weights);
      EXPECT_EQ(engine.applied_steps(), 1);
    });
  }
}

// Ranks that differ are told over the control path: payloads would be read on the device.
TEST(EngineOnDevice, DifferencesBetweenRanksAreToldWithoutPayloads) {
  run_ranks(2, [&](Communicator& comm) {
    const Recipe recipe{.model = "bf16", .stage = 1, .lr = comm.rank() == 0 ? 0.1 : 0.2};
    Model model(odd_shapes(), recipe, Model::sines, make_emulated_device());
    LateFailure late(comm, *model.device());
    expect_parts(error_of<CommError>([&] {
                   Engine(recipe.settings(2), model.parameters(), {.data = &late},
                          options_on(model));
                 }),
                 {"lr 0.1", "lr 0.2"});
    EXPECT_TRUE(late.labels.empty());
  });
}

// fp16 weights that are written between the reduction and the step count in the bound on overflow,
// and a pass that only looked leaves nothing behind for the next attempt.
TEST(EngineOnDevice, Fp16WritesBeforeTheStepAreSeen) {
  for (const Where where : {Where::kCpu, Where::kDevice}) {
    const Recipe recipe{.model = "fp16", .level = "O2", .lr = 1e-3, .fp16 = R"("loss_scale": 1)"};
    const auto comm = make_self_communicator();
    Model model({{.name = "w", .shape = {2, 128}}}, recipe, Model::sines, device_at(where));
    Engine engine(recipe.settings(1), model.parameters(), {.data = comm.get()}, options_on(model));
    const auto attempt = [&] {
      add_constant(engine, 0, -1.0);
      engine.reduce_gradients();
    };
    attempt();
    model.set(0, 3, 65504);
    engine.weight_changed(0);
    engine.group(0).lr = 100;
    EXPECT_FALSE(engine.step().applied);  // would be infinite
    attempt();
    engine.group(0).lr = -1;  // found after the pass that looks
    EXPECT_THROW(engine.step(), ArgumentError);
    engine.group(0).lr = 1e-3;
    model.set(0, 3, 0.5);
    engine.weights_changed();
    EXPECT_TRUE(engine.step().applied);
  }
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
