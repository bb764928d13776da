"""The regression gate: a suite is compiled again and compared with its baseline.

What was fused must be fused still, with the same region; what was not, for the same reason; results must be right; and
on a GPU, the chosen kernel must be as fast against the best unfused one as it was. Both of these times come from one
measurement, so that a ratio is compared and never a time of another day.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path

from ..fusion.decision import Status
from ..fusion.reasons import Reason
from .baseline import Baseline, GemmDecision, Ratio, WrongUse, read, write
from .regression_run import SuiteRun, run
from .regression_suite import load

LEAST_TOLERANCE = 0.02
"""A ratio that is higher by less than this is as good, whatever the spread."""
SPREADS = 3.0
"""How many of the baseline's spreads a ratio may be higher."""
NOTHING_DECIDED = "not one GEMM was decided: `nvgemm-fusion doctor` says whether fusion can work here"
TIME_REASONS = {Reason.SLOWER.value, Reason.NOT_SEPARATED.value}


class Kind(str, enum.Enum):
    """What a finding means for the gate: only a failure closes it."""

    FAILURE = "failure"
    IMPROVEMENT = "improvement"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One difference from the baseline, or one wrong result, in a sentence for people."""

    kind: Kind
    message: str


@dataclass(frozen=True)
class Case:
    """One thing that was checked: a graph as a whole, or one of its GEMMs.

    gemm: empty for the graph. before and now: the GEMM's decisions, None on the side that does not have it. number:
    that of the decision in the log of the check.
    """

    graph: str
    gemm: str = ""
    findings: tuple[Finding, ...] = ()
    before: GemmDecision | None = None
    now: GemmDecision | None = None
    number: int | None = None

    @property
    def worst(self) -> Kind | None:
        """The kind of its gravest finding, None without one."""
        return next((kind for kind in Kind for finding in self.findings if finding.kind is kind), None)


@dataclass(frozen=True)
class Report:
    """What a check found. notes: about the run as a whole, such as what could not be compared."""

    baseline: Path
    log_file: Path
    now: SuiteRun
    notes: tuple[str, ...]
    cases: tuple[Case, ...]

    def of_kind(self, kind: Kind) -> list[tuple[Case, Finding]]:
        """The findings of one kind."""
        return [(case, finding) for case in self.cases for finding in case.findings if finding.kind is kind]

    @property
    def failed(self) -> bool:
        """True when the gate is closed."""
        return bool(self.of_kind(Kind.FAILURE))


def record(output: Path, suite: Path | None = None) -> SuiteRun:
    """Compiles a suite (ours for None) and writes its baseline to `output`, unless a result is wrong (see `faults`).

    Raises WrongUse for a suite that is none or has no GEMM, and for an output that cannot be written.
    """
    if not output.parent.is_dir():
        raise WrongUse(f"cannot write the baseline {output}: there is no folder {output.parent}")
    recorded = run(load(suite))
    if not recorded.faults:
        if not any(recorded.decisions.graphs.values()):
            raise WrongUse(NOTHING_DECIDED)
        write(recorded.decisions, output)
    return recorded


def check(baseline: Path, suite: Path | None = None, log_file: Path | None = None) -> Report:
    """Compiles a suite again and compares it with a baseline.

    The decisions are written to `log_file` (default: beside the baseline, with the suffix .check.jsonl). Raises
    WrongUse for a baseline or a suite that is none, and for a log that cannot be written.
    """
    log_file = baseline.with_suffix(".check.jsonl") if log_file is None else log_file
    if log_file.resolve() == baseline.resolve():
        raise WrongUse(f"the log would overwrite the baseline {baseline}: give --log another name")
    before = read(baseline)
    now = run(load(suite), log_file, len(before.graphs))
    return Report(baseline, log_file, now, tuple(_notes(before, now.decisions)), tuple(compare(before, now)))


def compare(before: Baseline, now: SuiteRun) -> Iterator[Case]:
    """A case for each graph on either side, and one for each GEMM of those that are on both."""
    graphs, scope = now.decisions.graphs, _Scope.of(before, now.decisions)
    first_numbers = dict(zip(graphs, accumulate(map(len, graphs.values()), initial=1)))
    for name in dict.fromkeys([*before.graphs, *graphs]):
        findings = [Finding(Kind.FAILURE, fault) for fault in now.faults.get(name, ())]
        if name not in graphs:
            findings.append(Finding(Kind.FAILURE, "the graph is missing from the suite"))
        elif name not in before.graphs:
            findings.append(Finding(Kind.NOTE, "a new graph: record the baseline again to have it checked"))
        yield Case(name, findings=tuple(findings))
        if name not in graphs or name not in before.graphs:
            continue
        for position, (old, index) in enumerate(_pairs(before.graphs[name], graphs[name]), 1):
            new = None if index is None else graphs[name][index]
            yield Case(
                graph=name,
                gemm=f"GEMM {position} ({(new or old).problem or 'without candidates'})",
                findings=tuple(_compare_gemm(old, new, scope)),
                before=old,
                now=new,
                number=None if index is None else first_numbers[name] + index,
            )


@dataclass(frozen=True)
class _Scope:
    """What can be compared. choices: which kernel was chosen, and its time. programs: epilogue programs, which another
    torch may write differently for the same operators. modelled: choices are those of a model."""

    choices: bool
    programs: bool
    modelled: bool

    @classmethod
    def of(cls, before: Baseline, now: Baseline) -> _Scope:
        releases = {side.versions.get("torch", "").partition("+")[0] for side in (before, now)}
        same_times = (before.times, before.target) == (now.times, now.target)
        return cls(same_times, len(releases) == 1, now.times == Status.MODELLED.value)


def _notes(before: Baseline, now: Baseline) -> Iterator[str]:
    scope = _Scope.of(before, now)
    if not scope.choices:
        yield (
            f"the baseline is {before.times} on {before.target} and this run is {now.times} on {now.target}: "
            "which kernel is chosen and how fast it is are not compared"
        )
    elif scope.modelled:
        yield (
            f"no GPU of compute capability 9.0 here, so this is a virtual {now.target}: "
            "whether a fused kernel is chosen is modelled, and times are not compared"
        )
    for name in sorted(before.versions.keys() | now.versions.keys()):
        old, new = (side.versions.get(name, "none") for side in (before, now))
        if old != new:
            yield f"{name} is {old} in the baseline and {new} here"
    if not any(now.graphs.values()):
        yield NOTHING_DECIDED


def _pairs(
    before: Sequence[GemmDecision], now: Sequence[GemmDecision]
) -> list[tuple[GemmDecision | None, int | None]]:
    """Each GEMM of `before` with the index of the one in `now` that has its problem; the rest with the rest."""
    left, pairs, alone = list(range(len(now))), [], []
    for old in before:
        index = next((index for index in left if now[index].problem == old.problem), None)
        if index is None:
            alone.append(old)
        else:
            left.remove(index)
            pairs.append((old, index))
    return pairs + list(zip_longest(alone, left))


def _compare_gemm(old: GemmDecision | None, new: GemmDecision | None, scope: _Scope) -> Iterator[Finding]:
    if new is None:
        yield Finding(Kind.FAILURE, "not decided any more: gone from the graph, or left to Inductor after an error")
        return
    if old is None:
        yield Finding(Kind.NOTE, "a new GEMM: record the baseline again to have it checked")
        return
    if old.problem != new.problem:
        yield Finding(Kind.FAILURE, f"the problem was {_describe(old)} and is {_describe(new)}")
    if _lost(old.region.operators, new.region.operators):
        yield _shorter_region(old, new, scope)
    else:
        yield from _compare_region(old, new, scope)
        yield from _compare_choice(old, new, scope)
    if scope.choices and _drift(old, new):
        kind, word = (Kind.FAILURE, "slower") if _drift(old, new) > 0 else (Kind.IMPROVEMENT, "faster")
        yield Finding(
            kind,
            f"{word}: the chosen kernel takes {new.ratio.value:.3f} of the best unfused one's time, "
            f"{old.ratio.value:.3f} in the baseline (tolerance {_tolerance(old.ratio):.3f})",
        )


def _shorter_region(old: GemmDecision, new: GemmDecision, scope: _Scope) -> Finding:
    lost = f"the region lost {', '.join(_lost(old.region.operators, new.region.operators))}"
    gained = _lost(new.region.operators, old.region.operators)
    replaced = f", gained {', '.join(gained)}" if gained else ""
    unfused = ", and nothing is fused any more" if scope.choices and old.fused and not new.fused else ""
    return Finding(Kind.FAILURE, f"{lost}{replaced}{unfused} ({_why(new)})")


def _compare_region(old: GemmDecision, new: GemmDecision, scope: _Scope) -> Iterator[Finding]:
    """What changed about a region that has lost no operator."""
    gained = _lost(new.region.operators, old.region.operators)
    if gained:
        yield Finding(Kind.IMPROVEMENT, f"the region grew by {', '.join(gained)}")
    elif old.region.digest != new.region.digest:
        lines = zip_longest(old.region.program, new.region.program, fillvalue="nothing")
        was, became = next((pair for pair in lines if pair[0] != pair[1]), (old.region.digest, new.region.digest))
        kind = Kind.FAILURE if scope.programs else Kind.NOTE
        yield Finding(kind, f"the same operators have another epilogue program: `{was}` became `{became}`")


def _compare_choice(old: GemmDecision, new: GemmDecision, scope: _Scope) -> Iterator[Finding]:
    """Whether a fused kernel is chosen, what it computes, and if there is none, why.

    A choice that changed while the ratio stays within its tolerance is a tie that went the other way, not a failure.
    """
    modelled = " (modelled)" if scope.modelled else ""
    as_fast = old.ratio is not None and new.ratio is not None and _drift(old, new) <= 0
    lost = _lost(old.fused_operators, new.fused_operators)
    if not old.fused and not new.fused:
        if _words(old, scope) != _words(new, scope):
            yield Finding(Kind.FAILURE, f"not fused for another reason: it was {_why(old)}; it is {_why(new)}")
    elif not scope.choices:
        return
    elif not old.fused:
        yield Finding(Kind.IMPROVEMENT, f"fused now{modelled}; it was not: {_why(old)}")
    elif not new.fused:
        tie = as_fast and _words(new, scope) & TIME_REASONS
        yield Finding(Kind.NOTE if tie else Kind.FAILURE, f"not fused any more{modelled}: {_why(new)}")
    elif lost:
        message = f"the chosen kernel{modelled} does not compute {', '.join(lost)} any more"
        yield Finding(Kind.NOTE if as_fast else Kind.FAILURE, message)


def _drift(old: GemmDecision, new: GemmDecision) -> float:
    """How far the ratio rose (fell, if negative) beyond its tolerance; 0 within it, and where nothing was measured."""
    if old.ratio is None or new.ratio is None:
        return 0.0
    change = new.ratio.value - old.ratio.value
    return math.copysign(max(0.0, abs(change) - _tolerance(old.ratio)), change)


def _tolerance(ratio: Ratio) -> float:
    return max(LEAST_TOLERANCE, SPREADS * ratio.spread)


def _lost(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """What is in `before` more often than in `now`."""
    return list((Counter(before) - Counter(now)).elements())


def _words(decision: GemmDecision, scope: _Scope) -> set[str]:
    """The reasons as words. Which of the two time reasons it is, is noise; without times, neither counts."""
    words = {why.reason for why in decision.reasons}
    timed = {Reason.SLOWER.value} if words & TIME_REASONS and scope.choices else set()
    return (words - TIME_REASONS) | timed


def _why(decision: GemmDecision) -> str:
    return "; ".join(map(str, decision.reasons)) or "no reason is known"


def _describe(decision: GemmDecision) -> str:
    problem = decision.problem
    if problem is None:
        return f"without candidates ({_why(decision)})"
    return f"{problem} in {problem.dtype} (A {problem.a_major}-major, B {problem.b_major}-major)"
