// The zerofp8 command as a user runs it: exit codes, what goes to which stream, and JSON that
// parses.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace {

struct Result {
  int code = -1;
  std::string out, err;
};

std::string file_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class Cli : public testing::Test {
 protected:
  std::string path(const std::string& name) const {
    return testing::TempDir() + "zerofp8_cli_" + std::to_string(getpid()) + "_" + name;
  }
  std::string config(const std::string& text) const {
    std::ofstream(path("config.json")) << text;
    return path("config.json");
  }
  Result run(const std::string& arguments, const std::string& environment = "") const {
    const std::string command = environment + " " ZEROFP8_CLI_PATH " " + arguments + " >" +
                                path("out") + " 2>" + path("err") + " </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, file_text(path("out")),
            file_text(path("err"))};
  }
  void TearDown() override {
    for (const char* name : {"config.json", "out", "err"}) std::remove(path(name).c_str());
  }
};

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

constexpr const char* kO2 =
    R"({"bf16":{"enabled":true},"zero_optimization":{"stage":2},"zerofp8":{"opt_level":"O2"}})";

TEST_F(Cli, HelpGoesToStdout) {
  for (const char* arguments :
       {"--help", "plan --help", "check --help", "matrix --help", "schema --help"}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 0) << arguments;
    EXPECT_HAS(result.out, "Usage");
    EXPECT_EQ(result.err, "");
  }
}

TEST_F(Cli, Version) {
  const Result result = run("--version");
  EXPECT_EQ(result.code, 0);
  EXPECT_TRUE(result.out.starts_with("zerofp8 0.")) << result.out;
}

TEST_F(Cli, UsageMistakesAreBadInputOnStderr) {
  const std::string file = config(kO2);
  for (const std::string& arguments : {std::string(""),
                                       std::string("nonsense"),
                                       std::string("plan"),
                                       "plan " + file + " --params",
                                       "plan " + file + " --params seven",
                                       "plan " + file + " --params 0",
                                       "plan " + file + " --params 1.5",
                                       "plan " + file + " --params -7e9",
                                       "plan " + file + " --params 1e300",
                                       "plan " + file + " --params 7GB",
                                       "plan " + file + " --params nan",
                                       "plan " + file + " --memory 80XB",
                                       "plan " + file + " --world 0",
                                       "plan " + file + " --world 6 --pipeline 4",
                                       "plan " + file + " --world x",
                                       "plan " + file + " --opt-level O4",
                                       "plan " + file + " --unknown",
                                       "check " + file + " extra",
                                       std::string("check /nonexistent"),
                                       std::string("check /"),
                                       std::string("matrix --json")}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 2) << arguments;
    EXPECT_EQ(result.out, "") << arguments;
    EXPECT_NE(result.err, "") << arguments;
  }
}

