"""Side by side: one function compiled under several settings, in one process."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

STOCK = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON", "nvgemm_epilogue_fusion": False}
ATEN = {**STOCK, "max_autotune_gemm_backends": "ATEN"}
FUSED = {**STOCK, "nvgemm_epilogue_fusion": True}
FRESH = {**FUSED, "nvgemm_fusion_cache": False}
"""With the flag on, and every contest held."""
FORCED = {**FUSED, "nvgemm_fusion_force": True}


def compiled(function: Callable, inputs: Sequence[torch.Tensor], settings: dict[str, Any]) -> Callable[..., Any]:
    """`function` compiled under `settings`, and run once. It keeps no gradients."""
    # A code object of its own: Dynamo keeps what it compiled with the code, and would hand it out again.
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    result = torch.compile(copy, dynamic=False, options=settings)
    with torch.no_grad():
        result(*inputs)
    return result
