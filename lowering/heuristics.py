"""nvMatmulHeuristics: what the vendor's model thinks a tile and a cluster will cost for a problem.

The model knows plain CUTLASS 3 kernels. A kernel with swapped operands is asked for as the transposed problem.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass

import torch

from ..fusion.problem import Problem
from ..fusion.program import Major
from .targets import Target

logger = logging.getLogger("nvgemm_fusion")

ANSWERS = 48
"""How many configurations to ask for: enough to reach every tile that a provider has."""

_PRECISIONS = {torch.float16: "HSH", torch.bfloat16: "TST", torch.float32: "SFS"}
"""The model's letters for (A and B, computation, D): H half, T bfloat16, S single, F TF32 on tensor cores."""


@dataclass(frozen=True)
class Estimate:
    """A modelled time in microseconds for one block tile and cluster, in the kernel's own orientation."""

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    us: float


@functools.lru_cache(maxsize=4096)
def estimates(problem: Problem, target: Target, swap_ab: bool = False) -> tuple[Estimate, ...]:
    """The model's configurations for `problem`, fastest first; none where it has no answer (or is not installed)."""
    model = _model(target.heuristics_name)
    precision = _PRECISIONS.get(problem.dtype)
    if model is None or precision is None:
        return ()
    interface, backend, layouts = model
    a, b = ("T" if problem.a_major is Major.ROW else "N"), ("N" if problem.b_major is Major.COLUMN else "T")
    m, n = problem.m, problem.n
    if swap_ab:  # D' = B' A': the transposed B is the first operand
        a, b = ("T" if b == "N" else "N"), ("N" if a == "T" else "T")
        m, n = n, m
    layout = layouts[f"{a}{b}_{'COL' if swap_ab else 'ROW'}_MAJOR"]
    try:
        query = interface.makeNvMatmulHeuristicsProblem(m, n, problem.k, layout, 1)
        answers = interface.getEx(query, ANSWERS, backend, precision=precision)
    except Exception as error:  # a closed-source model; without its answer, the order is ours
        logger.warning("nvMatmulHeuristics has no answer for %s: %s", problem, error)
        return ()
    best: dict[tuple[int, int, int, int], float] = {}
    for answer in answers:
        kernel = answer["kernel"]
        if kernel.split_k == 1:
            key = (kernel.cta_tile_m, kernel.cta_tile_n, kernel.cluster_m, kernel.cluster_n)
            best[key] = min(best.get(key, float("inf")), answer["runtime"] * 1e6)
    return tuple(sorted((Estimate(*key, us) for key, us in best.items()), key=lambda estimate: estimate.us))


@functools.lru_cache(maxsize=None)
def _model(gpu: str) -> tuple | None:
    """The interface, its CUTLASS 3 backend and its enum of layouts for one GPU."""
    try:
        import nvMatmulHeuristics as library

        target = library.NvMatmulHeuristicsTarget.CUTLASS3
        interface = library.NvMatmulHeuristicsInterfaceEx(
            backend=target,
            flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=library.NvMatmulHeuristicsNvidiaGpu[gpu],
            load_discovery_implicitly=True,
        )
        return interface, interface.createBackend(target), library.NvMatmulHeuristicsMatmulLayout
    except (ImportError, KeyError, OSError, RuntimeError, ctypes.ArgumentError) as error:
        logger.warning("candidates are ranked without nvMatmulHeuristics: %s", error)
        return None
