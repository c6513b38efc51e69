// Commands of the command line tool that the Python package runs.
#pragma once

#include <string_view>

namespace zerofp8 {

// Whether `name` is one of them.
bool is_python_command(std::string_view name);

// Becomes `python -m zerofp8.NAME` with the arguments after the name; returns only if that cannot
// be started, with the exit code.
int run_in_python(int argc, char** argv);

}  // namespace zerofp8
