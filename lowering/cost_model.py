"""Modelled times, for a GPU that is not there. Never to be shown as measured ones.

A kernel takes the longer of its arithmetic and its memory traffic, plus a launch. The efficiency of a candidate is
nvMatmulHeuristics' estimate for its tile and cluster, as far as that has one. The model ranks; it is not tuned to
reproduce any measurement.
"""

from __future__ import annotations

import torch

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram, OperandKind
from .heuristics import estimates
from .kernel import Candidate
from .targets import Target

LAUNCH_US = 3.0
TRITON_FACTOR = 1.05
"""How much longer a Triton template is taken to need than the best kernel there is."""
UNRATED_EFFICIENCY = 0.75
"""How much of the roofline a kernel reaches where the heuristics have no estimate at all."""


def roofline_us(problem: Problem, output_bytes: int, target: Target) -> float:
    """The least time that the arithmetic, or reading A and B and writing the output once, can take."""
    arithmetic = problem.flops / (target.dense_tflops * 1e6)
    return max(arithmetic, traffic_us(problem.input_bytes + output_bytes, target))


def gemm_us(problem: Problem, output_bytes: int, target: Target, candidate: Candidate | None = None) -> float:
    """A plain GEMM: of `candidate`, or of the best kernel there is (what a vendor's library is taken to have).

    A candidate that the heuristics do not rate comes from the supplement, and is taken to be as good as the best.
    """
    floor = roofline_us(problem, output_bytes, target)
    rated = [estimate for swap_ab in (False, True) for estimate in estimates(problem, target, swap_ab)]
    us = min((estimate.us for estimate in rated), default=floor / UNRATED_EFFICIENCY)
    if candidate is not None:
        shape = (candidate.tile_m, candidate.tile_n, candidate.cluster_m, candidate.cluster_n)
        same = estimates(problem, target, candidate.swap_ab)
        us = next((e.us for e in same if (e.tile_m, e.tile_n, e.cluster_m, e.cluster_n) == shape), us)
    return LAUNCH_US + max(floor, us)


def epilogue_us(problem: Problem, program: EpilogueProgram, target: Target) -> float:
    """What an epilogue adds to its GEMM: the operands that it reads. Its arithmetic hides behind the stores."""
    return traffic_us(operand_bytes(problem, program), target)


def pointwise_us(problem: Problem, program: EpilogueProgram, dtype: torch.dtype, target: Target) -> float:
    """The same work as a kernel of its own: reads the product, in `dtype`, and the operands, and writes the stores."""
    product = problem.m * problem.n * dtype.itemsize
    stored = sum(problem.m * problem.n * store.dtype.itemsize for store in program.stores)
    return LAUNCH_US + traffic_us(product + stored + operand_bytes(problem, program), target)


def operand_bytes(problem: Problem, program: EpilogueProgram) -> int:
    """The bytes of a program's operands, each read once."""
    elements = {
        OperandKind.TILE: problem.m * problem.n,
        OperandKind.ROW: problem.n,
        OperandKind.COLUMN: problem.m,
        OperandKind.SCALAR: 1,
    }
    return sum(elements[operand.kind] * operand.dtype.itemsize for operand in program.operands)


def traffic_us(size: int, target: Target) -> float:
    """Moving `size` bytes through device memory."""
    return size / (target.copy_tb_s * 1e6)
