// An engine whose steps are recorded and replayed, and the same steps on an ordinary engine.
#pragma once

#include "tests/engine_rows.h"
#include "tests/recording_device.h"

namespace zerofp8::test {

inline const Row kRow{"row",
                      {.model = "bf16",
                       .stage = 2,
                       .level = "O2",
                       .micro_batches = 2,
                       .clipping = 0.5,
                       .zerofp8 = R"("fp32_moments_below": 0)"},
                      2};

// Step 3 has an infinite gradient; from step 4 on the learning rate is another.
inline constexpr int kSteps = 6;
inline std::vector<double> gradients(int t, int rank, int k, std::size_t i, std::size_t n) {
  std::vector<double> g = made_up_gradients(t, rank, k, i, n);
  if (t == 3 && rank == 0 && k == 0 && i == 1) g[0] = INFINITY;
  return g;
}
inline double lr_of(int t) { return t < 4 ? 1e-3 : 2e-4; }

struct Told {
  bool applied;
  std::int64_t step, skipped, micro_batches;
  double norm, clip;
  std::string reason, parameter;
  int rank;
  std::uint64_t payload;
  bool operator==(const Told&) const = default;
};
inline Told told(const StepReport& r) {
  return {r.applied, r.step, r.skipped_steps, r.micro_batches, r.applied ? r.grad_norm : 0,
          r.clip_coefficient, r.skip_reason, r.bad_parameter, r.bad_rank,
          // A queued step gathers weights in any case: whether it is skipped is not known yet.
          r.applied ? r.wire.total_payload() : 0};
}
// What differs, for people; empty: nothing.
inline std::string difference(const Told& a, const Told& b) {
  if (a == b) return "";
  const auto text = [](const Told& t) {
    return fmt::format(
        "applied {} step {} skipped {} micro-batches {} norm {} clip {} \"{}\" \"{}\" "
        "rank {} payload {}",
        t.applied, t.step, t.skipped, t.micro_batches, t.norm, t.clip, t.reason, t.parameter,
        t.rank, t.payload);
  };
  return text(a) + "\nbut " + text(b);
}
// All gradients of a step.
inline void give_all(Engine& engine, const Model& model, int t, int rank, int micro_batches) {
  for (int k = 0; k < micro_batches; ++k) {
    for (std::size_t i = 0; i < model.count(); ++i) {
      add(engine, int(i), gradients(t, rank, k, i, model.numel(i)));
    }
    engine.end_micro_batch();
  }
}
struct Trained {
  std::vector<Told> reports;
  Snapshot end;
};

inline Trained train_on_host(const Row& row, Communicator& comm) {
  Model model(row.specs(), row.recipe, Model::sines, make_cpu_device());
  Engine engine(row.recipe.settings(row.ranks), model.parameters(), {.data = &comm},
                row.options(model));
  Trained trained;
  for (int t = 0; t < kSteps; ++t) {
    engine.group(0).lr = lr_of(t);
    give_all(engine, model, t, comm.rank(), row.recipe.micro_batches);
    trained.reports.push_back(told(engine.step()));
  }
  trained.end = snapshot(engine, model);
  return trained;
}

// Gradients that stay where they are, as those of a graph do.
class Gradients {
 public:
  Gradients(Device& device, const Model& model, int rank, int micro_batches)
      : model_(model), rank_(rank), micro_batches_(micro_batches) {
    for (int k = 0; k < micro_batches; ++k) {
      for (std::size_t i = 0; i < model.count(); ++i) {
        memory_.emplace_back(device,
                             packed(DType::kFp32, gradients(0, rank, k, i, model.numel(i))));
      }
    }
  }
  void fill(int t) {
    for (int k = 0; k < micro_batches_; ++k) {
      for (std::size_t i = 0; i < model_.count(); ++i) {
        const auto bytes = packed(DType::kFp32, gradients(t, rank_, k, i, model_.numel(i)));
        at(k, i).write(0, bytes.data(), model_.numel(i) * sizeof(float));
      }
    }
  }
  void give(Engine& engine) {
    for (int k = 0; k < micro_batches_; ++k) {
      for (std::size_t i = 0; i < model_.count(); ++i) {
        engine.add_gradient(int(i), at(k, i).data(), DType::kFp32);
      }
      engine.end_micro_batch();
    }
  }

 private:
  DeviceBytes& at(int k, std::size_t i) { return memory_[std::size_t(k) * model_.count() + i]; }
  const Model& model_;
  int rank_, micro_batches_;
  std::vector<DeviceBytes> memory_;
};

// An engine whose steps are recorded. `bare`: over the communicator of host memory itself.
struct Recorded {
  using Log = std::function<void(const std::string&)>;
  Recorded(const Row& row, Communicator& host, Log log = {}, bool bare = false)
      : device(std::make_shared<RecordingDevice>()),
        comm(host, *device),
        model(row.specs(), row.recipe, Model::sines, device),
        engine(row.recipe.settings(row.ranks), model.parameters(),
               {.data = bare ? &host : static_cast<Communicator*>(&comm)}, options(row, log)),
        gradients(*device, model, comm.rank(), row.recipe.micro_batches) {}
  EngineOptions options(const Row& row, const Log& log) const {
    EngineOptions o = row.options(model);
    o.capturable = true;
    if (log) o.log = log;
    return o;
  }
  // One step outside of a capture, then one that is captured.
  StepReport warm_up() {
    gradients.give(engine);
    return engine.step();
  }
  void capture() {
    device->begin();
    gradients.give(engine);
    engine.enqueue_step();
    device->end();
  }

  std::shared_ptr<RecordingDevice> device;
  RecordingCommunicator comm;
  Model model;
  Engine engine;
  Gradients gradients;
};

}  // namespace zerofp8::test
