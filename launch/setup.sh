# Sourced by the other scripts of this folder: finds or makes a Python environment and installs bnb_fsdp into it.
#
#   choose_environment                       sets $python
#   install_into PYTHON CONSTRAINTS WHAT...  pip, with the versions of a constraints file of this folder
#   make_environment FOLDER                  sets $made to the python of a virtual environment, made if need be
# shellcheck shell=bash

set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
trap 'echo; echo "interrupted" >&2; exit 130' INT

# The default list of GPU architectures is for wheels that travel, and takes minutes to compile. AUTO is said too, as
# the build folder remembers an earlier OFF.
build_note=""
if [ -z "${SKBUILD_CMAKE_DEFINE:-}" ]; then
  gpu="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u)" || gpu=""
  if [[ "$gpu" =~ ^[0-9]+$ ]]; then
    export SKBUILD_CMAKE_DEFINE="BNB_FSDP_CUDA=AUTO;BNB_FSDP_CUDA_ARCHITECTURES=$gpu"
    command -v nvcc "${CUDACXX:-nvcc}" "${CUDA_PATH:-}/bin/nvcc" >/dev/null || build_note="there is a GPU but no nvcc on PATH, so that bnb_fsdp's \
CUDA library cannot be compiled, and slower kernels will run. Put nvcc (CUDA 12.1 or newer) on PATH and run this again."
  elif [ -z "$gpu" ]; then
    export SKBUILD_CMAKE_DEFINE="${build_without_gpu:-BNB_FSDP_CUDA=OFF}"
    [ -n "${build_without_gpu:-}" ] || build_note="nvidia-smi shows no GPU, so that bnb_fsdp is built without its CUDA \
library (BNB_FSDP_CUDA=OFF). To build it all the same: SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=ON bash $0"
  fi
fi

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# The pinned versions need Python 3.11; say that before pip says it about the first package that does.
check_python_version() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$1 is Python $("$1" -c 'import platform; print(platform.python_version())'), but the versions in" \
      "launch/constraints.txt need 3.11 or newer. Put a newer python3 first on PATH, or activate an environment" \
      "that has one. (On 3.10, bnb_fsdp itself can be installed with: pip install .)"
}

make_environment() {
  made="$1/bin/python"
  if "$made" -m pip --version >/dev/null 2>&1; then
    return
  fi
  command -v python3 >/dev/null || die "there is no python3 on PATH; install Python 3.11 or newer."
  check_python_version python3
  say "making $1"
  python3 -m venv --clear "$1" ||
    die "python3 -m venv failed; on Debian and Ubuntu it is in the package python3-venv."
}

# The python of a Linux distribution that pip must not change (PEP 668), and that is no virtual environment.
is_managed_by_the_system='
import os, sys, sysconfig
marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
sys.exit(sys.prefix != sys.base_prefix or not os.path.exists(marker))
'

# The active environment if it has torch, which nobody wants to download twice; else .venv.
choose_environment() {
  local candidate version
  for candidate in python python3; do
    version="$("$candidate" -c 'import torch; print(torch.__version__)' 2>/dev/null)" || continue
    python="$("$candidate" -c 'import sys; print(sys.executable)')"
    if "$python" -c "$is_managed_by_the_system"; then
      continue
    fi
    check_python_version "$python"
    "$python" -c 'import sys, torch; sys.exit(torch.__version__ < (2, 11))' ||
      die "the active environment ($python) has torch $version, but bnb_fsdp needs 2.11 or newer." \
        "Upgrade it, or deactivate the environment: then .venv is made with the version in launch/constraints.txt."
    "$python" -m pip --version >/dev/null 2>&1 ||
      die "the active environment ($python) has no pip; add it with: $python -m ensurepip"
    say "using the active environment: $python, torch $version"
    return
  done
  make_environment "$repo/.venv"
  python="$made"
  say "using $python"
}

install_into() {
  local target="$1" constraints="$scratch/$2" torch
  shift 2
  cp "$repo/launch/$(basename "$constraints")" "$constraints"
  if [[ " $*" == *" $repo["* ]] && [ -n "$build_note" ]; then
    echo "note: $build_note"
    build_note=""
  fi
  # A torch that is there stays; the constraints' own version is for environments without one.
  if torch="$("$target" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)"; then
    sed -i.bak '/^torch==/d' "$constraints"
    echo "torch==$torch" >>"$constraints"
  fi
  # Both variables, as pip reads the versions for the build from PIP_CONSTRAINT before 25.3 and from the other since.
  PIP_CONSTRAINT="$constraints" PIP_BUILD_CONSTRAINT="$constraints" \
    "$target" -m pip install -qq --disable-pip-version-check --no-warn-script-location "$@"
}
