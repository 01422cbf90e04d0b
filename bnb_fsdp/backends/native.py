"""Finds and loads the native libraries. Knows nothing of torch, so any supported Python can test it alone."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ABI_VERSION = 6
MAX_STATES = 3
DIRECTORY_VARIABLE = "BNB_FSDP_LIBRARY_PATH"


class LibraryError(RuntimeError):
    """A native library is missing or was built for another version of this package."""


class Hyper(ctypes.Structure):
    """``bnb_fsdp_hyper`` of csrc/c_api.h."""

    _fields_ = [
        *(
            (name, ctypes.c_float)
            for name in ("lr", "beta1", "beta2", "beta3", "alpha", "eps", "weight_decay")
        ),
        ("flags", ctypes.c_int32),
    ]


def hyper(values: Any) -> Hyper:
    """A `bnb_fsdp.rules.Hyper` for the libraries."""
    return Hyper(*values[:7], int(values.skip_zeros) | int(values.published) << 1)


class TensorEntry(ctypes.Structure):
    """``bnb_fsdp_tensor`` of csrc/c_api.h."""

    _fields_ = [
        ("parameter", ctypes.c_void_p),
        ("state", ctypes.c_void_p * MAX_STATES),
        ("absmax", ctypes.c_void_p * MAX_STATES),
        ("step", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("group", ctypes.c_int64),
    ]


class NativeLibrary:
    """A loaded library: its path, and its functions with argument types set.

    Functions that return a status raise RuntimeError with the library's message when it is not 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.bnb_fsdp_abi_version.restype = ctypes.c_int
            version = self._library.bnb_fsdp_abi_version()
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{path} cannot be loaded: {error}. {_remedy(path)}.") from error
        if version != ABI_VERSION:
            raise LibraryError(
                f"{path} has interface version {version}, this package needs {ABI_VERSION}. {_remedy(path)}."
            )
        self._last_error = self.function("bnb_fsdp_last_error", ctypes.c_char_p)

    def function(self, name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
        """The C function ``name`` as it is."""
        function: Callable[..., Any] = getattr(self._library, name)
        function.restype, function.argtypes = restype, argtypes  # type: ignore[attr-defined]
        return function

    def checked(self, name: str, *argtypes: Any) -> Callable[..., None]:
        """The C function ``name``, which returns a status; a failure raises RuntimeError."""
        function = self.function(name, ctypes.c_int, *argtypes)

        def call(*arguments: Any) -> None:
            if function(*arguments) != 0:
                raise RuntimeError(f"{name}: {self.last_error()}")

        return call

    def last_error(self) -> str:
        """The message of this thread's last failure."""
        return str(self._last_error().decode())

    def build_info(self) -> str:
        """Compiler and target."""
        return str(self.function("bnb_fsdp_build_info", ctypes.c_char_p)().decode())


def _directories() -> list[Path]:
    """Where a library may lie: a directory given by hand, the package, an editable install's site-packages."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return [Path(given)]
    package = Path(__file__).resolve().parent.parent
    sites = {sysconfig.get_path("platlib"), sysconfig.get_path("purelib")}
    return [package / "lib", *(Path(site) / package.name / "lib" for site in sorted(sites))]


def _remedy(path: Path) -> str:
    """What gives the library ``path``."""
    if path.name == "libbnb_fsdp_cuda.so":
        # 12.1: see csrc/cuda/CMakeLists.txt.
        return (
            "To build it, put nvcc (CUDA 12.1 or newer) on PATH and run, in bnb_fsdp's source folder, "
            "`SKBUILD_CMAKE_DEFINE=BNB_FSDP_CUDA=ON pip install --force-reinstall --no-deps .`"
        )
    return "Reinstall bnb_fsdp with a C++ compiler (GCC or Clang) at hand"


def find(name: str) -> Path | None:
    """Where the library ``libbnb_fsdp_<name>.so`` lies, None if nowhere."""
    paths = (directory / f"libbnb_fsdp_{name}.so" for directory in _directories())
    return next((path for path in paths if path.is_file()), None)


@cache
def load(name: str) -> NativeLibrary:
    """The library ``libbnb_fsdp_<name>.so``; LibraryError with the places searched and the remedy if missing."""
    path = find(name)
    if path is not None:
        return NativeLibrary(path)
    places = ", ".join(str(directory) for directory in dict.fromkeys(_directories()))
    missing = Path(f"libbnb_fsdp_{name}.so")
    raise LibraryError(
        f"the native library {missing} is missing (searched {places}). {_remedy(missing)}, or set "
        f"{DIRECTORY_VARIABLE} to its directory."
    )
