#!/usr/bin/env bash
# The C++ example, from a fresh Debian or Ubuntu machine: installs, builds, trains on two ranks of mpirun. scripts/demo.sh --mpi runs this.
# Pictures and figures go to out/mpi. Options are passed on to the trainer, e.g. scripts/demo.sh --mpi --steps 500.
case ${1-} in -h | --help) sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"; exit ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install_torch
say "building (build/demo)"
cmake --preset release -B build/demo -DZEROFP8_BUILD_EXAMPLES=ON -DZEROFP8_BUILD_TESTS=OFF \
      -DZEROFP8_TORCH_DIR="$TORCH_DIR" >build-demo.log 2>&1 || { cat build-demo.log; exit 1; }
cmake --build build/demo >>build-demo.log 2>&1 || { tail -n 40 build-demo.log; exit 1; }
rm -f build-demo.log
mkdir -p out/mpi
say "the plan of the example config on two ranks"
build/demo/tools/zerofp8 plan examples/mpi/ds_config.json --params 132e3 --world 2
say "training a byte-level GPT on two ranks, then the same with plain FP32 AdamW"
mpirun -n 2 --oversubscribe build/demo/examples/mpi/train_gpt --config examples/mpi/ds_config.json \
       --results out/mpi/demo.json "$@"
"$VENV/bin/python" scripts/plot_run.py out/mpi/demo.json --out out/mpi
