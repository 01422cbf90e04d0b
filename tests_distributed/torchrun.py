"""Runs a command that starts ranks of its own (torchrun), with a time limit that holds for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def _descendants(pid: int) -> list[int]:
    """Processes below ``pid``: torchrun's ranks are in sessions of their own, out of reach of killpg."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        queue += parents.get(queue[0], [])
        found.append(queue.pop(0))
    return found[1:]


def run(command: Sequence[str], environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Exit status (None if it took longer than ``timeout`` seconds; everything is killed then) and all output."""
    # A file, not a pipe: whoever is left over would keep a pipe open, and its reader waiting.
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        status: int | None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
            for pid in [process.pid, *_descendants(process.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
        log.seek(0)
        return status, log.read()
