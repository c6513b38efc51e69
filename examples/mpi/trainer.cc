#include "trainer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numbers>
#include <numeric>

namespace zerofp8::example {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

double mean_over_ranks(Communicator& comm, double value) {
  comm.all_reduce(std::span(&value, 1), ReduceOp::kSum);
  return value / comm.size();
}

// Linear warm-up, then a cosine down to a tenth.
double learning_rate(double peak, std::int64_t step, const RunOptions& o) {
  const double t = static_cast<double>(step);
  const double warm = o.warmup > 0 ? std::min(1.0, t / static_cast<double>(o.warmup)) : 1.0;
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * t / static_cast<double>(o.steps)));
  return peak * warm * (0.9 * cosine + 0.1);
}

std::uint64_t batch_key(std::uint64_t seed, std::int64_t step, std::int64_t micro, int rank) {
  return ((seed + 1) << 44) ^ (static_cast<std::uint64_t>(step) << 20) ^
         (static_cast<std::uint64_t>(micro) << 10) ^ static_cast<std::uint64_t>(rank);
}

// The same held-out batches for every run; ranks share the work.
double validate(const Gpt& model, const TextData& data, const RunOptions& o, Communicator& comm) {
  constexpr int kBatches = 20;
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (int i = comm.rank(); i < kBatches; i += comm.size()) {
    const Batch batch = data.held_out(1000 + static_cast<std::uint64_t>(i), 64, o.model.context);
    sum += model.loss(batch.tokens, batch.targets).item<double>();
  }
  comm.all_reduce(std::span(&sum, 1), ReduceOp::kSum);
  return sum / kBatches;
}

// Bytes per second that a copy reaches on this rank, reading and writing, while all ranks copy.
double copy_speed(Communicator& comm) {
  std::vector<char> from(std::size_t{1} << 26, 1), to(from.size());
  std::vector<double> rates;
  comm.barrier(comm.timeout());
  for (int i = 0; i < 9; ++i) {
    const auto begin = Clock::now();
    std::memcpy(to.data(), from.data(), from.size());
    rates.push_back(2.0 * static_cast<double>(from.size()) / seconds_since(begin));
    from[0] = to[to.size() - 1];
  }
  return median(rates);
}

// What one step has to read and write: gradient once, moments, masters and weights twice.
double step_bytes(const Plan& plan) {
  double bytes = 0;
  for (const PlanRow& row : plan.rows) {
    const bool gradient =
        row.component == Component::kAccumulator || row.component == Component::kReducedGradient;
    const bool weight = row.component == Component::kTransient;
    const double share = weight ? 1.0 / std::max(1, plan.settings.shard_ranks.value) : 1.0;
    bytes += static_cast<double>(row.bytes) * (gradient ? 1 : 2) * share;
  }
  return bytes;
}

// One line that is rewritten on a terminal, or a line every `log_every` steps elsewhere.
class Progress {
 public:
  Progress(const std::string& name, const RunOptions& o, bool speaks)
      : name_(name),
        options_(o),
        speaks_(speaks && !o.quiet),
        terminal_(::isatty(STDERR_FILENO) != 0) {}
  ~Progress() {
    if (speaks_ && terminal_) std::fputc('\n', stderr);
  }
  void show(std::int64_t step, const std::string& text) const {
    const bool due = step % options_.log_every == 0 || step == options_.steps || step == 1;
    if (!speaks_ || (!due && (!terminal_ || step % 5 != 0))) return;
    const std::string line = fmt::format("{:<10} {:>5}/{} {}", name_, step, options_.steps, text);
    std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
    std::fflush(stderr);
  }

 private:
  std::string name_;
  const RunOptions& options_;
  bool speaks_, terminal_;
};

double last_mean(const std::vector<double>& values, std::size_t count) {
  const std::size_t n = std::min(count, values.size());
  return n == 0
             ? 0
             : std::accumulate(values.end() - static_cast<std::ptrdiff_t>(n), values.end(), 0.0) /
                   static_cast<double>(n);
}

