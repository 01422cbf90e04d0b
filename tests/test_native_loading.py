"""The native library loads and steps from every Python found; it needs no torch, so they do not have to have it."""

from __future__ import annotations

from pathlib import Path

from interpreters import every_python, run_script

from bnb_fsdp.backends import native

SCRIPT = """
import array, ctypes, importlib.util, math, sys
spec = importlib.util.spec_from_file_location("native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
library = native.load("cpu")
assert "gcc" in library.build_info() or "clang" in library.build_info()

n = 300
parameter, gradient = array.array("f", [1.0] * n), array.array("f", [0.5] * n)
codes = [array.array("B", [0] * n) for _ in range(2)]
scales = [array.array("f", [0.0] * 2) for _ in range(2)]
step = array.array("f", [0.0])
address = lambda values: values.buffer_info()[0]
entry = native.TensorEntry(parameter=address(parameter), step=address(step), numel=n, group=0)
for i in range(2):
    entry.state[i], entry.absmax[i] = address(codes[i]), address(scales[i])
entries = (native.TensorEntry * 1)(entry)
gradients = (ctypes.c_void_p * 1)(address(gradient))
hypers = (native.Hyper * 1)(native.Hyper(0.1, 0.9, 0.999, 0, 0, 1e-8, 0.0))
call = library.checked("bnb_fsdp_cpu_step", ctypes.c_char_p, *[ctypes.c_int] * 3, *[ctypes.c_void_p] * 2,
                       ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int] * 2)
call(b"adam", 8, 0, 0, entries, gradients, 1, hypers, 1, None, 1, 0)
assert step[0] == 1.0
# The first Adam step has the size of lr, whatever the gradient.
assert all(math.isclose(value, 0.9, rel_tol=1e-5) for value in parameter), parameter[:3]
assert all(math.isclose(scale, 0.05, rel_tol=1e-6) for scale in scales[0])
try:
    call(b"nothing", 8, 0, 0, entries, gradients, 1, hypers, 1, None, 1, 0)
except RuntimeError as error:
    assert "no kernel for rule nothing" in str(error)
else:
    raise AssertionError("no error")
assert step[0] == 1.0
"""


@every_python
def test_library_loads_steps_and_reports_errors(python: str, tmp_path: Path) -> None:
    directory = str(native.load("cpu").path.parent)
    run_script(python, SCRIPT, tmp_path, native.__file__, **{native.DIRECTORY_VARIABLE: directory})
