// What launchers say (case 42): right where one or several agree, an error with names and values
// where not.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/comm_checks.h"
#include "tests/thread_ranks.h"
#include "zerofp8/error.h"
#include "zerofp8/launch.h"

namespace zerofp8::test {
namespace {

using Variables = std::map<std::string, std::string>;

LaunchEnv detect(const Variables& variables) {
  return detect_launch_env([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

Variables operator+(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_SIZE", "16"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kTorchrun = {
    {"RANK", "5"}, {"WORLD_SIZE", "16"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}};
const Variables kMpich = {
    {"PMI_RANK", "5"}, {"PMI_SIZE", "16"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};

void expect_rank_5_of_16(const LaunchEnv& env, const std::string& source) {
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.size, 16);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 4);
  EXPECT_EQ(env.source, source);
}

TEST(Case42Launch, DisagreeingSizesNameBothSourcesAndValues) {
  const std::string text = message_of([] { detect(kOpenMpi + Variables{{"WORLD_SIZE", "8"}}); });
  for (const char* part :
       {"WORLD_SIZE", "8", "torchrun", "OMPI_COMM_WORLD_SIZE is 16", "Open MPI"}) {
    expect_contains(text, part);
  }
}

// Each quantity and each pair of launchers.
TEST(Case42Launch, AnyDisagreementIsAnError) {
  const Variables launchers[] = {kOpenMpi, kTorchrun, kMpich};
  for (const Variables& a : launchers) {
    for (const Variables& b : launchers) {
      if (a == b) continue;
      EXPECT_NO_THROW(detect(a + b));
      for (const auto& [name, value] : b) {
        Variables changed = b;
        changed[name] = std::to_string(std::stoi(value) + 1);
        const std::string text = message_of([&] { detect(a + changed); });
        expect_contains(text, name);
        expect_contains(text, changed[name]);
        expect_contains(text, value);
        expect_contains(text, "but ");
      }
    }
  }
}

TEST(Case42Launch, OpenMpiAlone) {
  const LaunchEnv env = detect(kOpenMpi);
  expect_rank_5_of_16(env, "Open MPI");
  EXPECT_TRUE(env.by_mpi);
}

TEST(Case42Launch, TorchrunAlone) {
  const LaunchEnv env = detect(kTorchrun);
  expect_rank_5_of_16(env, "torchrun");
  EXPECT_FALSE(env.by_mpi);
  expect_contains(message_of([&] { make_communicator(env); }), "torchrun started 16 ranks");
}

TEST(Case42Launch, BothInAgreement) {
  expect_rank_5_of_16(detect(kOpenMpi + kTorchrun), "Open MPI and torchrun");
}

TEST(Case42Launch, NoLauncherIsAWorldOfOneWithoutMpi) {
  const LaunchEnv env = detect({});
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.size, 1);
  EXPECT_EQ(env.source, "no launcher");
  EXPECT_EQ(make_communicator(env)->backend(), "self");
}

TEST(Case42Launch, LocalRanksOfUnevenNodes) {
  const std::vector<std::string> nodes = {"a", "a", "b", "b", "b", "b"};
  EXPECT_EQ(local_ranks(nodes), (std::vector<int>{0, 1, 0, 1, 2, 3}));
  const std::vector<std::string> interleaved = {"a", "b", "a", "b", "b"};
  EXPECT_EQ(local_ranks(interleaved), (std::vector<int>{0, 0, 1, 1, 2}));
  EXPECT_TRUE(local_ranks({}).empty());
}

TEST(Launch, LocalRankIsNotGuessed) {
  const LaunchEnv env = detect({{"RANK", "3"}, {"WORLD_SIZE", "4"}});
  EXPECT_EQ(env.local_rank, std::nullopt);
  run_ranks(3, [](Communicator& comm) { EXPECT_EQ(local_rank_by_host(comm), comm.rank()); });
}

TEST(Launch, SlurmCountsOnlyWithoutAnotherLauncher) {
  const Variables srun = {
      {"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"}};
  const LaunchEnv env = detect(srun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.source, "srun");
  // torchrun inside a Slurm step of one task per node.
  expect_rank_5_of_16(detect(kTorchrun + srun), "torchrun");
  // A batch script: one process, although Slurm gives it a rank.
  EXPECT_EQ(detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).size, 1);
}

TEST(Launch, BuildWithoutMpiSaysSo) {
  if (built_with_mpi()) GTEST_SKIP() << "this build has MPI";
  const std::string text = message_of([] { make_communicator(detect(kOpenMpi)); });
  expect_contains(text, "built without MPI");
  expect_contains(text, "-DZEROFP8_WITH_MPI=ON");
}

TEST(Launch, BuildWithoutNcclSaysSo) {
  if (built_with_nccl()) GTEST_SKIP() << "this build has NCCL";
  const std::string text = message_of([] { make_nccl_communicator(make_self_communicator(), 0); });
  expect_contains(text, "built without NCCL");
  expect_contains(text, "-DZEROFP8_WITH_NCCL=ON");
}

TEST(Launch, BadValuesNameTheVariable) {
  for (const char* value : {"abc", "-1", "4x", "1.5", "99999999999", " 4"}) {
    Variables variables = kTorchrun;
    variables["WORLD_SIZE"] = value;
    const std::string text = message_of([&] { detect(variables); });
    expect_contains(text, "WORLD_SIZE");
    expect_contains(text, std::string("\"") + value + "\"");
    expect_contains(text, "whole number");
  }
  EXPECT_THROW(detect({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), ConfigError);
}

TEST(Launch, RankOutsideTheWorldIsAnError) {
  expect_contains(message_of([] { detect({{"RANK", "4"}, {"WORLD_SIZE", "4"}}); }), "0 to 3");
  expect_contains(
      message_of([] {
        detect(
            {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}});
      }),
      "LOCAL_RANK");
}

TEST(Launch, HalfASetIsAnError) {
  const std::string no_rank = message_of([] { detect({{"WORLD_SIZE", "4"}}); });
  expect_contains(no_rank, "RANK: given nothing");
  expect_contains(no_rank, "WORLD_SIZE is 4");
  expect_contains(message_of([] { detect({{"RANK", "0"}}); }), "WORLD_SIZE: given nothing");
  EXPECT_EQ(detect({{"WORLD_SIZE", "1"}}).size, 1);
  EXPECT_EQ(detect({{"LOCAL_RANK", "0"}}).size, 1);
  EXPECT_EQ(detect({{"WORLD_SIZE", ""}, {"RANK", ""}}).size, 1);
}

}  // namespace
}  // namespace zerofp8::test
