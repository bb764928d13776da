"""Compiles kernels in a process of its own: `python -m nvgemm_fusion.lowering.compile_worker`.

    {"spec": {...}, "object": "/path/to/write.o"}  ->  {"ok": true, "seconds": 1.3}
                                                    or {"ok": false, "error": "..."}

The process sees no GPU (its parent hides it) and makes no CUDA context: kernels are compiled for the architecture
that the spec names, against fake tensors.
"""

from __future__ import annotations

import time

from ..fusion.reasons import described
from .kernel import KernelSpec
from .providers import compile_kernel
from .worker import Message, serve


def answer(request: Message) -> Message:
    """Compiles one kernel."""
    started = time.perf_counter()
    try:
        compile_kernel(KernelSpec.from_json(request["spec"]), request["object"])
    except Exception as error:  # a compiler may raise anything; the candidate is out, the process is not
        return {"ok": False, "error": described(error, limit=2000)}
    return {"ok": True, "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    serve(answer)
