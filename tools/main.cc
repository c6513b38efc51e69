// zerofp8: plans and checks configs without running anything.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "src/config/nearest.h"
#include "tools/commands.h"
#include "tools/python_command.h"
#include "zerofp8/config.h"
#include "zerofp8/error.h"
#include "zerofp8/zerofp8.h"

namespace zerofp8 {
namespace {

void add_config_options(CLI::App& command, ConfigOptions& config) {
  command.add_option("config", config.path, "JSON config")->required();
  command
      .add_option("--set", config.changes,
                  "Change a value first, e.g. --set /bf16/enabled=true; may be repeated. An "
                  "\"auto\", which the trainer fills, is taken for the default that is printed")
      ->type_name("/PATH=VALUE")
      ->expected(1)
      ->take_all();
}

void add_rank_options(CLI::App& command, RankOptions& ranks) {
  const CLI::Range positive(1, 1 << 24);
  command
      .add_option("--world", ranks.world,
                  "All ranks: data x pipeline x tensor (default: what the three batch keys imply, "
                  "else one data rank)")
      ->check(positive);
  command.add_option("--pipeline", ranks.pipeline, "Pipeline stages")
      ->check(positive)
      ->capture_default_str();
  command.add_option("--tensor", ranks.tensor, "Tensor-parallel ranks")
      ->check(positive)
      ->capture_default_str();
  command.add_option("--opt-level", ranks.opt_level, "Opt level, as the argument of that name")
      ->check(CLI::IsMember({"O0", "O1", "O2", "O3"}));
}

struct Options {
  PlanOptions plan;
  CheckOptions check;
  bool markdown = false;
  bool reference = false;
};

void add_plan(CLI::App& app, Options& options) {
  CLI::App* plan = app.add_subcommand(
      "plan", "Show every component's dtype, place and bytes, and what travels in a step");
  add_config_options(*plan, options.plan.config);
  plan->add_option("--params", options.plan.parameters, "Parameters of the model: 7e9, 7B, 350M")
      ->capture_default_str();
  add_rank_options(*plan, options.plan.ranks);
  plan->add_option("--memory", options.plan.memory,
                   "Memory of one rank: 80GB, 80GiB; exit code 1 if the plan does not fit");
  plan->add_flag("--json", options.plan.json, "JSON instead of tables");
}

void add_others(CLI::App& app, Options& options) {
  CLI::App* check = app.add_subcommand("check", "Validate a config and show what it resolves to");
  add_config_options(*check, options.check.config);
  add_rank_options(*check, options.check.ranks);
  CLI::App* matrix = app.add_subcommand("matrix", "Show the supported combinations and opt levels");
  matrix->add_flag("--markdown", options.markdown, "Markdown instead of aligned columns");
  CLI::App* schema = app.add_subcommand("schema", "Print the JSON Schema of the config file");
  schema->add_flag("--reference", options.reference, "The Markdown reference of all keys instead");
  // What follows these is the Python package's to read.
  app.add_subcommand("convert", "Convert checkpoints to and from torch's and DeepSpeed's");
  app.add_subcommand("inspect", "Tell what a checkpoint holds");
}

int run(const CLI::App& app, const Options& options) {
  if (app.got_subcommand("plan")) return run_plan(options.plan);
  if (app.got_subcommand("check")) return run_check(options.check);
  if (app.got_subcommand("matrix")) return run_matrix(options.markdown);
  return run_schema(options.reference);
}

// "zerofp8: ds_config.json: /bf16/enabled: given ..."
void report(const ConfigError& error, const std::string& config) {
  const bool in_file = error.pointer().starts_with('/') && error.pointer() != config;
  const std::string prefix = "zerofp8: " + (in_file ? config + ": " : "");
  const std::string what = error.what();
  fmt::print(stderr, "{}{}\n", prefix, what.substr(0, what.find('\n')));
  for (const std::string& other : error.others()) fmt::print(stderr, "{}{}\n", prefix, other);
}

int run_and_report(const CLI::App& app, const Options& options) {
  const std::string& config =
      (app.got_subcommand("plan") ? options.plan.config : options.check.config).path;
  try {
    return run(app, options);
  } catch (const OutputError& error) {
    fmt::print(stderr, "zerofp8: {}\n", error.what());
    return kNotWritten;
  } catch (const UnsupportedError& error) {
    report(error, config);
    return kDoesNotRun;
  } catch (const ConfigError& error) {
    report(error, config);
    return kBadInput;
  } catch (const Error& error) {
    fmt::print(stderr, "zerofp8: {}\n", error.what());
    return kBadInput;
  }
}

// What is wrong with the first word, before CLI11 looks for a command in it; empty: nothing.
std::string command_mistake(const CLI::App& app, int argc, char** argv) {
  std::string allowed;
  for (const CLI::App* command : app.get_subcommands({})) {
    allowed += (allowed.empty() ? "" : ", ") + command->get_name();
  }
  if (argc < 2) return fmt::format("no command; allowed: {}; zerofp8 --help tells more", allowed);
  const std::string_view given = argv[1];
  if (given.starts_with('-')) return "";
  std::string nearest;
  for (const CLI::App* command : app.get_subcommands({})) {
    const std::string& name = command->get_name();
    if (name == given) return "";
    if (nearest.empty() || edit_distance(given, name) < edit_distance(given, nearest))
      nearest = name;
  }
  return fmt::format("given \"{}\", which is no command; allowed: {}; the nearest is {}", given,
                     allowed, nearest);
}

}  // namespace
}  // namespace zerofp8

int main(int argc, char** argv) {
  CLI::App app(
      "Plans and checks zerofp8 configs.\n"
      "Exit codes: 0 ok; 1 a sound config that does not fit, or that this version does not run "
      "yet;\n"
      "2 bad input; 3 the answer could not be written.");
  app.name("zerofp8");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("zerofp8 ") + zerofp8::version());
  zerofp8::Options options;
  zerofp8::add_plan(app, options);
  zerofp8::add_others(app, options);
  if (const std::string mistake = zerofp8::command_mistake(app, argc, argv); !mistake.empty()) {
    fmt::print(stderr, "zerofp8: {}\n", mistake);
    return zerofp8::kBadInput;
  }
  if (argc > 1 && zerofp8::is_python_command(argv[1])) return zerofp8::run_in_python(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help goes to stdout with 0; CLI11's own codes for mistakes all become "bad input".
    return app.exit(error) == 0 ? zerofp8::kOk : zerofp8::kBadInput;
  }
  return zerofp8::run_and_report(app, options);
}
