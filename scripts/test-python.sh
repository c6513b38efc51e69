#!/usr/bin/env bash
# Builds the Python package, installs it into the virtual environment and runs its tests.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install_python requirements-dev.txt torch numpy matplotlib pytest sklearn tqdm scikit_build_core deepspeed
# Trainers' packages (about 1 GB): without them their tests are skipped, and where they are installed they run short.
[ "${ZEROFP8_FULL:-0}" != 1 ] ||
  install_python requirements-clients.txt transformers accelerate lightning peft torchao bitsandbytes megatron
build_package
say "testing the Python package"
# Tests start ranks as processes. One that fails is run once more, alone, so that a machine that stalls for
# half a minute does not fail the suite; what fails twice fails it.
"$VENV/bin/python" -m pytest -q "$@" tests/python ||
  { say "once more, what failed"; "$VENV/bin/python" -m pytest -q --last-failed --last-failed-no-failures none "$@" tests/python; }
if [ "${ZEROFP8_FULL:-0}" = 1 ]; then
  OLDER=0.19.6
  say "testing with DeepSpeed $OLDER, too"
  [ -d "build/deepspeed-$OLDER" ] ||
    DS_ACCELERATOR=cpu "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps \
      --target "build/deepspeed-$OLDER" "deepspeed==$OLDER"
  PYTHONPATH="$ROOT/build/deepspeed-$OLDER" "$VENV/bin/python" -m pytest -q tests/python/test_deepspeed.py \
    tests/python/test_deepspeed_cases.py tests/python/test_deepspeed_tensor.py
fi
rm -f /dev/shm/deepspeed_allreduce_buffer_*  # DeepSpeed leaves them behind
