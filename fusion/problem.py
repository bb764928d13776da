"""Problem: one GEMM, as far as kernels and their ranking see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .program import Major, dtype_name
from .reasons import Reason, Refusal

GEMM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of A and B. With float32 there is a problem only where torch allows TF32, to which its kernels round A and B."""
ALIGNMENT_BYTES = 16
"""What the tensor memory accelerator asks of a base address and of every stride but the unit one."""
LARGEST_INDEX = 2**31 - 1
"""Of an element, counted from the start of its tensor: no kernel was ever tried beyond 32 bits."""


@dataclass(frozen=True)
class MatrixLayout:
    """How a two-dimensional tensor lies in memory: which index is contiguous, and how far its lines are apart."""

    major: Major
    leading: int
    """Elements from one row (column-major: one column) to the next."""

    @property
    def strides(self) -> tuple[int, int]:
        """Element strides (of rows, of columns)."""
        return (self.leading, 1) if self.major is Major.ROW else (1, self.leading)

    @classmethod
    def of(cls, size: tuple[int, int], strides: tuple[int, int], offset: int, itemsize: int) -> MatrixLayout | Refusal:
        """The layout of a (rows, columns) tensor `offset` elements into its buffer, or why no kernel can read it.

        The stride of a dimension of size 1 means nothing, so such a tensor gets one that is legal.
        """
        per_access = ALIGNMENT_BYTES // itemsize
        found = None
        for major, line in ((Major.ROW, 1), (Major.COLUMN, 0)):
            if strides[line] != 1 and size[line] != 1:
                continue
            shortest = -(-size[line] // per_access) * per_access
            leading = strides[1 - line] if size[1 - line] > 1 else shortest
            if leading >= size[line]:
                found = Refusal(Reason.ALIGNMENT, f"stride {leading}, offset {offset}, {itemsize} bytes each")
                if leading % per_access == 0 and offset % per_access == 0:
                    if (size[1 - line] - 1) * leading + size[line] > LARGEST_INDEX:
                        return Refusal(Reason.TOO_LARGE, f"a {size} tensor")
                    return cls(major, leading)
        return found if found is not None else Refusal(Reason.LAYOUT, f"strides {strides} of a {size} tensor")


@dataclass(frozen=True)
class Problem:
    """D[M, N] = A[M, K] @ B[K, N], accumulated in float32.

    A and B have one dtype, of `GEMM_DTYPES`. `a_major` is ROW when k is contiguous, `b_major` is COLUMN when k
    is contiguous (the layout of a transposed Linear weight). `target` is the compiler's name of the GPU
    architecture ("sm_90a").
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    a_major: Major
    b_major: Major
    target: str

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def input_bytes(self) -> int:
        """A and B, each read once."""
        return (self.m * self.k + self.k * self.n) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Plain data for the log."""
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "dtype": dtype_name(self.dtype),
            "a_major": self.a_major.value,
            "b_major": self.b_major.value,
            "accumulator": "float32",
            "target": self.target,
        }
