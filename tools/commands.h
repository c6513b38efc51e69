// The commands of the zerofp8 program. Each returns its exit code.
#pragma once

#include <string>
#include <vector>

#include "zerofp8/error.h"

namespace zerofp8 {

enum ExitCode : int {
  kOk = 0,
  kDoesNotRun = 1,  // a sound config that does not fit, or that this version does not run yet
  kBadInput = 2,
  kNotWritten = 3,  // the answer could not be written
};

class OutputError : public Error {
 public:
  using Error::Error;
};

struct RankOptions {
  int world =
      0;  // all ranks: data x pipeline x tensor; 0 = what the batch keys imply, else 1 data rank
  int pipeline = 1;
  int tensor = 1;
  std::string opt_level;  // "" = the config's
};

struct ConfigOptions {
  std::string path;
  std::vector<std::string> changes;  // "/path=value"
};

struct PlanOptions {
  ConfigOptions config;
  RankOptions ranks;
  std::string parameters = "1e9";
  std::string memory;  // of one rank; "" = not checked
  bool json = false;
};

struct CheckOptions {
  ConfigOptions config;
  RankOptions ranks;
};

int run_plan(const PlanOptions& options);
int run_check(const CheckOptions& options);
int run_matrix(bool markdown);
int run_schema(bool reference);

}  // namespace zerofp8
