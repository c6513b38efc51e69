#!/usr/bin/env bash
# Builds that users may want besides the presets: without MPI, with clang, with benchmarks. Each runs a few tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

variant() {  # name, cmake arguments...
  local name=$1
  shift
  printf '\n== variant %s\n' "$name"
  cmake -G Ninja -B "build/$name" -DCMAKE_BUILD_TYPE=Release "$@" >/dev/null
  cmake --build "build/$name"
}
variant no-mpi -DZEROFP8_WITH_MPI=OFF
ctest --test-dir build/no-mpi --output-on-failure -L 'comm|engine_exact'
if command -v clang++ >/dev/null; then
  variant clang -DCMAKE_CXX_COMPILER=clang++
  ctest --test-dir build/clang --output-on-failure -L 'isa|adam_kernel|engine_exact'
else
  echo "clang++ is not installed: its variant was left out"
fi
variant benchmarks -DZEROFP8_BUILD_TESTS=OFF -DZEROFP8_BUILD_BENCHMARKS=ON
build/benchmarks/benchmarks/kernels_bench --benchmark_min_time=0.01 >/dev/null