torch::Dtype torch_dtype(DType dtype) {
  return dtype == DType::kBf16   ? torch::kBFloat16
         : dtype == DType::kFp16 ? torch::kHalf
                                 : torch::kFloat;
}

DType dtype_of(const torch::Tensor& tensor) {
  return tensor.scalar_type() == torch::kBFloat16 ? DType::kBf16
         : tensor.scalar_type() == torch::kHalf   ? DType::kFp16
                                                  : DType::kFp32;
}

std::vector<Parameter> engine_parameters(const Gpt& model) {
  std::vector<Parameter> parameters;
  for (const Gpt::Named& p : model.parameters()) {
    ParameterSpec spec{
        .name = p.name, .shape = p.tensor.sizes().vec(), .dtype = dtype_of(p.tensor)};
    parameters.push_back({spec, p.tensor.data_ptr()});
  }
  return parameters;
}

// Forward and backward of one micro-batch; returns the loss and leaves gradients in .grad.
double backward(const Gpt& model, const TextData& data, const Settings& s, const RunOptions& o,
                std::int64_t step, std::int64_t micro, int rank, double scale) {
  const Batch batch =
      data.train(batch_key(o.seed, step, micro, rank), s.batch.micro_batch, o.model.context);
  const torch::Tensor loss = model.loss(batch.tokens, batch.targets);
  (loss * scale).backward();
  return loss.item<double>();
}

void finish(RunResult& r, const Gpt& model, const TextData& data, const Settings& s,
            const RunOptions& o, Communicator& comm) {
  r.parameters = model.parameter_count();
  r.train_loss = last_mean(r.losses, 100);
  const double tokens = static_cast<double>(s.batch.train_batch * o.model.context) *
                        static_cast<double>(r.losses.size());
  r.tokens_per_second = r.seconds > 0 ? tokens / r.seconds : 0;
  r.validation_loss = validate(model, data, o, comm);
}

}  // namespace

RunResult train_with_engine(const Settings& s, const TextData& data, const RunOptions& o,
                            Communicator& comm) {
  RunResult r;
  r.name = fmt::format("{}", to_string(s.opt_level.value));
  r.copy_bytes_per_second = copy_speed(comm);
  const Gpt model(o.model, o.seed, torch_dtype(s.weight));
  Engine engine(s, engine_parameters(model), {.data = &comm});
  r.plan_table = plan_table(engine.plan());
  r.plan_json = plan_json(engine.plan());
  r.step_bytes = step_bytes(engine.plan());
  if (!o.resume_from.empty()) engine.load(o.resume_from);
  const double peak = s.adam.value.lr;
  const Progress progress(r.name, o, comm.rank() == 0);
  std::vector<double> step_times;
  WireBytes wire;
  const std::int64_t already_applied = engine.applied_steps();
  const std::int64_t first = already_applied + engine.skipped_steps() + 1;
  if (first > o.steps) {
    throw ConfigError("--steps", std::to_string(o.steps),
                      fmt::format("more than the {} of the checkpoint", first - 1),
                      "raise it, or start without --resume");
  }
  const auto begin = Clock::now();
  for (std::int64_t step = first; step <= o.steps; ++step) {
    double loss = 0;
    for (std::int64_t micro = 0; micro < s.batch.accumulation_steps; ++micro) {
      loss += backward(model, data, s, o, step, micro, comm.rank(), engine.loss_scale());
      int index = 0;
      for (const Gpt::Named& p : model.parameters()) {
        torch::Tensor& grad = const_cast<torch::Tensor&>(p.tensor).mutable_grad();
        engine.add_gradient(index++, grad.data_ptr(), dtype_of(grad));
        grad = torch::Tensor();  // freed at once: the accumulator has it
      }
      engine.end_micro_batch();
    }
    engine.group(0).lr = learning_rate(peak, engine.applied_steps() + 1, o);
    const auto step_begin = Clock::now();
    const StepReport report = engine.step();
    step_times.push_back(seconds_since(step_begin));
    if (report.applied) wire += report.wire;  // a skipped step gathers no weights
    r.losses.push_back(
        mean_over_ranks(comm, loss / static_cast<double>(s.batch.accumulation_steps)));
    r.norms.push_back(report.grad_norm);
    r.skipped = report.skipped_steps;
    const double done = static_cast<double>(step - first + 1);
    progress.show(
        step,
        fmt::format("loss {:.4f}  norm {:.3f}  skips {}  {:.0f} tok/s  wire {:.1f} kB/step  step "
                    "{:.2f} ms, {:.0f} % of copy speed",
                    last_mean(r.losses, 20), report.grad_norm, r.skipped,
                    static_cast<double>(s.batch.train_batch * o.model.context) * done /
                        seconds_since(begin),
                    static_cast<double>(report.wire.total_payload()) / 1e3, step_times.back() * 1e3,
                    100 * r.step_bytes / step_times.back() / r.copy_bytes_per_second));
    if (o.save_every > 0 && !o.save_to.empty() && step % o.save_every == 0) engine.save(o.save_to);
  }
  r.seconds = seconds_since(begin);
  if (!o.save_to.empty() && o.save_every == 0) engine.save(o.save_to);
  r.step_seconds = median(step_times);
  r.counted_state_bytes = static_cast<double>(engine.allocator().state_bytes());
  r.planned_state_bytes = static_cast<double>(engine.plan().state_bytes());
  r.planned_bytes_per_parameter = engine.plan().bytes_per_parameter();
  for (const PlanCollective& c : engine.plan().collectives) {
    r.planned_wire_bytes += static_cast<double>(c.bytes_per_step);
  }
  r.counted_wire_bytes =
      static_cast<double>(wire.total_payload()) /
      std::max<double>(1, static_cast<double>(engine.applied_steps() - already_applied));
  finish(r, model, data, s, o, comm);
  return r;
}

