"""Compiles kernels in a process of its own: `python -m nvgemm_fusion.lowering.compile_worker`.

One request a line on standard input, one answer a line on standard output, both JSON:

    {"spec": {...}, "object": "/path/to/write.o"}  ->  {"ok": true, "seconds": 1.3}
                                                    or {"ok": false, "error": "..."}

The process sees no GPU (its parent hides it) and makes no CUDA context: kernels are compiled for the architecture
that the spec names, against fake tensors. What the compilers print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time

from .kernel import KernelSpec
from .providers import compile_kernel


def main() -> None:
    """Serves requests until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            compile_kernel(KernelSpec.from_json(request["spec"]), request["object"])
            answer = {"ok": True, "seconds": time.perf_counter() - started}
        except Exception as error:  # a compiler may raise anything; the candidate is out, the process is not
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
