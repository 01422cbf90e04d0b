#!/usr/bin/env bash
# Check format, lint and types, in the environment that test.sh uses (mypy reads torch's types there).

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

choose_environment
install_into "$python" constraints.txt ruff mypy clang-format
cd "$repo"

status=0
check() {
  say "$*"
  "$@" || status=1
}

check "$python" -m ruff format --check --quiet .
check "$python" -m ruff check .
check "$python" -m mypy
mapfile -t sources < <(find bnb_fsdp/csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')
say "clang-format of ${#sources[@]} files in bnb_fsdp/csrc"
"$(dirname "$python")/clang-format" --dry-run -Werror "${sources[@]}" || status=1
[ "$status" -eq 0 ] && say "format, lint and types are in order"
exit "$status"
