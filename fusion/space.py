"""The (M, N) space of a GEMM's product, and what an access is in it.

A reader of the product walks over loops of its own choice: (M, N), the flattened M * N, or (B, S, N) with
B * S = M. It is pointwise over the product when those loops, through the index with which it reads the product,
visit every (m, n) once. `IterationSpace.from_product` decides that; afterwards every other access of the same
reader is `stride_m * m + stride_n * n + offset` or not a broadcast at all (`IterationSpace.access`).

The kind of an operand follows from those two strides, never from a shape: with M == N a shape says nothing, and a
bias often arrives as a stride-0 view of the full (M, N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .problem import ALIGNMENT_BYTES, MatrixLayout
from .program import Operand, OperandKind
from .reasons import Reason, Refusal


@dataclass(frozen=True)
class Loop:
    """A loop of `size` steps, each of which moves m (`axis` 0) or n (`axis` 1) by `step`."""

    size: int
    axis: int
    step: int


@dataclass(frozen=True)
class Access:
    """Element `stride_m * m + stride_n * n + offset` of a buffer."""

    stride_m: int
    stride_n: int
    offset: int

    def over(self, size: tuple[int, int]) -> Access:
        """The same elements for a product of `size` (M, N): along an axis of size 1 nothing moves."""
        return Access(self.stride_m if size[0] > 1 else 0, self.stride_n if size[1] > 1 else 0, self.offset)

    def operand(self, size: tuple[int, int], dtype: torch.dtype) -> Operand | Refusal:
        """The operand that a load with this access is over a product of `size` (M, N), or why it is none."""
        if self.stride_m == 0 and self.stride_n == 0:
            return Operand(OperandKind.SCALAR, dtype)
        if self.stride_m and self.stride_n:
            layout = MatrixLayout.of(size, (self.stride_m, self.stride_n), self.offset, dtype.itemsize)
            return Operand(OperandKind.TILE, dtype, layout.major) if isinstance(layout, MatrixLayout) else layout
        kind = OperandKind.COLUMN if self.stride_m else OperandKind.ROW
        if self.stride_m + self.stride_n != 1:
            return Refusal(Reason.LAYOUT, f"a {kind.value} operand with stride {self.stride_m + self.stride_n}")
        if self.offset * dtype.itemsize % ALIGNMENT_BYTES:
            return Refusal(Reason.ALIGNMENT, f"a {kind.value} operand at offset {self.offset}")
        return Operand(kind, dtype)


@dataclass(frozen=True)
class IterationSpace:
    """A reader's loops as moves over an (M, N) product of `size`."""

    size: tuple[int, int]
    loops: tuple[Loop, ...]

    @classmethod
    def from_product(
        cls, size: tuple[int, int], product_strides: tuple[int, int], loops: Sequence[tuple[int, int]]
    ) -> IterationSpace | None:
        """The space of a reader whose loops are (steps, stride in the product's buffer), or None.

        size and product_strides: the product's (M, N) shape and element strides. Loops of one step are left out
        beforehand, and one that runs over both axes is cut (`cut`). None when the loops do not visit each (m, n)
        exactly once.
        """
        placed = []
        for steps, stride in loops:
            axis = _axis(size, product_strides, steps, stride)
            if axis is None:
                return None
            placed.append(Loop(steps, axis, stride // product_strides[axis]))
        if all(_visits_each_once([loop for loop in placed if loop.axis == axis], size[axis]) for axis in (0, 1)):
            return cls(size, tuple(placed))
        return None

    def access(self, coefficients: Sequence[int], offset: int) -> Access | None:
        """The access of a load whose index moves by coefficients[i] per step of loop i; None for no broadcast.

        It is one when all loops of an axis agree on how far the index moves per unit of m (or n).
        """
        strides: list[int | None] = [None, None]
        for loop, coefficient in zip(self.loops, coefficients, strict=True):
            if coefficient % loop.step:
                return None
            stride = coefficient // loop.step
            if strides[loop.axis] not in (None, stride):
                return None
            strides[loop.axis] = stride
        return Access(strides[0] or 0, strides[1] or 0, offset)


def cut(size: tuple[int, int], product_strides: tuple[int, int], steps: int, stride: int) -> int | None:
    """How many inner steps of a loop stay on one axis when the loop runs over both, else None.

    A flattened loop of M * N steps over a dense product is (M outer, N inner): the answer is N.
    """
    inner = 1 if product_strides[1] <= product_strides[0] else 0
    outer = 1 - inner
    dense = product_strides[outer] == product_strides[inner] * size[inner]
    if not dense or stride == 0 or size[inner] == 1 or size[outer] == 1:
        return None
    if stride % product_strides[inner] or product_strides[outer] % stride or stride == product_strides[outer]:
        return None
    inner_steps = product_strides[outer] // stride
    return inner_steps if steps > inner_steps and steps % inner_steps == 0 else None


def _axis(size: tuple[int, int], product_strides: tuple[int, int], steps: int, stride: int) -> int | None:
    """The axis along which `steps` of `stride` elements stay inside the product."""
    for axis in sorted((0, 1), key=lambda axis: -product_strides[axis]):
        unit = product_strides[axis]
        if size[axis] > 1 and unit and stride % unit == 0 and stride and (stride // unit) * (steps - 1) < size[axis]:
            return axis
    return None


def _visits_each_once(loops: Sequence[Loop], size: int) -> bool:
    """True when the loops are the digits of a mixed-radix number that counts to `size`."""
    reached = 1
    for loop in sorted(loops, key=lambda loop: loop.step):
        if loop.step != reached:
            return False
        reached *= loop.size
    return reached == size