TEST_F(Cli, UnknownCommandsAreNamedWithTheNearest) {
  for (const auto& [given, nearest] : {std::pair{"pln", "plan"}, {"chekc x.json", "check"}}) {
    const Result result = run(given);
    EXPECT_EQ(result.code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_HAS(result.err, std::string("the nearest is ") + nearest);
    EXPECT_HAS(result.err, "plan, check, matrix, schema");
  }
  const Result none = run("");
  EXPECT_EQ(none.code, 2);
  EXPECT_HAS(none.err, "no command; allowed: plan, check, matrix, schema, convert, inspect");
}

// A full disk: never exit code 0 with a part of the answer.
TEST_F(Cli, OutputThatCannotBeWrittenIsAnError) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  const std::string file = config(kO2);
  for (const std::string& command :
       {"plan " + file, "plan --json " + file, "check " + file, std::string("matrix"),
        std::string("schema"), std::string("schema --reference")}) {
    const int status =
        std::system((ZEROFP8_CLI_PATH " " + command + " >/dev/full 2>" + path("err")).c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << command << ": " << status;
    EXPECT_HAS(file_text(path("err")),
               "standard output cannot be written: No space left on device");
  }
}

TEST_F(Cli, ConfigMistakesAreBadInputOnStderr) {
  for (const char* text :
       {R"({"train_batch_size":4,"gradient_acumulation_dtype":"fp32"})",
        R"({"zero_optimization":{"reduce_bukcet_size":5}})", R"({"bf16":{"loss_scale":0}})",
        R"({"gradient_clipping":"automatic"})", R"({"bf16":{"enabled":"true"}})",
        R"({"gradient_accumulation_dtype":"fp7"})", R"({"a":1,"a":2})", R"({)", "",
        R"({"bf16":{"enabled":true},"fp16":{"enabled":true}})",
        R"({"gradient_accumulation_dtype":{"sharded":true}})",
        R"({"optimizer":{"type":"AdamW","params":{"adam_w_mode":false}}})"}) {
    const std::string file = config(text);
    for (const char* command : {"check ", "plan "}) {
      const Result result = run(command + file);
      EXPECT_EQ(result.code, 2) << text;
      EXPECT_EQ(result.out, "") << text;
      EXPECT_HAS(result.err, "zerofp8: " + file + ": ");
      EXPECT_HAS(result.err, "allowed: ");
    }
  }
}

TEST_F(Cli, WhatDoesNotRunYetIsOne) {
  for (const char* text : {R"({"zero_optimization":{"stage":3}})",
                           R"({"zerofp8":{"weight_communication_dtype":"fp8"}})",
                           R"({"zerofp8":{"overrides":[{}]}})"}) {
    const Result result = run("check " + config(text));
    EXPECT_EQ(result.code, 1) << text;
    EXPECT_EQ(result.out, "");
    EXPECT_HAS(result.err, "not yet supported");
  }
}

TEST_F(Cli, CheckShowsWhatItResolvesTo) {
  const Result result = run("check " + config(kO2) + " --world 8 --pipeline 2");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_HAS(result.out, "level O2");
  EXPECT_HAS(result.out, "4 data x 2 pipeline x 1 tensor");
  EXPECT_HAS(result.out, ": ok");
}

TEST_F(Cli, CheckUsesTheNumberOfRanks) {
  const std::string file = config(
      R"({"train_batch_size":32,"train_micro_batch_size_per_gpu":2,"gradient_accumulation_steps":4})");
  EXPECT_EQ(run("check " + file + " --world 4").code, 0);
  EXPECT_EQ(run("check " + file + " --world 8").code, 2);
  EXPECT_EQ(run("check " + file + " --world 8 --tensor 2").code, 0);
}

TEST_F(Cli, WithoutWorldTheBatchKeysTellTheRanks) {
  const auto triple = [&](const std::string& train) {
    return config("{\"train_batch_size\":" + train +
                  R"(,"train_micro_batch_size_per_gpu":2,"gradient_accumulation_steps":4})");
  };
  const Result four = run("check " + triple("32") + " --pipeline 2");
  EXPECT_EQ(four.code, 0) << four.err;
  EXPECT_HAS(four.out, "4 data x 2 pipeline x 1 tensor");
  for (const char* train : {"33", "4", "1"}) {
    EXPECT_EQ(run("check " + triple(train)).code, 2) << train;
  }
  const Result one = run("check " + config(R"({"train_batch_size":32})"));
  EXPECT_HAS(one.out, "1 data x 1 pipeline x 1 tensor");
}

TEST_F(Cli, OptLevelArgumentMustAgreeWithTheFile) {
  EXPECT_EQ(run("check " + config("{}") + " --opt-level O3").code, 0);
  EXPECT_EQ(run("check " + config(kO2) + " --opt-level O2").code, 0);
  const Result result = run("check " + config(kO2) + " --opt-level O3");
  EXPECT_EQ(result.code, 2);
  EXPECT_HAS(result.err, "argument opt_level says O3");
}

TEST_F(Cli, PlanAsJson) {
  const Result result =
      run("plan " + config(kO2) + " --params 7e9 --world 64 --pipeline 4 --tensor 2 --json");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["size"]["parameters"], 875'000'000);
  EXPECT_EQ(json["launch"]["data_ranks"], 8);
  EXPECT_EQ(json["settings"]["exp_avg_dtype"]["value"], "fp8_e4m3");
  EXPECT_GT(json["totals"]["wire_bytes_per_step"], 0);
}

