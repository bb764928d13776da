"""Decision: all alternatives of a region with their times or reasons, and the rule that picks one."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .reasons import Reason, Refusal

if TYPE_CHECKING:  # whoever only reads a log does without torch
    from .problem import Problem
    from .program import EpilogueProgram


UNSTEADY = 0.1
"""A spread of more than this part of the time itself says that the GPU was not ours alone."""


class Backend(str, enum.Enum):
    """Who computes an alternative, in the words of `config.max_autotune_gemm_backends`."""

    ATEN = "ATEN"
    TRITON = "TRITON"
    NVGEMM = "NVGEMM"
    OTHER = "OTHER"


class Status(str, enum.Enum):
    """Where the time of an alternative comes from. A modelled time is never shown as a measured one."""

    MEASURED = "measured"
    MODELLED = "modelled"
    PRUNED = "pruned"
    FAILED = "failed"


@dataclass(frozen=True)
class Timing:
    """A time in microseconds, and by how much it may be off (`spread`): of one window the median of its rounds and half
    their interquartile range, in a decision the mean of several windows (`mean`).
    """

    us: float
    spread: float = 0.0

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Timing:
        """From the times of the single rounds. Raises ValueError when there is none."""
        if not rounds:
            raise ValueError("a timing needs at least one round")
        if len(rounds) < 4:
            return cls(statistics.median(rounds), (max(rounds) - min(rounds)) / 2)
        lower, middle, upper = statistics.quantiles(rounds, n=4)
        return cls(middle, (upper - lower) / 2)

    def scaled(self, factor: float) -> Timing:
        """The time at another pace."""
        return Timing(factor * self.us, factor * self.spread)

    @classmethod
    def mean(cls, timings: Sequence[Timing]) -> Timing:
        """Of the same thing in several windows. Raises ValueError when there is none.

        Its spread is that within a window or that of the windows, whichever is larger, over the square root of their
        number: the standard error, if anything too large, since a median of ten rounds is known to 0.6 of their spread.
        Where windows are UNSTEADY, rounds are not independent, and no number of them helps.
        """
        if not timings:
            raise ValueError("a mean needs at least one timing")
        us = [timing.us for timing in timings]
        mean, within = statistics.fmean(us), statistics.fmean(timing.spread for timing in timings)
        if within > UNSTEADY * mean:
            return cls(mean, within)
        between = statistics.stdev(us) if len(us) > 1 else 0.0
        return cls(mean, max(within, between) / len(us) ** 0.5)


@dataclass(frozen=True)
class Alternative:
    """One complete way to compute a region.

    candidate: the kernel configuration, readable. fused and separate: which nodes run inside the GEMM's kernel and
    which in kernels of their own. epilogue: the digest of the program that a CuTe DSL kernel (or cuBLASLt's) carries,
    empty for a plain one (with `addmm`, a kernel may carry the bias or a residual without fusing any node). timing and
    status: what it costs; `refusal` says why it failed, was pruned or was not chosen. compile_s: seconds to compile the
    GEMM's kernel, 0 when it came from a cache.
    """

    backend: Backend
    candidate: str
    fused: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()
    epilogue: str = ""
    timing: Timing | None = None
    status: Status = Status.MEASURED
    refusal: Refusal | None = None
    compile_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for the log."""
        return {
            "backend": self.backend.value,
            "candidate": self.candidate,
            "fused": list(self.fused),
            "separate": list(self.separate),
            "epilogue": self.epilogue,
            "compile_s": round(self.compile_s, 3),
            "us": None if self.timing is None else round(self.timing.us, 3),
            "spread": None if self.timing is None else round(self.timing.spread, 3),
            "status": self.status.value,
            "reason": None if self.refusal is None else self.refusal.reason.value,
            "detail": "" if self.refusal is None else self.refusal.explanation,
        }


@dataclass(frozen=True)
class NodeOrigin:
    """Where a scheduler node comes from: the ATen operators behind it, and the lines of the user's program."""

    name: str
    operators: tuple[str, ...]
    source: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What was decided for one GEMM.

    `chosen` is an index into `alternatives`, or None when stock Inductor was left to choose by itself (then
    `refusals` says why). `programs`: the epilogue of each region, largest first, and of the GEMM alone. `nodes`:
    the GEMM and the members of the largest region; `edges`: who reads from whom among them and their neighbours, by
    the names of the nodes. target: the GPU model. from_cache: decided earlier, and not measured again.
    """

    graph: str
    gemm: str
    problem: Problem | None
    programs: tuple[EpilogueProgram, ...]
    alternatives: tuple[Alternative, ...]
    chosen: int | None
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[NodeOrigin, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    target: str = ""
    from_cache: bool = False
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def choice(self) -> Alternative | None:
        """The chosen alternative."""
        return None if self.chosen is None else self.alternatives[self.chosen]

    @property
    def fused(self) -> bool:
        """True when a kernel was chosen that carries an epilogue of `programs`: CuTe DSL's, or cuBLASLt's."""
        return self.choice is not None and bool(self.choice.epilogue)

    @property
    def best_unfused(self) -> Alternative | None:
        """The fastest alternative whose GEMM kernel carries nothing."""
        timed = [a for a in self.alternatives if a.timing is not None and not a.fused and not a.epilogue]
        return min(timed, key=lambda a: a.timing.us, default=None)


def choose(alternatives: Sequence[Alternative], force: bool = False) -> tuple[tuple[Alternative, ...], int | None]:
    """The alternatives with a reason at each loser, and the index of the winner (None when there is none).

    The fastest wins, except that an NVGEMM alternative must beat the fastest of the others by more than the larger
    of the two spreads: a tie goes to stock, and so does a comparison of times that are UNSTEADY. Where none of stock's
    has a time with nothing fused, nobody knows how long stock would take: no winner. `force` (a debugging aid) picks
    the NVGEMM alternative that fuses most, whatever it costs, wherever one has an epilogue.
    """
    timed = [i for i, a in enumerate(alternatives) if a.timing is not None and a.status is not Status.FAILED]
    if not timed:
        return tuple(alternatives), None
    stock = [i for i in timed if alternatives[i].backend is not Backend.NVGEMM]
    ours = [i for i in timed if alternatives[i].backend is Backend.NVGEMM]
    if all(alternatives[i].fused for i in stock) and not force:
        return tuple(alternatives), None
    winner = min(timed, key=lambda i: alternatives[i].timing.us)
    close, unsteady = False, 0.0
    fusing = [i for i in ours if alternatives[i].epilogue]
    if force and fusing:
        winner = min(fusing, key=lambda i: (-len(alternatives[i].fused), alternatives[i].timing.us))
    elif winner in ours:
        rival = min(stock, key=lambda i: alternatives[i].timing.us)
        fast, slow = alternatives[winner].timing, alternatives[rival].timing
        unsteady = max(timing.spread / timing.us for timing in (fast, slow))
        close = unsteady > UNSTEADY or fast.us + max(fast.spread, slow.spread) >= slow.us
        winner = rival if close else winner
    won = alternatives[winner].timing.us
    explained = []
    for index, alternative in enumerate(alternatives):
        if index != winner and alternative.refusal is None and alternative.timing is not None:
            faster = close and alternative.timing.us <= won
            reason = Reason.NOT_SEPARATED if faster else Reason.SLOWER
            detail = f"{alternative.timing.us / won:.3f} of the chosen one's time"
            if faster and unsteady > UNSTEADY:
                detail += f", but times vary by {unsteady:.0%}: is something else running on this GPU?"
            alternative = replace(alternative, refusal=Refusal(reason, detail))
        explained.append(alternative)
    return tuple(explained), winner
