// What the launcher of this process says: world size, rank, local rank. Read before any
// communication, so that a wrong launch is an error with names and values instead of a hang.
//
//   LaunchEnv env = detect_launch_env();
//   fmt::print("rank {} of {}, says {}\n", env.rank, env.size, env.source);
//   std::unique_ptr<Communicator> comm = make_communicator(env);
//
// Known are Open MPI (OMPI_COMM_WORLD_*), torchrun (RANK, WORLD_SIZE, LOCAL_RANK, ...), MPICH and
// Intel MPI (PMI_*, MPI_LOCAL*) and srun (SLURM_*). The first three must not contradict each other.
// srun's are used only if none of them is set: it is usual to start mpirun or torchrun inside a
// Slurm step, and Slurm's numbers then describe the step.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zerofp8/communicator.h"

namespace zerofp8 {

struct LaunchEnv {
  int rank = 0;
  int size = 1;
  // Rank among the processes of this node, as the launcher counts them. Not derived from rank and
  // the number of devices, which is wrong where nodes differ; see local_ranks() for when it is
  // absent.
  std::optional<int> local_rank;
  std::optional<int> local_size;
  std::string source = "no launcher";  // "Open MPI", "torchrun", "Open MPI and torchrun", ...
  bool by_mpi = false;                 // whether MPI can connect the ranks
};

// Value of an environment variable, nullopt where it is not set.
using EnvLookup = std::function<std::optional<std::string>(const std::string&)>;

// Throws ConfigError (the pointer is the variable's name) for values that are no numbers, a rank
// outside the world, a size without a rank, and launchers that disagree: both variables and values
// are named.
LaunchEnv detect_launch_env();
LaunchEnv detect_launch_env(const EnvLookup& lookup);

// The communicator for such a launch: self for a world of 1, without MPI; MPI's where an MPI
// launcher started the ranks. Throws CommError where MPI sees another world than the launcher's
// variables say, and for torchrun alone, whose ranks only torch can connect (the Python package
// does that).
std::unique_ptr<Communicator> make_communicator(const LaunchEnv& env);

// Local rank of each rank, given its node's name: counts earlier ranks on the same node, so uneven
// nodes are right, too: nodes a,a,b,b,b,b give 0,1,0,1,2,3.
std::vector<int> local_ranks(std::span<const std::string> node_of_rank);
// The same for this process, by host name. Collective.
int local_rank_by_host(Communicator& comm);

}  // namespace zerofp8
