#include "tools/python_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tools/commands.h"

namespace zerofp8 {
namespace {

// As `python -m`, but a package that is missing is an error for people.
constexpr const char* kRun = R"(
import importlib, runpy, sys
name = "zerofp8." + sys.argv.pop(1)
try:
    importlib.import_module("zerofp8")
except ModuleNotFoundError as error:
    sys.exit(f"zerofp8: {sys.executable} has no module {error.name}, which this command needs: "
             "install the zerofp8 package there, or put another python3 first on PATH")
runpy.run_module(name, run_name="__main__", alter_sys=True)
)";

// The one that this tool was installed with, else the shell's.
std::string python() {
  std::error_code ignored;
  const auto tool = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const auto beside = tool.parent_path() / "python";
  return access(beside.c_str(), X_OK) == 0 ? beside.string() : "python3";
}

}  // namespace

bool is_python_command(std::string_view name) { return name == "convert" || name == "inspect"; }

int run_in_python(int argc, char** argv) {
  std::vector<std::string> words = {python(), "-c", kRun, argv[1]};
  words.insert(words.end(), argv + 2, argv + argc);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  fmt::print(stderr,
             "zerofp8: {} needs Python with the package zerofp8, and {} cannot be run: {}\n",
             argv[1], words[0], std::strerror(errno));
  return kBadInput;
}

}  // namespace zerofp8
