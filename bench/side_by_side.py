"""Side by side: one function compiled under several settings, in one process, and timed."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..fusion.decision import Timing
from ..scheduler_hooks.stopwatch import Stopwatch, mean_of

STOCK = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON", "nvgemm_epilogue_fusion": False}
ATEN = {**STOCK, "max_autotune_gemm_backends": "ATEN"}
FUSED = {**STOCK, "nvgemm_epilogue_fusion": True}
FRESH = {**FUSED, "nvgemm_fusion_cache": False}
"""With the flag on, and every contest held."""
FORCED = {**FUSED, "nvgemm_fusion_force": True}
FEWEST_PLACES, PLACES, ROUNDS, BUDGET_MS = 8, 32, 5, 2000
"""In how many places in memory the tensors lie, one after the other, with so many rounds in each: in the fewest in any
case, in more while there is time."""


def compiled(function: Callable, inputs: Sequence[torch.Tensor], settings: dict[str, Any]) -> Callable[..., Any]:
    """`function` compiled under `settings`, and run once. It keeps no gradients."""
    # A code object of its own: Dynamo keeps what it compiled with the code, and would hand it out again.
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    result = torch.compile(copy, dynamic=False, options=settings)
    with torch.no_grad():
        result(*inputs)
    return result


def timed(forms: Mapping[str, Callable[..., Any]], inputs: Sequence[torch.Tensor]) -> dict[str, Timing]:
    """The times of `forms` by name, of those that run: means over several places in memory, since where a weight lies
    changes them, and not all alike (see `scheduler_hooks.workload`)."""
    stopwatch = Stopwatch(ROUNDS, BUDGET_MS)
    places, windows = [], []
    deadline = time.monotonic() + BUDGET_MS / 1e3
    while len(places) < FEWEST_PLACES or (len(places) < PLACES and time.monotonic() < deadline):
        places.append([tensor.clone() for tensor in inputs] if places else inputs)  # and kept, so that no two are one
        runs = [functools.partial(form, *places[-1]) for form in forms.values()]
        windows.append(dict(zip(forms, stopwatch.time(runs))))
    return {name: time for name, time in mean_of(windows).items() if isinstance(time, Timing)}
