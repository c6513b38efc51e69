// The floating-point mode of kernels on the host.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace zerofp8 {
namespace {  // each instruction set has its own: one that is shared could be linked from another

// IEEE arithmetic inside a kernel whatever the program has set: round to nearest, subnormals kept,
// no traps. The program's mode and sticky flags are put back.
class IeeeMode {
 public:
#if defined(__SSE__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace
}  // namespace zerofp8
