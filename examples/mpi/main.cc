// mpirun -n 2 train_gpt --config ds_config.json: trains a byte-level GPT with zerofp8 and, unless
// told not to, with LibTorch's FP32 AdamW on the same batches. Exit codes: 0, 1 (failed while
// running), 2 (bad input).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>

#include "summary.h"
#include "text_data.h"
#include "trainer.h"
#include "zerofp8/config.h"
#include "zerofp8/error.h"
#include "zerofp8/launch.h"

namespace {

using namespace zerofp8;           // NOLINT: an example program
using namespace zerofp8::example;  // NOLINT

struct Flags {
  std::string config;
  std::vector<std::string> data;
  std::string results;
  bool baseline = true;
  bool only_baseline = false;
  int threads = 1;
  RunOptions run;
};

void define(CLI::App& app, Flags& a) {
  const CLI::Range positive(1, 1 << 24);
  app.add_option("--config", a.config, "DeepSpeed-style JSON file")->required();
  app.add_option("--data", a.data, "text files (default: the Python standard library's sources)");
  app.add_option("--steps", a.run.steps, "optimizer steps")->capture_default_str()->check(positive);
  app.add_option("--warmup", a.run.warmup, "steps of linear warm-up")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", a.run.seed, "of weights and batches")->capture_default_str();
  app.add_option("--layers", a.run.model.layers)->capture_default_str()->check(positive);
  app.add_option("--width", a.run.model.width)->capture_default_str()->check(positive);
  app.add_option("--heads", a.run.model.heads)->capture_default_str()->check(positive);
  app.add_option("--context", a.run.model.context, "bytes")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--threads", a.threads, "threads per rank of LibTorch")
      ->capture_default_str()
      ->check(positive);
  app.add_option("--log-every", a.run.log_every, "steps")->capture_default_str()->check(positive);
  app.add_option("--save", a.run.save_to, "folder for checkpoints");
  app.add_option("--save-every", a.run.save_every, "steps (default: at the end)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--resume", a.run.resume_from, "folder of checkpoints to go on from");
  app.add_option("--results", a.results, "write losses, plan and figures to this JSON file");
  app.add_flag("--baseline,!--no-baseline", a.baseline, "also train with plain FP32 AdamW");
  app.add_flag("--only-baseline", a.only_baseline, "train with plain FP32 AdamW only");
  app.add_flag("--quiet", a.run.quiet, "no progress line");
}

void run(const Flags& a, Communicator& comm) {
  const bool first = comm.rank() == 0;
  const Settings settings = resolve(Config::from_file(a.config), {.data_ranks = comm.size()});
  if (a.run.model.width % a.run.model.heads != 0) {
    throw ConfigError("--width", std::to_string(a.run.model.width), "a multiple of --heads", "");
  }
  const TextData data(a.data);
  if (first)
    fmt::print("{} bytes of text from {}; {} ranks\n", data.size(), data.source(), comm.size());
  at::set_num_threads(a.threads);
  RunResult result, baseline;
  std::vector<const RunResult*> runs;
  if (!a.only_baseline) {
    result = train_with_engine(settings, data, a.run, comm);
    runs.push_back(&result);
    if (first) fmt::print("\n{}", result.plan_table);
  }
  if (a.baseline || a.only_baseline) {
    baseline = train_with_fp32_adamw(settings, data, a.run, comm);
    runs.push_back(&baseline);
  }
  if (!first) return;
  if (!a.only_baseline) fmt::print("{}", summary_text(result, a.baseline ? &baseline : nullptr));
  if (a.only_baseline) {
    fmt::print("plain FP32 AdamW: training {:.4f}, validation {:.4f}\n", baseline.train_loss,
               baseline.validation_loss);
  }
  if (!a.results.empty()) {
    std::ofstream out(a.results);
    out << results_json(runs, a.run, comm.size());
    if (!out.flush()) throw std::runtime_error("--results: cannot write " + a.results);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Flags arguments;
  CLI::App app("Trains a byte-level GPT with zerofp8 under mpirun");
  define(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  int code = 0;
  try {
    const std::unique_ptr<Communicator> comm = make_communicator(detect_launch_env());
    const auto report = [&](const std::string& text, int exit_code) {
      if (comm->rank() == 0) std::fprintf(stderr, "train_gpt: %s\n", text.c_str());
      code = exit_code;
    };
    try {
      run(arguments, *comm);
    } catch (const ConfigError& e) {
      report(e.what(), 2);
    } catch (const std::exception& e) {
      report(e.what(), 1);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_gpt: %s\n", e.what());
    code = 1;
  }
  return code;
}
