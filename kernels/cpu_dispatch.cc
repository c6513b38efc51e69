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

std::vector<const Ops*> runnable_cpu_ops() {
  std::vector<const Ops*> tables = {&cpu::kOps_base};
#if defined(ZEROFP8_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) tables.push_back(&cpu::kOps_v3);
  if (__builtin_cpu_supports("x86-64-v4")) tables.push_back(&cpu::kOps_v4);
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
