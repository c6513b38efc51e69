// Chooses the CPU kernels once, at first use.
#include <cstdlib>
#include <string>

#include "zerofp8/error.h"
#include "zerofp8/ops.h"

namespace zerofp8 {
namespace cpu {
extern const Ops kOps_base;
#if defined(ZEROFP8_X86)
extern const Ops kOps_v3;
extern const Ops kOps_v4;
#endif
}  // namespace cpu

#if defined(ZEROFP8_X86)
// Clang 14 does not know the names of the levels; every CPU with these features has the rest of the
// level.
static bool runs_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
static bool runs_v4() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

std::vector<const Ops*> runnable_cpu_ops() {
  std::vector<const Ops*> tables = {&cpu::kOps_base};
#if defined(ZEROFP8_X86)
  __builtin_cpu_init();
  if (runs_v3()) tables.push_back(&cpu::kOps_v3);
  if (runs_v3() && runs_v4()) tables.push_back(&cpu::kOps_v4);
#endif
  return tables;
}

static const Ops& choose() {
  const std::vector<const Ops*> tables = runnable_cpu_ops();
  const char* wanted = std::getenv("ZEROFP8_ISA");
  if (wanted == nullptr || *wanted == '\0') return *tables.back();
  std::string allowed;
  for (const Ops* ops : tables) {
    if (ops->name == wanted) return *ops;
    allowed += (allowed.empty() ? "" : ", ") + std::string(ops->name);
  }
  throw ArgumentError("ZEROFP8_ISA: given \"" + std::string(wanted) +
                      "\"; this CPU runs: " + allowed + "; unset it to use the best one");
}

const Ops& cpu_ops() {
  static const Ops& ops = choose();
  return ops;
}

}  // namespace zerofp8
