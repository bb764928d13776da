"""Modelled times, for a GPU that is not there. Never to be shown as measured ones.

A GEMM takes what the occupancy model says for its configuration; a vendor's library is taken to have the best
configuration there is, and Triton's templates to come close. A pointwise kernel takes its memory traffic and a launch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram, OperandKind
from .kernel import Candidate
from .occupancy import model_of
from .targets import Target

LAUNCH_US = 3.0
TRITON_FACTOR = 1.05
"""How much longer a Triton template is taken to need than the best kernel there is."""


def gemm_us(problem: Problem, candidates: Iterable[Candidate], program: EpilogueProgram, target: Target) -> float:
    """The fastest of `candidates` with `program` as its epilogue."""
    return min(model_of(target).us(problem, candidate, program) for candidate in candidates)


def pointwise_us(problem: Problem, program: EpilogueProgram, dtype: torch.dtype, target: Target) -> float:
    """The same work as a kernel of its own: reads the product, in `dtype`, and the operands, and writes the stores."""
    product = problem.m * problem.n * dtype.itemsize
    return read_us(problem, program, target) + traffic_us(product + operand_bytes(problem, program), target)


def read_us(problem: Problem, program: EpilogueProgram, target: Target) -> float:
    """A kernel that reads what `program` has stored."""
    stored = sum(problem.m * problem.n * store.dtype.itemsize for store in program.stores)
    return LAUNCH_US + traffic_us(stored, target)


def fill_us(problem: Problem, tiles: int, dtype: torch.dtype, target: Target) -> float:
    """A kernel that writes `tiles` tensors (M, N) of `dtype`, which would not be written otherwise."""
    return LAUNCH_US + traffic_us(problem.m * problem.n * tiles * dtype.itemsize, target)


def operand_bytes(problem: Problem, program: EpilogueProgram) -> int:
    """The bytes of a program's operands, each read once."""
    elements = {
        OperandKind.TILE: problem.m * problem.n,
        OperandKind.ROW: problem.n,
        OperandKind.COLUMN: problem.m,
        OperandKind.SCALAR: 1,
        OperandKind.NUMBER: 0,
    }
    return sum(elements[operand.kind] * operand.dtype.itemsize for operand in program.operands)


def traffic_us(size: int, target: Target) -> float:
    """Moving `size` bytes through device memory."""
    return size / (target.copy_tb_s * 1e6)
