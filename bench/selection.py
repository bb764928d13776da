"""Selection: which decisions of a log somebody wants to see."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..fusion.decision import Backend
from ..fusion.log import Outline
from ..fusion.reasons import Reason


@dataclass(frozen=True)
class Selection:
    """A decision is selected when everything that is set here holds.

    reason: one of `Reason`, at the decision or at one of its alternatives. backend: of the chosen alternative. shape:
    M, N and K, None for any. fused: whether an epilogue was chosen. speedup: the least ratio of the best unfused
    time to the chosen one's.
    """

    reason: str | None = None
    backend: str | None = None
    shape: tuple[int | None, int | None, int | None] = (None, None, None)
    fused: bool | None = None
    speedup: float | None = None

    @classmethod
    def of(
        cls,
        reason: str | None = None,
        backend: str | None = None,
        shape: str | None = None,
        fused: bool | None = None,
        speedup: float | None = None,
    ) -> Selection:
        """From what somebody typed; shape is "256x14336x4096" with * for any. Raises ValueError for what cannot be."""
        if reason is not None and reason not in {known.value for known in Reason}:
            raise ValueError(f"no reason {reason!r}: one of {', '.join(sorted(known.value for known in Reason))}")
        if backend is not None and backend.upper() not in Backend.__members__:
            raise ValueError(f"no backend {backend!r}: one of {', '.join(Backend.__members__)}")
        sizes = (None, None, None) if shape is None else _sizes(shape)
        return cls(reason, None if backend is None else backend.upper(), sizes, fused, speedup)

    def __contains__(self, outline: Outline) -> bool:
        problem, alternatives = outline.problem, outline.alternatives
        if self.fused not in (None, outline.fused) or (self.speedup or 0.0) > (outline.speedup or 0.0):
            return False
        sizes = (None, None, None) if problem is None else (problem.m, problem.n, problem.k)
        if any(wanted not in (None, size) for wanted, size in zip(self.shape, sizes)):
            return False
        chosen = None if outline.chosen is None else alternatives[outline.chosen].backend
        if self.backend not in (None, chosen):
            return False
        return self.reason is None or any(part.reason == self.reason for part in (*outline.refusals, *alternatives))


def _sizes(shape: str) -> tuple[int | None, int | None, int | None]:
    if not re.fullmatch(r"(\d+|\*)x(\d+|\*)x(\d+|\*)", shape):
        raise ValueError(f"no shape {shape!r}: write MxNxK, with * for any size, as in 256x*x4096")
    m, n, k = (None if size == "*" else int(size) for size in shape.split("x"))
    return m, n, k
