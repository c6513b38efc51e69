#!/usr/bin/env bash
# Tests on a GPU: the kernels have the bits of the CPU's, and so has the engine; compute-sanitizer where it is installed;
# training from Python where torch with CUDA and the package are. Builds what is missing in build/cuda (needs nvcc); with
# --no-build uses what was built elsewhere and carried there. Without a GPU it fails and says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DEVICE_TESTS=(device_test device_sums_test device_formats_test device_step_test)
TESTS=("${DEVICE_TESTS[@]}" isa_test blocks_test adam_kernel_test adam_guard_test accumulator_kernel_test)
ENGINE_TESTS=(engine_device_test engine_matrix_test engine_reduction_test engine_norm_test engine_groups_test engine_adam_test
              engine_writes_test engine_hyper_test engine_queued_test checkpoint_damage_test)
BIN=build/cuda/tests
if [ "${1:-}" != --no-build ]; then
  cmake --preset cuda >/dev/null
  cmake --build build/cuda --target "${TESTS[@]}" "${ENGINE_TESTS[@]}"
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
for test in "${ENGINE_TESTS[@]}"; do
  echo "== $test"
  ZEROFP8_TEST_DEVICE=cuda "$BIN/$test" --gtest_brief=1
done
if python3 -c 'import sys, torch, zerofp8, pytest; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "== training from Python"
  python3 -m pytest -q tests/python/test_cuda.py
else
  echo "torch with CUDA, pytest or the package zerofp8 is not installed: training from Python was left out"
fi
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    echo "== compute-sanitizer, $tool"
    for test in "${DEVICE_TESTS[@]}"; do
      compute-sanitizer --tool "$tool" --error-exitcode 1 "$BIN/$test" --gtest_filter='All/*cuda' --gtest_brief=1
    done
  done
else
  echo "compute-sanitizer is not installed: its runs were left out"
fi
