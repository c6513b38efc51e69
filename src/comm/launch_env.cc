#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <map>

#include "zerofp8/error.h"
#include "zerofp8/launch.h"

namespace zerofp8 {
namespace {

// One launcher's variables. The reader, the errors and the documentation's list follow this table.
struct Launcher {
  const char* name;
  bool mpi;
  bool fallback;  // asked only if no other launcher says anything
  const char *rank, *size, *local_rank, *local_size;
};
// Slurm's step variables are set by srun alone; SLURM_NTASKS is also there in a batch script, which
// is a single process.
constexpr Launcher kLaunchers[] = {
    {"Open MPI", true, false, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"torchrun", false, false, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"MPICH", true, false, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"srun", true, true, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};

struct Value {
  const Launcher* launcher = nullptr;
  const char* variable = nullptr;
  int number = 0;
};
using OptionalValue = std::optional<Value>;

OptionalValue read(const EnvLookup& lookup, const Launcher& launcher, const char* variable,
                   int minimum) {
  if (variable == nullptr) return std::nullopt;
  const std::optional<std::string> text = lookup(variable);
  if (!text.has_value() || text->empty()) return std::nullopt;
  int number = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, number);
  if (error != std::errc() || stop != end || number < minimum) {
    throw ConfigError(variable,
                      fmt::format("\"{}\" (environment, set by {})", *text, launcher.name),
                      fmt::format("a whole number of at least {}", minimum),
                      "start the program with one launcher, or unset the variable");
  }
  return Value{&launcher, variable, number};
}

// Keeps the first value seen; another launcher's must be the same.
void merge(OptionalValue& into, const OptionalValue& next) {
  if (!next.has_value()) return;
  if (!into.has_value()) {
    into = next;
    return;
  }
  if (into->number == next->number) return;
  throw ConfigError(
      next->variable,
      fmt::format("{} (environment, set by {}), but {} is {} (set by {})", next->number,
                  next->launcher->name, into->variable, into->number, into->launcher->name),
      "the same value from every launcher",
      fmt::format("start with one launcher only, or unset the variables of the other "
                  "(for example: env -u {} ...)",
                  next->variable));
}

struct Merged {
  OptionalValue rank, size, local_rank, local_size;
  std::vector<const Launcher*> sources;
};

void add(Merged& merged, const EnvLookup& lookup, const Launcher& launcher) {
  const OptionalValue size = read(lookup, launcher, launcher.size, 1);
  const OptionalValue rank = read(lookup, launcher, launcher.rank, 0);
  // A local rank alone says nothing of the world; a size alone is compared, see below.
  if (!size.has_value() && !rank.has_value()) return;
  merged.sources.push_back(&launcher);
  merge(merged.size, size);
  merge(merged.rank, rank);
  merge(merged.local_rank, read(lookup, launcher, launcher.local_rank, 0));
  merge(merged.local_size, read(lookup, launcher, launcher.local_size, 1));
}

[[noreturn]] void throw_incomplete(const Value& there, const char* missing, const char* meaning) {
  throw ConfigError(
      missing, "nothing (not set)",
      fmt::format("this process's {}: {} is {}", meaning, there.variable, there.number),
      fmt::format("start with mpirun or torchrun, which set both, or unset {}", there.variable));
}

void check_below(const OptionalValue& rank, const OptionalValue& size) {
  if (!rank.has_value() || !size.has_value() || rank->number < size->number) return;
  throw ConfigError(
      rank->variable, std::to_string(rank->number),
      fmt::format("0 to {} ({} is {})", size->number - 1, size->variable, size->number),
      "start the program with one launcher");
}

std::string names_of(const std::vector<const Launcher*>& sources) {
  std::string text;
  for (const Launcher* launcher : sources) {
    if (!text.empty()) text += " and ";
    text += launcher->name;
  }
  return text;
}

}  // namespace

LaunchEnv detect_launch_env(const EnvLookup& lookup) {
  Merged merged;
  for (const bool fallback : {false, true}) {
    if (fallback && !merged.sources.empty()) break;
    for (const Launcher& launcher : kLaunchers) {
      if (launcher.fallback == fallback) add(merged, lookup, launcher);
    }
  }
  LaunchEnv env;
  if (merged.sources.empty()) return env;
  const Launcher& first = *merged.sources.front();
  if (!merged.rank.has_value() && merged.size->number > 1) {
    throw_incomplete(*merged.size, first.rank, "rank");
  }
  if (!merged.size.has_value()) {
    // srun without a step variable: a batch script, one process.
    if (first.fallback) return env;
    throw_incomplete(*merged.rank, first.size, "number of ranks");
  }
  check_below(merged.rank, merged.size);
  check_below(merged.local_rank, merged.local_size);
  env.size = merged.size->number;
  if (merged.rank.has_value()) env.rank = merged.rank->number;
  if (merged.local_rank.has_value()) env.local_rank = merged.local_rank->number;
  if (merged.local_size.has_value()) env.local_size = merged.local_size->number;
  env.source = names_of(merged.sources);
  env.by_mpi = std::any_of(merged.sources.begin(), merged.sources.end(),
                           [](const Launcher* launcher) { return launcher->mpi; });
  return env;
}

LaunchEnv detect_launch_env() {
  return detect_launch_env([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

std::unique_ptr<Communicator> make_communicator(const LaunchEnv& env) {
  if (env.size == 1) return make_self_communicator();
  if (!env.by_mpi) {
    throw CommError(fmt::format(
        "{} started {} ranks, which only torch can connect; use the Python package, or start the "
        "program with mpirun",
        env.source, env.size));
  }
  std::unique_ptr<Communicator> comm = make_mpi_communicator();
  if (comm->size() != env.size || comm->rank() != env.rank) {
    throw CommError(
        fmt::format("{} says rank {} of {}, MPI says rank {} of {}; start the program with the "
                    "mpirun of the MPI "
                    "library that it is linked with",
                    env.source, env.rank, env.size, comm->rank(), comm->size()));
  }
  return comm;
}

std::vector<int> local_ranks(std::span<const std::string> node_of_rank) {
  std::map<std::string, int> seen;
  std::vector<int> ranks;
  for (const std::string& node : node_of_rank) ranks.push_back(seen[node]++);
  return ranks;
}

int local_rank_by_host(Communicator& comm) {
  using HostName = std::array<char, 256>;
  HostName own{};
  gethostname(own.data(), own.size() - 1);
  std::vector<HostName> all(static_cast<std::size_t>(comm.size()));
  comm.gather_control(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  std::vector<std::string> names;
  for (const HostName& name : all) names.emplace_back(name.data());
  return local_ranks(names)[static_cast<std::size_t>(comm.rank())];
}

}  // namespace zerofp8
