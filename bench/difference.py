"""What changed between two decision logs: fusions lost and won, other winners, slower and faster kernels.

Decisions are matched by the digest of the largest region's program and the problem; what is left, by the problem and
its place in the log, so that a region that got longer or shorter is seen as changed rather than as lost and found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

TOLERANCE = 1.03
"""A ratio of times below this is no change, whatever the spreads say."""


@dataclass(frozen=True)
class Change:
    """One difference: `kind` in a word or two, and `detail` for people. The records are None on the side without."""

    kind: str
    detail: str
    before: Record | None
    after: Record | None


def changes(before: Iterable[Record], after: Iterable[Record]) -> list[Change]:
    """All changes from one log to the other, in the order of the logs."""
    olds, news = list(before), list(after)
    matched, olds, news = _match(olds, news, lambda record: (record["digest"], _problem(record)))
    more, olds, news = _match(olds, news, _problem)
    found = [change for pair in (*matched, *more) for change in _compare(*pair)]
    found += [Change("gone", "in the first log only", record, None) for record in olds]
    found += [Change("new", "in the second log only", None, record) for record in news]
    return found


def _match(
    olds: list[Record], news: list[Record], key: Callable[[Record], Hashable]
) -> tuple[list[tuple[Record, Record]], list[Record], list[Record]]:
    """Pairs with the same key, in order, and what is left of both."""
    waiting: dict[Hashable, list[Record]] = {}
    for record in news:
        waiting.setdefault(key(record), []).append(record)
    pairs, alone = [], []
    for record in olds:
        candidates = waiting.get(key(record))
        if candidates:
            pairs.append((record, candidates.pop(0)))
        else:
            alone.append(record)
    return pairs, alone, [record for records in waiting.values() for record in records]


def _compare(old: Record, new: Record) -> list[Change]:
    found = []
    if old["digest"] != new["digest"]:
        found.append(Change("region", f"{_region(old)} -> {_region(new)}", old, new))
    if old["fused"] != new["fused"]:
        kind = "fusion lost" if old["fused"] else "fusion won"
        found.append(Change(kind, f"{_choice(old)} -> {_choice(new)}{_why(new)}", old, new))
    elif _choice(old) != _choice(new):
        found.append(Change("winner", f"{_choice(old)} -> {_choice(new)}", old, new))
    if old["us_chosen"] and new["us_chosen"] and _status(old) == _status(new):
        ratio = new["us_chosen"] / old["us_chosen"]
        beyond = abs(new["us_chosen"] - old["us_chosen"]) > max(_spread(old), _spread(new))
        if beyond and max(ratio, 1 / ratio) >= TOLERANCE:
            kind = "slower" if ratio > 1 else "faster"
            found.append(Change(kind, f"{old['us_chosen']:.1f} -> {new['us_chosen']:.1f} us ({ratio:.3f})", old, new))
    return found


def _problem(record: Record) -> Hashable:
    return record["target"], tuple(sorted((record["problem"] or {"gemm": record["gemm"]}).items()))


def _region(record: Record) -> str:
    """The operators of the nodes that could be fused, in short."""
    operators = [operator for node in record["nodes"][1:] for operator in node["operators"]]
    return ", ".join(operators) or "nothing"


def _choice(record: Record) -> str:
    if record["chosen"] is None:
        return "left to Inductor"
    choice = record["alternatives"][record["chosen"]]
    # Triton numbers its templates anew in each process; the number tells nothing.
    name = choice["candidate"].rstrip("0123456789_") if choice["backend"] == "TRITON" else choice["candidate"]
    return f"{choice['backend']} {name}" + (" fused" if choice["fused"] else "")


def _why(record: Record) -> str:
    if record["fused"] or not record["refusals"]:
        return ""
    return "; " + "; ".join(f"{refusal['reason']} {refusal['detail']}".strip() for refusal in record["refusals"])


def _status(record: Record) -> str:
    return record["alternatives"][record["chosen"]]["status"]


def _spread(record: Record) -> float:
    return record["alternatives"][record["chosen"]]["spread"] or 0.0