TEST_F(Cli, SizesInAnyUsualSpelling) {
  const std::string file = config("{}");
  const auto parameters = [&](const std::string& text) {
    const Result result = run("plan " + file + " --json --params " + text);
    return nlohmann::json::parse(result.out)["size"]["parameters"].get<std::int64_t>();
  };
  EXPECT_EQ(parameters("7e9"), 7'000'000'000);
  EXPECT_EQ(parameters("7B"), 7'000'000'000);
  EXPECT_EQ(parameters("1.3b"), 1'300'000'000);
  EXPECT_EQ(parameters("350M"), 350'000'000);
  EXPECT_EQ(parameters("12k"), 12'000);
  EXPECT_EQ(parameters("1000000007"), 1'000'000'007);
  EXPECT_EQ(parameters("1T"), 1'000'000'000'000);
}

TEST_F(Cli, MemoryThatDoesNotSufficeIsOne) {
  const std::string file = config(R"({"bf16":{"enabled":true}})");  // 16 bytes per parameter
  EXPECT_EQ(run("plan " + file + " --params 5e9 --memory 80GB").code, 0);
  EXPECT_EQ(run("plan " + file + " --params 5000001000 --memory 80GB").code, 1);
  EXPECT_EQ(run("plan " + file + " --params 5368709120 --memory 80GiB").code, 0);
  const Result result = run("plan " + file + " --params 7B --memory '80 GB'");
  EXPECT_EQ(result.code, 1);
  EXPECT_HAS(result.err, "does not fit");
  EXPECT_HAS(result.err, "112000000000 bytes per rank of 80000000000");
}

TEST_F(Cli, NoColorsWhereThereIsNoTerminal) {
  const std::string file = config(kO2);
  for (const char* environment : {"", "NO_COLOR=1", "TERM=xterm-256color"}) {
    EXPECT_EQ(run("plan " + file, environment).out.find('\x1b'), std::string::npos);
  }
}

std::size_t widest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t widest = 0;
  for (std::string line; std::getline(lines, line);) widest = std::max(widest, line.size());
  return widest;
}

TEST_F(Cli, TextFitsTheTerminal) {
  const std::string file = config(
      R"({"bf16":{"enabled":"auto"},"zero_optimization":{"stage":2,"contiguous_gradients":true,
          "reduce_scatter":true,"zero_hpz_partition_size":4},"gradient_clipping":"auto",
          "zerofp8":{"opt_level":"O2","two_level_reduce_scatter":{"ranks_per_node":2}}})");
  for (const std::string& command : {"plan " + file + " --params 7e9 --world 64",
                                     "check " + file + " --world 64", std::string("matrix")}) {
    const Result plain = run(command), narrow = run(command, "COLUMNS=72");
    EXPECT_EQ(plain.code, 0) << plain.err;
    EXPECT_LE(widest_line(plain.out), 100U) << plain.out;
    EXPECT_LE(widest_line(narrow.out), 72U) << narrow.out;
  }
  EXPECT_LE(widest_line(run("plan " + file + " --world 64", "COLUMNS=1").out), 72U);
}

TEST_F(Cli, PlanHasOneUnitNoEmptyRowsAndSaysWhatItLeavesOut) {
  const std::string file = config(kO2);
  const Result result =
      run("plan " + file + " --params 7e9 --world 8 --set " + "/zerofp8/master_weights=none");
  EXPECT_HAS(result.out, "GB per rank");
  EXPECT_EQ(result.out.find(" 0 B"), std::string::npos);
  EXPECT_EQ(result.out.find(" MB "), std::string::npos);
  EXPECT_HAS(result.out, "--world 8");
  EXPECT_HAS(result.out, "Temporaries may add about");
  EXPECT_HAS(result.out, "Without memory of its own: ");
}

TEST_F(Cli, BatchErrorsSayWhereTheNumbersComeFrom) {
  const Result result =
      run("check " + config(R"({"train_batch_size":7})") + " --world 4 --pipeline 2");
  EXPECT_EQ(result.code, 2);
  EXPECT_HAS(result.err, "/gradient_accumulation_steps, its default (1)");
  EXPECT_HAS(result.err, "the data ranks (2 from --world 4)");
}

TEST_F(Cli, AutoIsAssumedAndValuesCanBeSet) {
  const std::string file =
      config(R"({"bf16":{"enabled":"auto"},"train_batch_size":"auto","steps_per_print":Infinity})");
  const Result result = run("check " + file);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_HAS(result.out, "/bf16/enabled true, /train_batch_size none");
  const Result set =
      run("check " + file + " --set /bf16/enabled=false --set /zerofp8/opt_level=O3");
  EXPECT_HAS(set.out, "level O3");
  EXPECT_EQ(set.out.find("/bf16/enabled true"), std::string::npos);
  EXPECT_EQ(run("plan " + file + " --set stage=1").code, 2);
}

TEST_F(Cli, AllMistakesOfAFileAreToldAtOnce) {
  const std::string file = config(R"({"bf16":{"enabled":"true"},"gradient_clip":1,
      "zero_optimization":{"stage":3}})");
  const Result result = run("check " + file);
  EXPECT_EQ(result.code, 2);
  for (const char* path : {"/bf16/enabled", "/gradient_clip", "/zero_optimization/stage"}) {
    EXPECT_HAS(result.err, "zerofp8: " + file + ": " + path + ": given");
  }
}

// A python3 of its own on PATH: what it is given, and its exit code.
TEST_F(Cli, CommandsInPythonGetAllArguments) {
  const std::string folder = path("bin"), python = folder + "/python3";
  ASSERT_EQ(std::system(("mkdir -p " + folder).c_str()), 0);
  std::ofstream(python) << "#!/bin/sh\nshift 2\nfor word; do echo \"[$word]\"; done\nexit 7\n";
  ASSERT_EQ(std::system(("chmod +x " + python).c_str()), 0);
  const std::string first = "PATH=" + folder + ":$PATH";
  const Result result = run("convert --help 'a b' --to=c", first);
  EXPECT_EQ(result.code, 7);
  EXPECT_EQ(result.out, "[convert]\n[--help]\n[a b]\n[--to=c]\n");
  EXPECT_EQ(run("inspect x", first).out, "[inspect]\n[x]\n");
  std::system(("rm -r " + folder).c_str());
}

TEST_F(Cli, CommandsInPythonSayWhatIsMissing) {
  const Result none = run("convert a b", "PATH=/nonexistent");
  EXPECT_EQ(none.code, 2);
  EXPECT_HAS(none.err, "convert needs Python with the package zerofp8, and python3 cannot be run");
  if (std::system("python3 -I -S -c 'pass' >/dev/null 2>&1") != 0) GTEST_SKIP() << "no python3";
  const std::string folder = path("bin"), python = folder + "/python3";
  ASSERT_EQ(std::system(("mkdir -p " + folder).c_str()), 0);
  std::ofstream(python) << "#!/bin/sh\nPATH=${PATH#*:}\nexec python3 -I -S \"$@\"\n";
  ASSERT_EQ(std::system(("chmod +x " + python).c_str()), 0);
  const Result no_package = run("inspect x", "PATH=" + folder + ":$PATH");
  EXPECT_EQ(no_package.code, 1);
  EXPECT_HAS(no_package.err, "has no module zerofp8, which this command needs");
  std::system(("rm -r " + folder).c_str());
}

TEST_F(Cli, MatrixPlainAndMarkdown) {
  const Result plain = run("matrix"), markdown = run("matrix --markdown");
  EXPECT_EQ(plain.code, 0);
  EXPECT_HAS(plain.out, "NotSupported");
  EXPECT_HAS(markdown.out, "| bf16 | fp16 | accumulation |");
  EXPECT_EQ(plain.err + markdown.err, "");
}

TEST_F(Cli, SchemaIsJsonWithEveryBlock) {
  const Result result = run("schema");
  EXPECT_EQ(result.code, 0);
  const nlohmann::json schema = nlohmann::json::parse(result.out);
  EXPECT_EQ(schema["additionalProperties"], false);
  const nlohmann::json& properties = schema["properties"];
  for (const char* block : {"bf16", "fp16", "zero_optimization", "optimizer", "zerofp8"}) {
    EXPECT_TRUE(properties.contains(block)) << block;
  }
  EXPECT_EQ(properties["zero_optimization"]["properties"]["stage"]["anyOf"][0]["maximum"], 3);
  EXPECT_EQ(properties["zero_optimization"]["properties"]["max_live_parameters"]["$ref"],
            "#/properties/zero_optimization/properties/stage3_max_live_parameters");
  EXPECT_EQ(properties["zerofp8"]["properties"]["block_size"]["default"], 128);
  EXPECT_FALSE(properties["bf16"]["properties"].contains("loss_scale"));
  EXPECT_TRUE(properties["train_batch_size"]["anyOf"].is_array());
}

// docs/ holds what the command prints.
TEST_F(Cli, DocsAreUpToDate) {
  EXPECT_EQ(run("schema").out, file_text(ZEROFP8_SOURCE_DIR "/docs/config.schema.json"))
      << "run: zerofp8 schema > docs/config.schema.json";
  EXPECT_EQ(run("schema --reference").out, file_text(ZEROFP8_SOURCE_DIR "/docs/config.md"))
      << "run: zerofp8 schema --reference > docs/config.md";
}

}  // namespace
