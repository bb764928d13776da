"""Gemm: a matrix product of Inductor's IR in the words of `fusion`, with the buffers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from ..fusion.problem import ALIGNMENT_BYTES, GEMM_DTYPES, MatrixLayout, Problem
from ..fusion.program import ACCUMULATOR, Operand, ProgramBuilder
from ..fusion.reasons import Reason, Refusal
from ..fusion.space import Access
from ..lowering.targets import Target
from .capture import BufferAccess, operand_of, starts_aligned

TF32_ROWS, TF32_SIZE = 16, 512
"""The least M, and the least N and K, with which cuBLAS and Inductor's templates use TF32 where it is allowed (the
templates: `torch/_inductor/template_heuristics/triton.py`). A smaller product stays as exact as theirs."""


@dataclass(frozen=True)
class Matrix:
    """A (rows, columns) tensor in a buffer: what A and B are."""

    buffer: str
    size: tuple[int, int]
    layout: MatrixLayout
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Gemm:
    """`aten.mm` or `aten.addmm`: alpha * (A @ B) + beta * bias.

    product: where Inductor would keep the result, an (M, N) tensor. bias: None for mm and for beta == 0.
    """

    problem: Problem
    a: Matrix
    b: Matrix
    bias: BufferAccess | None
    bias_operand: Operand | None
    alpha: float
    beta: float

    @classmethod
    def of(
        cls, inputs: Sequence[Any], layout: ir.Layout, target: Target, alpha: float, beta: float
    ) -> Gemm | Refusal:
        """From the inputs of a GEMM's IR node ([bias,] A, B) and the layout of its result."""
        size = _sizes(layout.size)
        if size is None:
            return Refusal(Reason.SYMBOLIC_SHAPE, str(layout.size))
        if layout.device.type != "cuda":
            return Refusal(Reason.DEVICE, str(layout.device))
        a, b = (_matrix(node) for node in inputs[-2:])
        for matrix in (a, b):
            if not isinstance(matrix, Matrix):
                return matrix
        if a.dtype != b.dtype or layout.dtype not in GEMM_DTYPES:
            return Refusal(Reason.DTYPE, f"{a.dtype} @ {b.dtype} -> {layout.dtype}")
        if a.dtype == torch.float32 and (size[0] < TF32_ROWS or min(size[1], a.size[1]) < TF32_SIZE):
            return Refusal(Reason.DTYPE, f"{size} with K = {a.size[1]}: torch uses no TF32 for products this small")
        bias = operand = None
        if len(inputs) == 3 and beta != 0:
            access = _broadcast_access(inputs[0].get_layout())
            if access is None:
                return Refusal(Reason.SYMBOLIC_SHAPE, "the bias")
            access = access.over(size)
            bias = BufferAccess(inputs[0].get_name(), access)
            operand = operand_of(bias.buffer, access, size, inputs[0].get_dtype())
            if not isinstance(operand, Operand):
                return operand
        problem = Problem(*size, a.size[1], a.dtype, a.layout.major, b.layout.major, target.arch)
        return cls(problem, a, b, bias, operand, float(alpha), float(beta))

    @property
    def size(self) -> tuple[int, int]:
        """(M, N)."""
        return self.problem.m, self.problem.n

    def start(self, builder: ProgramBuilder) -> int:
        """The value of the product in `builder`: what the GEMM itself computes from its accumulator."""
        value = ACCUMULATOR
        if self.alpha != 1:
            value = builder.op("mul", value, builder.constant(self.alpha))
        if self.bias is not None:
            bias = builder.operand(self.bias, self.bias_operand)
            if self.beta != 1:
                bias = builder.op("mul", bias, builder.constant(self.beta))
            value = builder.op("add", value, bias)
        return value


def product_access(layout: ir.Layout) -> Access | None:
    """How the (M, N) result of a GEMM lies in its own buffer. None for sizes that are not known."""
    strides = _sizes(layout.stride)
    return None if strides is None else Access(*strides, 0)


def _broadcast_access(layout: ir.Layout) -> Access | None:
    """How a tensor of at most two dimensions lies under (M, N) when it is broadcast to it, as addmm does."""
    size, strides, offset = _sizes(layout.size), _sizes(layout.stride), _sizes([layout.offset])
    if size is None or strides is None or offset is None:
        return None
    moves = [stride if steps > 1 else 0 for stride, steps in zip(strides, size)]
    return Access(*[0] * (2 - len(moves)), *moves, *offset)


def _matrix(node: Any) -> Matrix | Refusal:
    layout = node.get_layout()
    size, strides, offset = _sizes(layout.size), _sizes(layout.stride), _sizes([layout.offset])
    name, dtype = node.get_name(), node.get_dtype()
    if size is None or strides is None or offset is None:
        return Refusal(Reason.SYMBOLIC_SHAPE, f"{name} is {list(layout.size)}")
    if len(size) != 2:
        return Refusal(Reason.UNSUPPORTED_OP, f"{name} has {len(size)} dimensions")
    if 0 in size:
        return Refusal(Reason.EMPTY, f"{name} is {size}")
    if dtype not in GEMM_DTYPES:
        return Refusal(Reason.DTYPE, f"{name} is {dtype}")
    # The setting that Inductor asks, too, and has in the keys of its caches. A decision that is kept on disk needs no
    # such key: it is never looked for when the GEMM is refused here.
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        allow = "torch.set_float32_matmul_precision('high') allows it"
        return Refusal(Reason.DTYPE, f"{name} is {dtype}, and float32 products need TF32: {allow}")
    if not starts_aligned(name):
        return Refusal(Reason.ALIGNMENT, f"{name} does not start at a multiple of {ALIGNMENT_BYTES} bytes")
    matrix_layout = MatrixLayout.of(size, strides, offset[0], dtype.itemsize)
    if not isinstance(matrix_layout, MatrixLayout):
        return Refusal(matrix_layout.reason, f"{name}: {matrix_layout.detail}")
    return Matrix(name, size, matrix_layout, offset[0], dtype)


def _sizes(values: Sequence[Any]) -> tuple[int, ...] | None:
    """As integers, or None when one is symbolic."""
    simplified = [V.graph.sizevars.simplify(sympy.sympify(value)) for value in values]
    return tuple(map(int, simplified)) if all(value.is_Integer for value in simplified) else None
