#!/usr/bin/env bash
# All tests, from a fresh Debian or Ubuntu machine. ZEROFP8_FULL=1 (set by CI) adds the slow ones, the
# sanitizer builds and a short run of the example.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
JOBS=${ZEROFP8_JOBS:-$(nproc)}

build_and_test() {  # preset, ctest arguments...
  local preset=$1
  shift
  say "building $preset"
  cmake --preset "$preset" >/dev/null
  cmake --build "build/$preset" -j "$JOBS"
  say "testing $preset"
  ctest --test-dir "build/$preset" --output-on-failure -j "$JOBS" "$@"
}

install_torch
build_and_test release
if [ "${ZEROFP8_FULL:-0}" = 1 ]; then
  say "slow tests"
  ZEROFP8_SLOW=1 ctest --test-dir build/release --output-on-failure -L slow
  build_and_test tsan -L threads
  build_and_test asan -LE mpi_slow
  say "the example, short, with and without MPI"
  scripts/example-check.sh "$TORCH_DIR"
  say "without MPI, and with clang"
  scripts/build-variants.sh
fi
say "all tests passed"
