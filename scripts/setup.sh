# Sourced by the demos and tests: installs what is missing on Debian or Ubuntu, makes a virtual environment
# in .venv, and leaves CPUS and, with install_torch, TORCH_DIR set. Needs root (or sudo) only if a package is missing;
# ZEROFP8_SKIP_APT=1 leaves the system's packages as they are.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
VENV=${ZEROFP8_VENV:-$ROOT/.venv}
PACKAGES=(g++ cmake ninja-build python3 python3-venv openmpi-bin libopenmpi-dev nlohmann-json3-dev libgtest-dev
          libbenchmark-dev libcli11-dev libfmt-dev libxxhash-dev binutils)
# Its builds compile many sources several times with the same options.
if [ "${ZEROFP8_FULL:-0}" = 1 ]; then PACKAGES+=(ccache); fi

say() { printf '\n== %s  (%s)\n' "$*" "$(date +%T)"; }

# nproc would answer with OMP_NUM_THREADS, which is 1 for the ranks.
CPUS=$(env -u OMP_NUM_THREADS nproc)

install_packages() {
  local missing=() package
  python3 -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' 2>/dev/null ||
    PACKAGES+=(python3-dev)
  for package in "${PACKAGES[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  say "installing ${missing[*]}"
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "these packages are missing and sudo is not there: ${missing[*]}" >&2; exit 1; }
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

install_python() {  # requirements file, the modules that tell whether it is installed...
  local file=$1
  shift
  if [ ! -x "$VENV/bin/python" ]; then
    say "making the virtual environment $VENV"
    python3 -m venv "$VENV"
    "$VENV/bin/pip" install --quiet --disable-pip-version-check wheel  # or pip warns of how DeepSpeed is built
  fi
  "$VENV/bin/python" -c 'import sys, importlib.util as u; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))' "$@" && return
  say "installing $file from PyPI (with torch about 3 GB; minutes on a slow line)"
  "$VENV/bin/pip" install --quiet --disable-pip-version-check -r "$file"
}

build_package() {
  say "building the Python package"
  CMAKE_BUILD_PARALLEL_LEVEL=${ZEROFP8_JOBS:-$CPUS} \
    "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
}

install_torch() {
  install_python requirements.txt torch numpy matplotlib
  TORCH_DIR=$("$VENV/bin/python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
}

# Open MPI refuses to run as root without these; ranks may outnumber cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
[ "${ZEROFP8_SKIP_APT:-0}" = 1 ] || install_packages
