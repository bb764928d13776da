"""Recording: a block in which everything that is compiled is decided by us and written to a log.

For tools and tests that want decisions rather than speed: the flag is on, no cache of Inductor hides a GEMM, and
where there is no GPU of the target, the virtual device stands in for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..lowering.targets import TARGETS, current_target
from .virtual_device import virtual_device


def is_here(target: str) -> bool:
    """Whether the current CUDA device is the GPU `target` (a key of `TARGETS`)."""
    here = current_target()
    return bool(here) and here.name == target


@contextlib.contextmanager
def recording(log: Path, target: str = "H200", **settings: Any) -> Iterator[None]:
    """Logs the decisions of the block to `log`. `settings`: further entries of `torch._inductor.config`.

    Raises KeyError for a target that is not known.
    """
    from torch._inductor import config

    TARGETS[target]
    device = contextlib.nullcontext() if is_here(target) else virtual_device(target)
    entries = {
        "max_autotune_gemm": True,
        "nvgemm_epilogue_fusion": True,
        "nvgemm_fusion_log": str(log),
        "nvgemm_fusion_cache": False,
        "fx_graph_cache": False,
        **settings,
    }
    torch._dynamo.reset()
    try:
        with config.patch(entries), torch._functorch.config.patch(enable_autograd_cache=False), device:
            yield
    finally:
        torch._dynamo.reset()
