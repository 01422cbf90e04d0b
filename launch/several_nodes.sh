#!/usr/bin/env bash
# Several nodes without a scheduler: the same command on each of them, in any order.
#
#   HEAD=node1:29400 NODES=2 bash launch/several_nodes.sh examples/full_finetune_accelerate.py --output /shared/run
#
# The nodes meet at HEAD; those that come early wait. Code, environment and data have to be on every node under the same
# path, and checkpoints in a folder that all nodes share. CHANGE here or set before the command, alike on every node:
#   HEAD             name or address of one of the nodes, as the others reach it, and a free port there
#   NODES            how many nodes
#   PROCESSES        processes on each node; left out: one for each GPU, or one on the CPU
#   RUN_ID           tells this run from another with the same HEAD; left out: bnb_fsdp
#   OMP_NUM_THREADS  CPU threads of each process; left out: an equal share of the cores
#   NODE_ADDRESS     this node's own address, for networks where its host name does not lead the others to it
#   PYTHON           the interpreter
# If NCCL takes the wrong network: export NCCL_SOCKET_IFNAME=eth0 (your interface); NCCL_DEBUG=INFO shows its choice.

set -euo pipefail

if [ $# -lt 1 ] || [ -z "${HEAD:-}" ] || [ -z "${NODES:-}" ]; then
  sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
python="${PYTHON:-python3}"
if ! gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"; then
  echo "error: $python cannot import torch. Activate the environment that has bnb_fsdp, such as the one that" >&2
  echo "launch/quickstart.sh makes (source .venv/bin/activate), or name its interpreter: PYTHON=.venv/bin/python." >&2
  exit 2
fi
processes="${PROCESSES:-$((gpus > 0 ? gpus : 1))}"
cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"

exec "$python" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$processes" \
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="${RUN_ID:-bnb_fsdp}" \
  ${NODE_ADDRESS:+--local-addr="$NODE_ADDRESS"} "$@"
