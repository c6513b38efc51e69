// Each device under test behind the table of the CPU's kernels, so that the tests of those run on
// it: inputs are copied to the device, results back.
#pragma once

#include <vector>

#include "zerofp8/ops.h"

namespace zerofp8::test {

// The CPU's tables, base first, then one per device under test.
std::vector<const Ops*> all_ops();
// What kernel tests run on: the best table of this CPU, or the one that the environment variable
// ZEROFP8_TEST_OPS names.
const Ops& ops_under_test();

}  // namespace zerofp8::test
