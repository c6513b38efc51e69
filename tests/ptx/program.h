// A kernel's PTX as a list of instructions, for the machine in tests/ptx/machine.h. Read is what
// nvcc writes for this project's kernels; whatever else is met is an error that names the line.
// Source of every rule: NVIDIA, "Parallel Thread Execution ISA", version 9.0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace zerofp8::test::ptx {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Thread;
struct Instruction;
using Operation = void (*)(Thread&, const Instruction&);

// Instructions that a warp or a block runs together: a thread that meets one waits there.
enum class Meeting { kNone, kBarrier, kShuffleDown, kShuffleBfly, kReduceMax };

enum class Space { kGeneric, kGlobal, kShared, kLocal, kParam };

// Operands are slots of a thread: its registers, and behind them what it reads only.
struct Instruction {
  Operation run = nullptr;
  Meeting meeting = Meeting::kNone;
  int guard = -1;        // slot of a predicate; -1: always
  bool negated = false;  // of the guard
  std::array<int, 6> slots{};
  int count = 0;            // slots in use, in the order of the text
  std::int64_t offset = 0;  // of an address
  Space space = Space::kGeneric;
  int target = 0;  // of a branch
  int line = 0;    // in the file, from 1
  std::string text;
};

// What a slot behind the registers holds.
struct Constant {
  enum class Kind { kLiteral, kParam, kShared, kLocal, kTid, kNtid, kCtaidX, kCtaidY, kNctaidX };
  Kind kind;
  std::uint64_t value;  // literal bits, or an offset
  auto operator<=>(const Constant&) const = default;
};

struct Parameter {
  std::size_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  unsigned max_threads = 1024;
  std::vector<Constant> constants;  // slots 0 ...
  int registers = 0;                // ... and those behind
  std::vector<Instruction> code;
};

// By mangled name without the part that tells files apart: "run" in an anonymous namespace is
// called differently in each compilation.
std::map<std::string, Kernel> parse(const std::string& text);
std::string common_name(const std::string& mangled);

struct Entry {
  int operands = 0;         // vectors count as their elements
  Operation run = nullptr;  // nullptr: there is no such instruction here
  Meeting meeting = Meeting::kNone;
};
Entry operation(const std::string& opcode);

}  // namespace zerofp8::test::ptx
