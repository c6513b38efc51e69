#include "tools/commands.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "src/config/text_table.h"
#include "tools/sizes.h"
#include "zerofp8/error.h"
#include "zerofp8/plan.h"

namespace zerofp8 {
namespace {

bool use_color() {
  const char* no_color = std::getenv("NO_COLOR");  // https://no-color.org
  return (no_color == nullptr || *no_color == '\0') && isatty(STDOUT_FILENO) != 0;
}

// COLUMNS if it is set, else the terminal's width.
int text_width() {
  constexpr int kLeast = 60;
  const char* columns = std::getenv("COLUMNS");
  const int wanted = columns == nullptr ? 0 : std::atoi(columns);
  if (wanted > 0) return std::max(wanted, kLeast);
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? std::max<int>(size.ws_col, kLeast) : kTextWidth;
}

// All of it, or an error: a full disk must not leave half a plan behind exit code 0.
void print(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || std::fflush(stdout) != 0) {
    throw OutputError(fmt::format("standard output cannot be written: {}", std::strerror(errno)));
  }
}

Launch launch_of(const Config& config, const RankOptions& ranks) {
  const std::int64_t replica = std::int64_t{ranks.pipeline} * ranks.tensor;
  if (ranks.world == 0) {
    const std::optional<int> implied = implied_data_ranks(config);
    return {.data_ranks = implied.value_or(1),
            .pipeline_stages = ranks.pipeline,
            .tensor_ranks = ranks.tensor,
            .from = implied ? "the three batch keys" : "no --world: one"};
  }
  if (ranks.world % replica != 0) {
    throw ArgumentError(fmt::format(
        "--world: given {}; allowed: a multiple of --pipeline ({}) x --tensor ({}); change one",
        ranks.world, ranks.pipeline, ranks.tensor));
  }
  return {.data_ranks = static_cast<int>(ranks.world / replica),
          .pipeline_stages = ranks.pipeline,
          .tensor_ranks = ranks.tensor,
          .from = fmt::format("--world {}", ranks.world)};
}

Arguments arguments_of(const RankOptions& ranks) {
  Arguments arguments{.assume_auto = true};
  for (const OptLevel level : {OptLevel::kO0, OptLevel::kO1, OptLevel::kO2, OptLevel::kO3}) {
    if (to_string(level) == ranks.opt_level) arguments.opt_level = level;
  }
  return arguments;
}

Settings settings_of(const ConfigOptions& options, const RankOptions& ranks) {
  const Config config = Config::from_file(options.path, options.changes);
  return resolve(config, launch_of(config, ranks), arguments_of(ranks));
}

std::int64_t total_bytes(const Plan& plan) {
  std::int64_t total = 0;
  for (const PlanRow& row : plan.rows) total += row.bytes;
  return total;
}

// An ArgumentError of `read`, with the option's name in front.
template <class Read>
std::int64_t option_value(std::string_view option, const std::string& text, Read read) {
  try {
    return read(text);
  } catch (const ArgumentError& error) {
    throw ArgumentError(fmt::format("{}: {}", option, error.what()));
  }
}

int check_memory(const Plan& plan, std::int64_t memory) {
  const std::int64_t needed = total_bytes(plan);
  const double share = 100.0 * static_cast<double>(needed) / static_cast<double>(memory);
  if (needed <= memory) {
    // On stderr, so that --json stays JSON.
    fmt::print(stderr, "zerofp8: fits: {} of {} bytes per rank ({:.1f} %)\n", needed, memory,
               share);
    return kOk;
  }
  fmt::print(stderr,
             "zerofp8: does not fit: {} bytes per rank of {} available ({:.1f} %); raise "
             "/zerofp8/opt_level or /zero_optimization/stage, or use more ranks\n",
             needed, memory, share);
  return kDoesNotRun;
}

}  // namespace

int run_plan(const PlanOptions& options) {
  const Settings settings = settings_of(options.config, options.ranks);
  // One pipeline stage and one tensor slice hold an equal part, rounded up.
  const std::int64_t slices = std::int64_t{options.ranks.pipeline} * options.ranks.tensor;
  const std::int64_t parameters = option_value("--params", options.parameters, parse_count);
  const std::int64_t memory =
      options.memory.empty() ? 0 : option_value("--memory", options.memory, parse_bytes);
  const Plan plan = make_plan(settings, uniform_size((parameters + slices - 1) / slices, settings));
  if (options.json) {
    print(plan_json(plan));
  } else {
    print(plan_table(plan, use_color(), text_width()));
    print(
        paragraph("Sizes are those of one flat list of that many parameters; a real model's are "
                  "padded per parameter.",
                  text_width()));
  }
  return memory > 0 ? check_memory(plan, memory) : kOk;
}

int run_check(const CheckOptions& options) {
  const Settings settings = settings_of(options.config, options.ranks);
  print(settings_table(settings, use_color(), text_width()));
  print(fmt::format("{}: ok\n", options.config.path));
  return kOk;
}

int run_matrix(bool markdown) {
  print(support_matrix(markdown, text_width()));
  return kOk;
}

int run_schema(bool reference) {
  print(reference ? config_reference() : config_schema());
  return kOk;
}

}  // namespace zerofp8
