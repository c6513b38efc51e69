// What the engine's tests share: config texts from named parts, a model that owns its weights, and
// training loops with made-up gradients. Numbers of formats come from reference.h, not from the
// library.
//
//   Recipe recipe{.model = "bf16", .stage = 1, .level = "O2", .micro_batches = 2};
//   run_ranks(2, [&](Communicator& comm) {
//     Model model({{.name = "w", .shape = {3, 5}}}, recipe);
//     Engine engine(recipe.settings(2), model.parameters(), {.data = &comm}, quiet());
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/emulated_device.h"
#include "tests/reference.h"
#include "tests/thread_ranks.h"
#include "zerofp8/engine.h"
#include "zerofp8/error.h"

namespace zerofp8::test {

// One config. Empty strings: the key is absent.
struct Recipe {
  std::string model = "fp32";  // "bf16", "fp16": the flag that is on
  int stage = 0;
  std::string level;
  std::string accumulation;
  std::optional<bool> sharded;
  bool error_feedback = false;
  std::string wire;
  int micro_batches = 1;
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  std::string algorithm = "AdamW";
  double clipping = 0;
  std::string fp16;     // more keys of /fp16, e.g. R"("loss_scale": 128)"
  std::string zero;     // of /zero_optimization
  std::string zerofp8;  // of /zerofp8
  std::string top;      // of the file

  std::string json(int ranks) const {
    std::vector<std::string> keys;
    keys.push_back(fmt::format(R"("train_batch_size": {})", ranks * micro_batches));
    keys.push_back(fmt::format(R"("gradient_accumulation_steps": {})", micro_batches));
    keys.push_back(fmt::format(R"("gradient_clipping": {})", clipping));
    if (model == "bf16") keys.push_back(R"("bf16": {"enabled": true})");
    if (model == "fp16") {
      keys.push_back(
          fmt::format(R"("fp16": {{"enabled": true{}{}}})", fp16.empty() ? "" : ", ", fp16));
    }
    keys.push_back(fmt::format(R"("zero_optimization": {{"stage": {}{}{}}})", stage,
                               zero.empty() ? "" : ", ", zero));
    std::vector<std::string> acc, ours;
    if (!accumulation.empty()) acc.push_back(fmt::format(R"("dtype": "{}")", accumulation));
    if (sharded) acc.push_back(fmt::format(R"("sharded": {})", *sharded));
    if (error_feedback) acc.push_back(R"("error_feedback": true)");
    if (!acc.empty()) {
      keys.push_back(fmt::format(R"("gradient_accumulation_dtype": {{{}}})", fmt::join(acc, ", ")));
    }
    if (!level.empty()) ours.push_back(fmt::format(R"("opt_level": "{}")", level));
    if (!wire.empty()) ours.push_back(fmt::format(R"("gradient_communication_dtype": "{}")", wire));
    if (!zerofp8.empty()) ours.push_back(zerofp8);
    if (!ours.empty()) keys.push_back(fmt::format(R"("zerofp8": {{{}}})", fmt::join(ours, ", ")));
    keys.push_back(fmt::format(
        R"("optimizer": {{"type": "{}", "params": {{"lr": {}, "betas": [{}, {}], "eps": {}, )"
        R"("weight_decay": {}}}}})",
        algorithm, lr, beta1, beta2, eps, weight_decay));
    if (!top.empty()) keys.push_back(top);
    return fmt::format("{{{}}}", fmt::join(keys, ", "));
  }
  Settings settings(int ranks, int pipeline = 1, int tensor = 1) const {
    return resolve(Config::parse(json(ranks)),
                   {.data_ranks = ranks, .pipeline_stages = pipeline, .tensor_ranks = tensor});
  }
  DType dtype() const {
    return model == "bf16" ? DType::kBf16 : model == "fp16" ? DType::kFp16 : DType::kFp32;
  }
  std::string name() const {
    return fmt::format("{} {} accumulation {} {}{} stage {} wire {}", model, level, accumulation,
                       sharded ? (*sharded ? "sharded" : "local") : "by stage",
                       error_feedback ? " with error feedback" : "", stage, wire);
  }
};

inline const ref::Format& format_of(DType dtype) {
  return dtype == DType::kBf16 ? ref::bf16() : ref::fp16();
}

// Numbers as bytes of a plain dtype, rounded to nearest by table search, and back.
inline void write_plain(DType dtype, double x, void* memory, std::size_t index) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(memory)[index] = static_cast<float>(x);
  } else {
    const ref::Format& f = format_of(dtype);
    const std::uint32_t code = std::isnan(x) ? f.infinity_code() + 1 : f.nearest_ieee(x);
    static_cast<std::uint16_t*>(memory)[index] = static_cast<std::uint16_t>(code);
  }
}
inline double read_plain(DType dtype, const void* memory, std::size_t index) {
  if (dtype == DType::kFp32) return static_cast<const float*>(memory)[index];
  return format_of(dtype).value(static_cast<const std::uint16_t*>(memory)[index]);
}
inline std::size_t size_of(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

inline std::vector<std::byte> packed(DType dtype, const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype) + 1);
  for (std::size_t i = 0; i < values.size(); ++i) write_plain(dtype, values[i], bytes.data(), i);
  return bytes;
}

