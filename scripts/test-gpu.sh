#!/usr/bin/env bash
# Tests of the CUDA kernels on a GPU: the bits of the CPU's, and compute-sanitizer where it is installed. Builds what is
# missing in build/cuda (needs nvcc); with --no-build uses what was built elsewhere and carried there.
# Without a GPU it fails and says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TESTS=(device_test isa_test blocks_test adam_kernel_test adam_guard_test accumulator_kernel_test)
BIN=build/cuda/tests
if [ "${1:-}" != --no-build ]; then
  cmake --preset cuda >/dev/null
  cmake --build build/cuda --target "${TESTS[@]}"
fi
if ! "$BIN/device_test" --gtest_filter='All/DeviceTest.NothingIsFine/cuda' | grep -q 'PASSED.*1 test'; then
  "$BIN/device_test" --gtest_filter='Cuda.*'
  echo "test-gpu: no test ran on CUDA; the reason is above" >&2
  exit 1
fi
for test in "${TESTS[@]}"; do
  echo "== $test"
  ZEROFP8_TEST_OPS=cuda "$BIN/$test" --gtest_brief=1
done
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    echo "== compute-sanitizer, $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$BIN/device_test" --gtest_filter='All/*cuda' --gtest_brief=1
  done
else
  echo "compute-sanitizer is not installed: its runs were left out"
fi
