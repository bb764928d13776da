"""Compiles kernels in processes of its own: `python -m nvgemm_fusion.lowering.compile_worker`, which forks them.

    {"spec": {...}, "library": "/path/to/write.so"}  ->  {"ok": true, "seconds": 1.3}
                                                    or {"ok": false, "error": "..."}

The processes see no GPU (their parent hides it) and make no CUDA context: kernels are compiled for the architecture
that the spec names, against fake tensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any
from unittest import mock

import torch

from ..fusion.reasons import described
from .kernel import KernelSpec
from .providers import compile_kernel, import_compilers
from .worker import Message, serve_forks

NICENESS = 10
"""What is timed meanwhile comes first: a host that is late with its launches makes fast kernels look slow. So does what
Inductor compiles, since its choices are timed before ours."""


def answer(request: Message) -> Message:
    """Compiles one kernel."""
    started = time.perf_counter()
    try:
        compile_kernel(KernelSpec.from_json(request["spec"]), request["library"])
    except Exception as error:  # a compiler may raise anything; the candidate is out, the process is not
        return {"ok": False, "error": described(error, limit=2000)}
    return {"ok": True, "seconds": time.perf_counter() - started}


def import_without_inductor() -> None:
    """The imports of the compilers, in a third of the time.

    QuACK decorates functions of its own with `torch.compile` and `torch.compiler.disable`, and each of the two imports
    half of torch. Nothing here calls those functions.
    """
    with mock.patch.object(torch, "compile", _undecorated), mock.patch.object(torch.compiler, "disable", _undecorated):
        import_compilers()


def _undecorated(function: Any = None, *, recompile_limit: int | None = None, **_: Any) -> Any:
    """As a decorator, with options or without: the function itself. QuACK looks for the option that is named here, and
    where there is none imports Dynamo to set it there."""
    return _undecorated if function is None else function


if __name__ == "__main__":
    os.nice(NICENESS)
    with contextlib.suppress(Exception):  # which comes again with each kernel, and is reported there
        import_without_inductor()
    serve_forks(answer)
