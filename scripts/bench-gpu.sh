#!/usr/bin/env bash
# Speed of the CUDA kernels on a GPU, beside the device's own copy and torch's fused AdamW: docs/results/gpu.{json,md}.
# Builds what is missing in build/cuda (needs nvcc); with --no-build uses what was built elsewhere and carried there.
# Without a GPU it fails and says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
BENCH=build/cuda/benchmarks/device_bench
if [ "${1:-}" != --no-build ]; then
  cmake --preset cuda -DZEROFP8_BUILD_BENCHMARKS=ON >/dev/null
  cmake --build build/cuda --target device_bench
fi
python3 scripts/gpu_report.py --bench "$BENCH"
