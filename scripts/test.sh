#!/usr/bin/env bash
# All tests, from a fresh Debian or Ubuntu machine. ZEROFP8_FULL=1 (set by CI) adds the slow ones, the
# sanitizer builds and a short run of the example.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
JOBS=${ZEROFP8_JOBS:-$(nproc)}

build_and_test() {  # preset, target, ctest arguments...
  local preset=$1 target=$2
  shift 2
  say "building $preset"
  cmake --preset "$preset" "${CMAKE_ARGUMENTS[@]}" >/dev/null
  cmake --build "build/$preset" -j "$JOBS" --target "$target"
  say "testing $preset"
  ctest --test-dir "build/$preset" --output-on-failure -j "$JOBS" "$@"
}

install_torch
CMAKE_ARGUMENTS=(-DPython3_EXECUTABLE="$VENV/bin/python" -DZEROFP8_BUILD_EXAMPLES=ON -DZEROFP8_TORCH_DIR="$TORCH_DIR")
build_and_test release all
scripts/test-python.sh
if [ "${ZEROFP8_FULL:-0}" = 1 ]; then
  say "slow tests"
  ZEROFP8_SLOW=1 ctest --test-dir build/release --output-on-failure -R 'Slow|LargeMessages'
  CMAKE_ARGUMENTS=()
  build_and_test tsan thread_rank_tests -L '^(comm|engine|checkpoint)_'
  build_and_test asan all
  scripts/build-variants.sh
  say "the loss study, short"
  "$VENV/bin/python" scripts/loss_study.py --steps 200 --seeds 1 --slack 0.03 --out build/short_study
fi
say "all tests passed"
