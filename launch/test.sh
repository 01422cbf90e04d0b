#!/usr/bin/env bash
# Set up and run all tests: with the versions of constraints.txt, then the transformers tests with transformers 4.
#
#   bash launch/test.sh [pytest arguments]      SKIP_TRANSFORMERS4=1 leaves the second part out

# Without a GPU the CUDA sources are compiled all the same if there is a compiler, so that mistakes in them show.
build_without_gpu="BNB_FSDP_CUDA=AUTO;BNB_FSDP_CUDA_ARCHITECTURES=90"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

summary=()
status=0

# record NAME COMMAND...: run it, go on after a failure, remember both.
record() {
  local name="$1" began="$SECONDS" result=0
  shift
  "$@" || result=$?
  if [ "$result" -eq 0 ]; then
    summary+=("passed  $((SECONDS - began)) s  $name")
  else
    summary+=("FAILED  $((SECONDS - began)) s  $name (exit status $result)")
    status=1
  fi
}

# From an empty folder, so that the installed package with its libraries is tested and not the source beside it.
run_pytest() {
  local interpreter="$1"
  shift
  mkdir -p "$scratch/empty"
  (cd "$scratch/empty" && "$interpreter" -m pytest --rootdir "$repo" -c "$repo/pyproject.toml" "$@")
}

transformers4() {
  make_environment "$repo/.venv-transformers4"
  SKBUILD_CMAKE_DEFINE="BNB_FSDP_CUDA=OFF"  # once is enough
  install_into "$made" constraints-transformers4.txt "$repo[test,hf]"
  run_pytest "$made" "$repo/tests/test_transformers.py" "$repo/tests/test_enums.py" \
    "$repo/tests_distributed/test_trainer_fsdp2.py" "$repo/tests_distributed/test_resume.py" "$@"
}

# The end of the tests with transformers 4, which ran beside the others, and what they said.
transformers4_result() {
  local result=0
  wait "$four" || result=$?
  four=""
  cat "$scratch/transformers4.log"
  return "$result"
}

choose_environment
say "installing bnb_fsdp and what its tests need (a minute or two the first time)"
install_into "$python" constraints.txt "$repo[test,hf,bitsandbytes]"
four=""
if [ "${SKIP_TRANSFORMERS4:-}" = 1 ]; then
  summary+=("skipped      transformers 4 (SKIP_TRANSFORMERS4=1)")
else
  say "meanwhile: transformers 4 in .venv-transformers4, whose tests are reported after the others"
  trap '[ -z "$four" ] || kill -- "-$four" 2>/dev/null; rm -rf "$scratch"' EXIT
  set -m  # a process group of its own, to be ended as one
  transformers4 "$@" >"$scratch/transformers4.log" 2>&1 &
  four=$!
  set +m
fi
say "tests"
record "tests" run_pytest "$python" "$repo/tests" "$repo/tests_distributed" "$@"
if [ -n "$four" ]; then
  say "tests with transformers 4"
  record "transformers 4, beyond the other tests" transformers4_result
fi

say "summary"
printf '%s\n' "${summary[@]}"
exit "$status"
