#!/usr/bin/env bash
# Builds that users may want besides release: without MPI, with CUDA with and without NCCL, kernels with clang, with
# benchmarks. Each runs a few tests; CUDA's need no GPU: its kernels are compiled for each architecture and read
# (registers, spills, precision), their PTX is run on the host, and the NCCL communicator runs on stand-ins of NCCL's
# and CUDA's functions.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

build() {  # name, target list, cmake arguments...
  local name=$1 targets=$2
  shift 2
  say "variant $name"
  cmake -B "build/$name" "$@" >/dev/null
  # shellcheck disable=SC2086  # a list
  cmake --build "build/$name" --target $targets
}
preset() {  # name, target list, cmake arguments...
  build "$1" "$2" --preset "$1" "${@:3}"
}

preset no-mpi "comm_thread_test launch_env_test engine_exact_test zerofp8_cli"
ctest --test-dir build/no-mpi --output-on-failure -L '^(comm_thread|launch_env|engine_exact)_test'

if command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
  CUOBJDUMP=$(command -v cuobjdump || find "${CUDA_HOME:-/usr/local/cuda}/bin" "$VENV" -type f -name cuobjdump 2>/dev/null | head -n 1)
  if [ -z "$CUOBJDUMP" ]; then
    [ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
    "$VENV/bin/pip" install --quiet --disable-pip-version-check -r requirements-cuda.txt
    CUOBJDUMP=$(find "$VENV" -type f -name cuobjdump | head -n 1)
    chmod +x "$(dirname "$CUOBJDUMP")/"{cuobjdump,nvdisasm}
  fi
  preset cuda "device_test device_sums_test isa_test zerofp8_cli device_bench ptx_tests" -DZEROFP8_CUOBJDUMP="$CUOBJDUMP" \
    -DZEROFP8_BUILD_BENCHMARKS=ON
  ctest --test-dir build/cuda --output-on-failure -L '^(device|device_sums|isa)_test'
  ctest --test-dir build/cuda --no-tests=error -V -R '^cuda_object$'
  ctest --test-dir build/cuda --no-tests=error --output-on-failure -j "$CPUS" -L '^ptx$'
  if grep -q '^NCCL_LIBRARY:FILEPATH=/' build/cuda/CMakeCache.txt; then
    cmake --build build/cuda --target nccl_test
    ctest --test-dir build/cuda --no-tests=error --output-on-failure -L '^nccl_test'
  else
    echo "NCCL is not installed: its communicator was left out"
  fi
  # What differs from it is how things are put together: one architecture is enough.
  for name in cuda-no-mpi cuda-no-nccl; do
    preset "$name" "launch_env_test zerofp8_cli" -DCMAKE_CUDA_ARCHITECTURES=90-real
    ctest --test-dir "build/$name" --output-on-failure -L '^launch_env_test'
  done
else
  echo "nvcc is not installed: the builds with CUDA were left out"
fi
if command -v clang++ >/dev/null; then
  # The kernels only: clang 14 with the headers of g++ 12 does not take the config layer.
  build clang "isa_test adam_kernel_test" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=clang++
  ctest --test-dir build/clang --output-on-failure -L "^(isa|adam_kernel)_test"
else
  echo "clang++ is not installed: its variant was left out"
fi
build benchmarks "kernels_bench device_bench" -G Ninja -DCMAKE_BUILD_TYPE=Release -DZEROFP8_BUILD_TESTS=OFF -DZEROFP8_BUILD_BENCHMARKS=ON
build/benchmarks/benchmarks/kernels_bench --benchmark_min_time=0.01 >/dev/null
ZEROFP8_BENCH_DEVICE=emulated python3 scripts/gpu_report.py --bench build/benchmarks/benchmarks/device_bench \
  --out build/benchmarks/report --repetitions 1 --min-time 0.01 >/dev/null
