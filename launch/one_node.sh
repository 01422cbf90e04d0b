#!/usr/bin/env bash
# One node: a process for each GPU, or two on the CPU where there is none.
#
#   bash launch/one_node.sh examples/full_finetune_accelerate.py --steps 30
#   bash launch/one_node.sh -m bnb_fsdp run train.py --optim bnb_fsdp_adamw8bit
#
# Uses the active environment; Ctrl-C ends all processes. CHANGE here or set before the command:
#   PROCESSES        how many processes; left out: one for each GPU
#   OMP_NUM_THREADS  CPU threads of each; left out: an equal share of the cores. The optimizer step uses them where
#                    parameters are on the CPU (CPU offload).
#   PYTHON           the interpreter

set -euo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
python="${PYTHON:-python3}"
if ! gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"; then
  echo "error: $python cannot import torch. Activate the environment that has bnb_fsdp, such as the one that" >&2
  echo "launch/quickstart.sh makes (source .venv/bin/activate), or name its interpreter: PYTHON=.venv/bin/python." >&2
  exit 2
fi
processes="${PROCESSES:-$((gpus > 0 ? gpus : 2))}"
# torchrun would set 1 otherwise.
cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"

# --standalone takes a free port, so that two runs on one node do not collide.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$processes" "$@"
