"""Library: a kernel as a shared library, linked by the process that compiles it, and loaded by those that run it.

The compiler writes an object file. What loads one of those is a part of the compiler, too, whose import takes half a
second of each process that only runs the kernel; a shared library takes the dynamic linker a millisecond.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

EXPORTED_NAME = "func"
"""Of the function that a kernel's object file exports for TVM-FFI."""


def link(object_file: str, library: str, needed: Iterable[str]) -> None:
    """Links `object_file` to the shared library `library`, which asks for the libraries `needed` by their names.

    Raises RuntimeError when that fails. It takes a C compiler, as Triton does for its launchers.
    """
    found = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if found is None:
        raise RuntimeError("no C compiler to link kernels with: install gcc or clang, or set CC")
    # Bound to its own symbols: another kernel's have the same names.
    command = [*shlex.split(found), "-shared", "-Wl,-Bsymbolic", "-o", library, object_file, *needed]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"cannot link the kernel: {done.stderr.strip() or found}")


def load(library: Path) -> Callable[..., None]:
    """The function of a linked kernel, which keeps the library in memory. Raises what the dynamic linker says."""
    # Gone with its function: of a contest, one kernel stays.
    return loader().load_module(library, keep_module_alive=False).get_function(EXPORTED_NAME)


@functools.lru_cache(maxsize=None)
def loader() -> ModuleType:
    """TVM-FFI, and with it the library behind all kernels, which has to be there before one of them asks for it by its
    name. Raises OSError and ImportError where one is missing."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    if package is None:
        raise OSError("nvidia-cutlass-dsl is not installed")
    (folder,) = package.submodule_search_locations
    ctypes.CDLL(os.path.join(folder, "cu13", "lib", "libcute_dsl_runtime.so"))
    import tvm_ffi

    return tvm_ffi