// Memory of a device, which the host may not be able to read.
class DeviceBytes {
 public:
  DeviceBytes(Device& device, std::span<const std::byte> host)
      : device_(&device), host_(host.begin(), host.end()) {
    if (device.is_host()) return;  // not among the bytes that an engine's allocator counts
    memory_ = Buffer(device.allocator(), Component::kTransient, host.size());
    write(0, host.data(), host.size());
  }
  std::byte* data() { return memory_.empty() ? host_.data() : memory_.data(); }
  void write(std::size_t at, const void* host, std::size_t bytes) {
    device_->upload(data() + at, host, bytes);
    device_->synchronize();
  }
  void read(std::size_t at, void* host, std::size_t bytes) const {
    device_->download(host, (memory_.empty() ? host_.data() : memory_.data()) + at, bytes);
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> host(host_.size());
    read(0, host.data(), host.size());
    return host;
  }

 private:
  Device* device_;
  std::vector<std::byte> host_;  // the numbers themselves where the device is the host
  Buffer memory_;
};

// The weights of one rank, on the device under test unless another is named.
class Model {
 public:
  using Init = std::function<double(std::size_t parameter, std::size_t element)>;
  static double sines(std::size_t parameter, std::size_t element) {
    return std::sin(double(element) * 0.7 + double(parameter)) * 0.5;
  }
  // Specs whose dtype is fp32 get the recipe's.
  Model(std::vector<ParameterSpec> specs, const Recipe& recipe, const Init& init = sines,
        std::shared_ptr<Device> device = device_under_test())
      : device_(device ? std::move(device) : make_cpu_device()), specs_(std::move(specs)) {
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      specs_[i].dtype = recipe.dtype();
      std::vector<double> values(static_cast<std::size_t>(specs_[i].numel()));
      for (std::size_t j = 0; j < values.size(); ++j) values[j] = init(i, j);
      memory_.emplace_back(*device_, packed(specs_[i].dtype, values));
    }
  }
  const std::shared_ptr<Device>& device() const { return device_; }
  std::vector<Parameter> parameters() {
    std::vector<Parameter> list;
    for (std::size_t i = 0; i < specs_.size(); ++i) list.push_back({specs_[i], memory_[i].data()});
    return list;
  }
  std::vector<ParameterSpec>& specs() { return specs_; }
  std::size_t count() const { return specs_.size(); }
  std::size_t numel(std::size_t i) const { return static_cast<std::size_t>(specs_[i].numel()); }
  double at(std::size_t parameter, std::size_t element) const {
    std::uint32_t number = 0;
    const DType dtype = specs_[parameter].dtype;
    memory_[parameter].read(element * size_of(dtype), &number, size_of(dtype));
    return read_plain(dtype, &number, 0);
  }
  void set(std::size_t parameter, std::size_t element, double x) {
    std::uint32_t number = 0;
    const DType dtype = specs_[parameter].dtype;
    write_plain(dtype, x, &number, 0);
    memory_[parameter].write(element * size_of(dtype), &number, size_of(dtype));
  }
  // All bytes: equal for models with the same bits.
  std::vector<std::vector<std::byte>> bytes() const {
    std::vector<std::vector<std::byte>> all;
    for (const DeviceBytes& memory : memory_) all.push_back(memory.bytes());
    return all;
  }

 private:
  std::shared_ptr<Device> device_;
  std::vector<ParameterSpec> specs_;
  std::vector<DeviceBytes> memory_;
};

