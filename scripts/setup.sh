# Sourced by demo.sh and test.sh: installs what is missing on Debian or Ubuntu, makes a virtual environment
# with torch in .venv, and leaves TORCH_DIR set. Needs root (or sudo) only if a package is missing.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
VENV=${ZEROFP8_VENV:-$ROOT/.venv}
PACKAGES=(g++ cmake ninja-build python3 python3-venv openmpi-bin libopenmpi-dev nlohmann-json3-dev libgtest-dev
          libbenchmark-dev libcli11-dev libfmt-dev libxxhash-dev binutils)

say() { printf '\n== %s\n' "$*"; }

install_packages() {
  local missing=() package
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

install_torch() {
  if [ ! -x "$VENV/bin/python" ]; then
    say "making the virtual environment $VENV"
    python3 -m venv "$VENV"
  fi
  if ! "$VENV/bin/python" -c 'import torch, numpy, matplotlib' 2>/dev/null; then
    say "installing torch, numpy and matplotlib from PyPI (about 3 GB; minutes on a slow line)"
    "$VENV/bin/pip" install --quiet --disable-pip-version-check -r requirements.txt
  fi
  TORCH_DIR=$("$VENV/bin/python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
}

# Open MPI refuses to run as root without these; ranks may outnumber cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
install_packages