RunResult train_with_fp32_adamw(const Settings& s, const TextData& data, const RunOptions& o,
                                Communicator& comm) {
  RunResult r;
  r.name = "fp32 AdamW";
  const Gpt model(o.model, o.seed, torch::kFloat);
  std::vector<torch::Tensor> tensors;
  for (const Gpt::Named& p : model.parameters()) tensors.push_back(p.tensor);
  const AdamOptions& a = s.adam;
  torch::optim::AdamW optimizer(tensors, torch::optim::AdamWOptions(a.lr)
                                             .betas(std::make_tuple(a.beta1, a.beta2))
                                             .eps(a.eps)
                                             .weight_decay(a.weight_decay));
  const Progress progress(r.name, o, comm.rank() == 0);
  const auto begin = Clock::now();
  for (std::int64_t step = 1; step <= o.steps; ++step) {
    double loss = 0;
    optimizer.zero_grad();
    for (std::int64_t micro = 0; micro < s.batch.accumulation_steps; ++micro) {
      loss += backward(model, data, s, o, step, micro, comm.rank(), 1.0);
    }
    const double divisor = static_cast<double>(s.batch.accumulation_steps * comm.size());
    for (torch::Tensor& t : tensors) {
      torch::Tensor grad = t.mutable_grad();
      comm.all_reduce(std::span(grad.data_ptr<float>(), static_cast<std::size_t>(grad.numel())),
                      ReduceOp::kSum);
      grad.div_(divisor);
    }
    r.norms.push_back(s.gradient_clipping > 0
                          ? torch::nn::utils::clip_grad_norm_(tensors, s.gradient_clipping)
                          : 0.0);
    for (auto& group : optimizer.param_groups()) {
      static_cast<torch::optim::AdamWOptions&>(group.options()).lr(learning_rate(a.lr, step, o));
    }
    optimizer.step();
    r.losses.push_back(
        mean_over_ranks(comm, loss / static_cast<double>(s.batch.accumulation_steps)));
    progress.show(step,
                  fmt::format("loss {:.4f}  norm {:.3f}", last_mean(r.losses, 20), r.norms.back()));
  }
  r.seconds = seconds_since(begin);
  finish(r, model, data, s, o, comm);
  return r;
}

}  // namespace zerofp8::example