// Options that write no log. With ZEROFP8_TEST_STEPS=queued steps are decided on the device, where
// everything but fp16 has to be the same.
inline EngineOptions quiet(bool loss_is_divided = false) {
  EngineOptions options;
  const char* steps = std::getenv("ZEROFP8_TEST_STEPS");
  options.capturable = steps != nullptr && std::string(steps) == "queued";
  options.loss_is_divided = loss_is_divided;
  options.log = [](const std::string&) {};
  options.device = device_under_test();
  return options;
}

inline void add(Engine& engine, int parameter, const std::vector<double>& gradient,
                DType dtype = DType::kFp32) {
  DeviceBytes memory(engine.device(), packed(dtype, gradient));
  engine.add_gradient(parameter, memory.data(), dtype);
}
inline void add_floats(Engine& engine, int parameter, const std::vector<float>& gradient) {
  DeviceBytes memory(engine.device(), std::as_bytes(std::span(gradient)));
  engine.add_gradient(parameter, memory.data(), DType::kFp32);
}
inline void add_constant(Engine& engine, int parameter, double x, DType dtype = DType::kFp32) {
  const auto& spec = engine.parameters()[static_cast<std::size_t>(parameter)].spec;
  add(engine, parameter, std::vector<double>(static_cast<std::size_t>(spec.numel()), x), dtype);
}

// A gradient that is a function of where it is only: short enough for every 16-bit format.
inline double made_up_gradient(std::int64_t step, int rank, int micro_batch, std::size_t parameter,
                               std::size_t element) {
  std::uint64_t h = (std::uint64_t(step) * 1000003u + std::uint64_t(rank) * 7919u +
                     std::uint64_t(micro_batch) * 104729u + parameter * 15485863u) *
                        0x9E3779B97F4A7C15ull +
                    element * 0xD1B54A32D192ED03ull;
  h ^= h >> 29;
  h *= 0xBF58476D1CE4E5B9ull;
  h ^= h >> 32;
  const double mantissa = double(h % 255 + 1);
  return ((h >> 20) % 2 != 0 ? -1 : 1) * std::ldexp(mantissa, -8 - int((h >> 24) % 5));
}
inline std::vector<double> made_up_gradients(std::int64_t step, int rank, int micro_batch,
                                             std::size_t parameter, std::size_t elements) {
  std::vector<double> g(elements);
  for (std::size_t j = 0; j < elements; ++j) {
    g[j] = made_up_gradient(step, rank, micro_batch, parameter, j);
  }
  return g;
}

// One step of all parameters with made-up gradients of this rank, times the loss scale.
inline StepReport made_up_step(Engine& engine, std::int64_t step, int rank,
                               DType dtype = DType::kFp32) {
  const auto& list = engine.parameters();
  for (int k = 0; k < engine.settings().batch.accumulation_steps; ++k) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      std::vector<double> g =
          made_up_gradients(step, rank, k, i, static_cast<std::size_t>(list[i].spec.numel()));
      for (double& x : g) x *= engine.loss_scale();
      add(engine, static_cast<int>(i), g, dtype);
    }
    engine.end_micro_batch();
  }
  return engine.step();
}

inline std::vector<ParameterSpec> odd_shapes() {
  return {{.name = "one", .shape = {1}},      {.name = "three", .shape = {3}},
          {.name = "row", .shape = {1, 17}},  {.name = "almost", .shape = {127}},
          {.name = "over", .shape = {3, 43}}, {.name = "large", .shape = {40, 125}}};
}

// Everything that decides how training goes on: weights, masters, moments, steps. Collective.
struct Snapshot {
  std::vector<std::vector<std::byte>> weights;
  std::vector<std::vector<float>> states;
  std::vector<std::int64_t> steps;
  bool operator==(const Snapshot& other) const {
    if (weights != other.weights || steps != other.steps) return false;
    if (states.size() != other.states.size()) return false;
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (states[i].size() != other.states[i].size()) return false;
      if (states[i].empty()) continue;
      if (std::memcmp(states[i].data(), other.states[i].data(), states[i].size() * 4) != 0) {
        return false;
      }
    }
    return true;
  }
};
inline Snapshot snapshot(Engine& engine, const Model& model) {
  Snapshot s;
  s.weights = model.bytes();
  for (int i = 0; i < static_cast<int>(engine.parameters().size()); ++i) {
    for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      s.states.push_back(engine.full_state(i, kind));
    }
    s.steps.push_back(engine.step_of(i));
  }
  return s;
}

// A folder that is removed again.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name) {
    path_ = std::filesystem::temp_directory_path() /
            fmt::format("zerofp8-{}-{}-{}", name, ::getpid(), std::random_device{}());
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace zerofp8::test
