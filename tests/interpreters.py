"""The Python interpreters of this machine, for tests of what depends on the Python version but not on torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest


@cache
def interpreters() -> dict[str, str]:
    """Version -> executable, of CPython >= 3.10 on PATH and under pyenv, the running one first."""
    names = [sys.executable]
    names += [shutil.which(f"python3.{minor}") or "" for minor in range(10, 16)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    names += [str(path) for path in sorted(pyenv.glob("versions/*/bin/python"))]
    found: dict[str, str] = {}
    for name in filter(None, names):
        match = re.search(r"versions/(\d+)\.(\d+)\.\d+/", name)
        if match and (int(match[1]), int(match[2])) < (3, 10):
            continue
        try:
            code = "import platform; print(platform.python_implementation(), platform.python_version())"
            result = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        implementation, _, version = result.stdout.strip().partition(" ")
        # A name may be there without a Python behind it (pyenv's shims).
        if result.returncode == 0 and implementation == "CPython" and version:
            found.setdefault(version, name)
    return {version: name for version, name in found.items() if int(version.split(".")[1]) >= 10}


every_python = pytest.mark.parametrize(
    "python", [pytest.param(name, id=f"python-{version}") for version, name in interpreters().items()]
)


def run_script(python: str, script: str, folder: Path, *arguments: str, **environment: str) -> None:
    """Run ``script``, which must end well; PATH and ``environment`` are its environment, warnings are errors."""
    file = folder / "script.py"
    file.write_text(script)
    result = subprocess.run(
        [python, "-W", "error", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], **environment},
    )
    assert result.returncode == 0, result.stdout + result.stderr
