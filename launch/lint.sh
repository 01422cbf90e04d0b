#!/usr/bin/env bash
# Check format, lint and types, in the environment that test.sh uses.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

choose_environment
install_into "$python" constraints.txt ruff mypy clang-format
cd "$repo"
bin="$(dirname "$python")"
status=0
say "ruff" && "$bin/ruff" format --check . && "$bin/ruff" check . || status=1
say "mypy" && "$python" -m mypy || status=1
say "clang-format"
find bnb_fsdp/csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.c' |
  xargs -r "$bin/clang-format" --dry-run -Werror || status=1
exit "$status"
