"""What can be said of ``libbnb_fsdp_cuda`` without a GPU: its tables, its interface, its errors."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch

from bnb_fsdp import codebook
from bnb_fsdp.backends import cuda, native

try:
    cuda.library()
except native.LibraryError as missing:
    pytest.skip(f"the CUDA library is not built: {missing}", allow_module_level=True)

SIGNED, UNSIGNED = 8192, 4096


def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(signed entries, unsigned entries, values) as the kernels get them."""
    memory = np.zeros(cuda.library().maps_bytes(), dtype=np.uint8)
    assert cuda.library().maps(memory.ctypes.data) == 0
    words = memory.view(np.uint32)
    values = words[SIGNED + UNSIGNED : SIGNED + UNSIGNED + 512].view(np.float32).reshape(2, 256)
    return words[:SIGNED], words[SIGNED : SIGNED + UNSIGNED], values


def encoded(x: np.ndarray, signed: bool) -> np.ndarray:
    """The kernels' look-up (csrc/cuda/encode_table.h), in numpy."""
    bits = (x * np.float32(1024)).view(np.uint32)
    # Truncation to float16, of which sign, exponent and seven bits of mantissa are the index.
    exponent = np.maximum((bits >> 23 & 255).astype(np.int64) - 127 + 15, 0)
    mantissa = np.where(exponent == 0, 0, bits >> 16 & 127)
    index = (bits >> 31).astype(np.int64) << 12 | exponent << 7 | mantissa
    entries = tables()[0 if signed else 1]
    count = np.maximum((entries[index] + bits).view(np.int32), 0) >> 16 & 255
    if not signed:
        return count
    return np.where(bits >> 31 == 1, 126 - count, 127 + count) & 255


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_the_tables_give_the_nearest_code(signed: bool) -> None:
    values = np.array(codebook.dynamic_map(signed), dtype=np.float32)
    assert np.array_equal(tables()[2][int(signed)], values)
    middles = ((values[:-1] + values[1:]) * np.float32(0.5)).astype(np.float32)
    near = np.concatenate([values, middles])
    generator = np.random.default_rng(0)
    spread = generator.uniform(-1, 1, 500_000) * 10 ** generator.uniform(-40, 0, 500_000)
    x = np.concatenate([near, np.nextafter(near, np.float32(2)), np.nextafter(near, np.float32(-2)), spread])
    x = x.astype(np.float32)[np.abs(x) <= 1 + 1e-6]
    x = x if signed else np.abs(x)
    wanted = codebook.nearest_code(torch.from_numpy(x), signed).numpy().astype(np.int64)
    if signed:  # a negative value is never coded as zero
        wanted = np.where((wanted == 127) & np.signbit(x), 126, wanted)
    wrong = np.flatnonzero(encoded(x, signed) != wanted)
    assert wrong.size == 0, [(x[i], wanted[i], encoded(x, signed)[i]) for i in wrong[:5]]


def test_it_says_what_it_was_built_with() -> None:
    assert re.fullmatch(r"nvcc \d+\.\d+\.\d+, architectures .*\d", cuda.library().native.build_info())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_calls_fail_with_cudas_reason() -> None:
    with pytest.raises(RuntimeError, match=r"no kernels for cuda:0: cuda:0: .*\(cudaError\w+\)"):
        cuda.check_device(torch.device("cuda", 0))
    handle = ctypes.c_void_p()
    status = cuda.library().bucket_create(b"adam", 8, 0, 0, None, 0, 1, 0, None, 0, ctypes.byref(handle))
    assert status != 0 and "cudaError" in cuda.library().last_error() and handle.value is None


def test_unknown_kernels_are_refused_with_the_choices() -> None:
    assert cuda.library().set_kernels(b"fastest") != 0
    assert cuda.library().last_error() == "kernels fastest are not known; choose auto or portable"
    assert cuda.library().set_kernels(b"auto") == 0
