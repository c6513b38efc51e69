#!/usr/bin/env bash
# From a fresh Debian or Ubuntu machine to a trained model in minutes. See --help.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage() {
  cat <<'TEXT'
usage: scripts/demo.sh [--config FILE] [--out FOLDER] [options of examples/deepspeed/train_pipeline.py]
       scripts/demo.sh --mpi [options of the C++ trainer]

Installs what is missing (Debian or Ubuntu packages, a virtual environment in .venv with torch and DeepSpeed), builds the Python package, and trains a
byte-level GPT with DeepSpeed's pipeline engine: 2 stages x 2 data ranks on this machine's CPUs, first in FP32, then with --config (default: bf16 weights,
FP8 gradients and state). Draws both: out/loss.png, out/memory.png, out/wire.png. A second call takes a minute or two.

  --steps N    steps of each run (default 150)
  --mpi        the C++ example instead: two ranks of mpirun, no Python in the training; writes to out/mpi

ZEROFP8_SKIP_APT=1 leaves the system's packages as they are (needed: those listed in scripts/setup.sh).
TEXT
}

config=$HERE/../examples/deepspeed/ds_config_fp8.json
out=$HERE/../out
options=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --mpi) shift; exec "$HERE/demo-mpi.sh" "$@" ;;
    --config) config=${2:?--config needs a file}; shift ;;
    --config=*) config=${1#*=} ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    --out=*) out=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ -f "$config" ] || { echo "demo.sh: --config $config: there is no such file" >&2; exit 2; }
config=$(realpath "$config") out=$(realpath -m "$out")

source "$HERE/setup.sh"
LOGS=build/demo-logs
mkdir -p "$LOGS" "$out"
# DeepSpeed compiles an extension here. A run that was killed leaves a lock for which the next one would wait for ever.
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$ROOT/build/torch_extensions
rm -f "$TORCH_EXTENSIONS_DIR"/*/lock

child=
shared_before=$(ls /dev/shm)
clean() {  # DeepSpeed leaves 69 MB per rank
  local file
  for file in /dev/shm/deepspeed_allreduce_buffer_*; do
    grep -qxF "${file##*/}" <<<"$shared_before" || rm -f "$file"
  done
}
stop() {
  trap - INT TERM
  if [ -n "$child" ]; then  # ends its ranks
    kill -TERM "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  printf '\ninterrupted\n' >&2
  exit 130
}
trap clean EXIT
trap stop INT TERM

reason() {  # file: the trainer's own line, else what torchrun says of the first rank that ended, else the last lines
  grep -m1 '^train_pipeline.py: ' "$1" ||
    sed -n '/^Root Cause/,${/rank  *:/p;/Signal/p}' "$1" | grep . || tail -n 5 "$1"
}

# In the background, so that a signal to this script alone is acted on at once. Ranks write warnings and errors to stderr, kept in a file.
train() {  # config, options...
  local log code=0
  log=$LOGS/$(basename "$1" .json).err
  "$VENV/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
    examples/deepspeed/train_pipeline.py --out "$out" --steps 150 --config "$@" 2>"$log" &
  child=$!
  wait "$child" || code=$?
  child=
  [ $code -eq 0 ] && return
  say "training failed" >&2
  reason "$log" >&2
  echo "all messages: $log" >&2
  exit 1
}

install_python requirements-demo.txt torch numpy matplotlib tqdm scikit_build_core deepspeed
build_package >"$LOGS/build.log" 2>&1 &
child=$!
say "building the Python package (about two minutes, once)"
wait "$child" || { grep -m5 -E 'error|Error' "$LOGS/build.log" >&2; echo "all messages: $LOGS/build.log" >&2; exit 1; }
child=
"$VENV/bin/zerofp8" check "$config" >"$LOGS/check.log" 2>&1 || { cat "$LOGS/check.log" >&2; exit 2; }
rm -f "$out"/history_*.json  # the pictures show this demo's runs
say "training in FP32, to compare with (the first time DeepSpeed compiles an extension: a minute)"
train examples/deepspeed/ds_config_fp32.json "${options[@]}"
say "training with $(basename "$config")"
train "$config" "${options[@]}"
