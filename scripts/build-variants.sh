#!/usr/bin/env bash
# Builds that users may want besides the presets: without MPI, kernels with clang, with benchmarks. Each runs a few tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

variant() {  # name, target list, cmake arguments...
  local name=$1 targets=$2
  shift 2
  printf '\n== variant %s\n' "$name"
  cmake -G Ninja -B "build/$name" -DCMAKE_BUILD_TYPE=Release "$@" >/dev/null
  # shellcheck disable=SC2086  # a list
  cmake --build "build/$name" --target $targets
}
variant no-mpi "comm_thread_test launch_env_test engine_exact_test zerofp8_cli" -DZEROFP8_WITH_MPI=OFF
ctest --test-dir build/no-mpi --output-on-failure -L '^(comm_thread|launch_env|engine_exact)_test'
if command -v clang++ >/dev/null; then
  # The kernels only: clang 14 with the headers of g++ 12 does not take the config layer.
  variant clang "isa_test adam_kernel_test" -DCMAKE_CXX_COMPILER=clang++
  ctest --test-dir build/clang --output-on-failure -L "^(isa|adam_kernel)_test"
else
  echo "clang++ is not installed: its variant was left out"
fi
variant benchmarks kernels_bench -DZEROFP8_BUILD_TESTS=OFF -DZEROFP8_BUILD_BENCHMARKS=ON
build/benchmarks/benchmarks/kernels_bench --benchmark_min_time=0.01 >/dev/null
