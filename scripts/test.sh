#!/usr/bin/env bash
# All tests, from a fresh Debian or Ubuntu machine. ZEROFP8_FULL=1 (set by CI) adds the slow ones, the
# sanitizer builds and a short run of the example.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
JOBS=${ZEROFP8_JOBS:-$CPUS}

build_and_test() {  # preset, target list, ctest arguments...
  local preset=$1 targets=$2
  shift 2
  say "building $preset"
  cmake --preset "$preset" "${CMAKE_ARGUMENTS[@]}" >/dev/null
  # shellcheck disable=SC2086  # a list
  cmake --build "build/$preset" -j "$JOBS" --target $targets
  say "testing $preset"
  ctest --test-dir "build/$preset" --output-on-failure -j "$JOBS" "$@"
}

# What TSan runs: everything on thread ranks. ASan, which takes three times as long to compile: MEMORY and below. Left out
# are tests that take minutes there (drift, memory over 1,000 steps, the matrix and the bucket sweep); by hand they are
# clean, too: cmake --build --preset asan && ctest --preset asan.
THREADS="comm_thread_test comm_fault_test comm_mismatch_test engine_sharding_test engine_groups_test engine_errors_test
         engine_overflow_test checkpoint_test checkpoint_damage_test checkpoint_crash_test"
THREADS_MORE="engine_norm_test engine_accumulation_test engine_reduction_test engine_adam_test
              engine_writes_test engine_two_level_test engine_hyper_test engine_device_test engine_device_faults_test
              engine_queued_test engine_replays_test"
# Matrices that take a minute or more each there; what they share with other tests is run by those.
TOO_LONG="TwoLevelCells.ThreeSteps|Case38_AnyNumber|Case23_FewElements|Resume.TenAndTen.*(fp16|O1|O3)"
TOO_LONG+="|EngineQueued[.].*(O0|O1|O3|alone|overlap|small|master|many|hybrid|two_level)"
# Memory errors: what indexes memory, ends in odd places, fails half-way or reads files. The rest adds a third to the
# time for what these run, too.
MEMORY="comm_thread_test comm_fault_test engine_sharding_test engine_errors_test engine_accumulation_test
        engine_device_faults_test engine_queued_test engine_replays_test checkpoint_test checkpoint_damage_test"
KERNELS="device_test device_sums_test device_formats_test device_step_test ptx_machine_test
         isa_test masters_test blocks_test adam_kernel_test accumulator_kernel_test"
INPUT="config_keys_test config_resolve_test plan_test partition_test reduce_scatter_test two_level_test"
labels() { local list; list=$(echo $*); echo "^(${list// /|})\$"; }  # exactly these programs

install_torch
CMAKE_ARGUMENTS=(-DPython3_EXECUTABLE="$VENV/bin/python" -DZEROFP8_BUILD_EXAMPLES=ON -DZEROFP8_TORCH_DIR="$TORCH_DIR")
build_and_test release all
scripts/test-python.sh
if [ "${ZEROFP8_FULL:-0}" = 1 ]; then
  say "slow tests"
  ZEROFP8_SLOW=1 ctest --test-dir build/release --output-on-failure -j "$JOBS" -R 'Slow|LargeMessages'
  CMAKE_ARGUMENTS=()
  build_and_test tsan "$THREADS $THREADS_MORE" -L "$(labels $THREADS $THREADS_MORE)" -E "$TOO_LONG"
  build_and_test asan "$MEMORY $KERNELS $INPUT" -L "$(labels $MEMORY $KERNELS $INPUT)" -E "$TOO_LONG"
  scripts/build-variants.sh
  say "the loss study, short"
  "$VENV/bin/python" scripts/loss_study.py --steps 200 --seeds 1 --slack 0.03 --out build/short_study
fi
say "all tests passed"
