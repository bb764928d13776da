"""The decision record: one JSON object a line, appended to a file that several processes may share.

The schema is versioned (`SCHEMA`). A log that cannot be written costs one warning and nothing else. Reading a log
needs no torch, so that a command over a log starts at once. Logs get long: `scan` decodes no more of a line than a
filter asks about, and checks on the way that the line is a decision.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .decision import Decision

SCHEMA = 1

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for data that is not what it should be."""

logger = logging.getLogger("nvgemm_fusion")
_unwritable: set[str] = set()


def to_record(decision: Decision) -> dict[str, Any]:
    """The decision as plain data, as it stands in the log."""
    choice, unfused = decision.choice, decision.best_unfused
    us_chosen = choice.timing.us if choice is not None and choice.timing is not None else None
    us_unfused = unfused.timing.us if unfused is not None else None
    return {
        "schema": SCHEMA,
        "graph": decision.graph,
        "gemm": decision.gemm,
        "digest": decision.programs[0].digest if decision.programs else None,
        "target": decision.target,
        "problem": None if decision.problem is None else decision.problem.to_json(),
        "programs": {p.digest: {"readable": p.readable(), "ssa": p.to_json()} for p in decision.programs},
        "nodes": [{"name": n.name, "operators": n.operators, "source": n.source} for n in decision.nodes],
        "edges": decision.edges,
        "versions": decision.versions,
        "alternatives": [alternative.to_json() for alternative in decision.alternatives],
        "chosen": decision.chosen,
        "fused": decision.fused,
        "us_chosen": us_chosen,
        "us_best_unfused": us_unfused,
        "speedup": round(us_unfused / us_chosen, 4) if us_chosen and us_unfused else None,
        "refusals": [{"reason": r.reason.value, "detail": r.explanation} for r in decision.refusals],
        "from_cache": decision.from_cache,
    }


def to_line(decision: Decision) -> bytes:
    """The record as a line of the log. A number that JSON does not have (an infinity) becomes null."""
    return msgspec.json.encode(to_record(decision)) + b"\n"


def readable(decision: Decision) -> str:
    """A few lines for people: what was decided, and why."""
    problem = decision.problem
    size = f" {problem.m}x{problem.n}x{problem.k}" if problem else ""
    choice = decision.choice
    if choice is None:
        head = f"{decision.gemm}{size}: left to Inductor"
    else:
        what = f"with {', '.join(choice.fused)} fused" if choice.fused else "unfused"
        head = f"{decision.gemm}{size}: {choice.backend.value} {choice.candidate} {what}"
    lines = [head, *(f"  not fused further: {refusal}" for refusal in decision.refusals)]
    for index, alternative in enumerate(decision.alternatives):
        time = "     --" if alternative.timing is None else f"{alternative.timing.us:7.1f} us"
        mark = "*" if index == decision.chosen else " "
        fused = f" + {len(alternative.fused)} fused" if alternative.fused else ""
        why = f"  ({alternative.refusal})" if alternative.refusal is not None else ""
        lines.append(f" {mark} {time} {alternative.backend.value} {alternative.candidate}{fused}{why}")
    return "\n".join(lines)


def write(decision: Decision, path: str | None) -> None:
    """Appends the record to `path` (None: no file), and logs the readable form at debug level."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", readable(decision))
    if path is None:
        return
    line = to_line(decision)
    try:
        # One write in append mode: lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        if path not in _unwritable:
            _unwritable.add(path)
            logger.warning("decisions are not logged: cannot write %s (%s)", path, error.strerror)


class AlternativeOutline(msgspec.Struct):
    """An alternative of a record, as far as a filter asks. What it does not ask about is there, but stays undecoded."""

    backend: str
    reason: str | None
    candidate: msgspec.Raw
    fused: msgspec.Raw
    separate: msgspec.Raw
    epilogue: msgspec.Raw
    compile_s: msgspec.Raw
    us: float | None
    spread: float | None
    status: msgspec.Raw
    detail: msgspec.Raw


class ProblemOutline(msgspec.Struct):
    """The size of a record's problem."""

    m: int
    n: int
    k: int


class RefusalOutline(msgspec.Struct):
    """A reason why not more was fused."""

    reason: str
    detail: msgspec.Raw


class Outline(msgspec.Struct):
    """A record, decoded as far as a filter asks. `number`: its place among the decisions of the log, from 1."""

    schema: int
    graph: msgspec.Raw
    gemm: msgspec.Raw
    digest: msgspec.Raw
    target: msgspec.Raw
    problem: ProblemOutline | None
    programs: msgspec.Raw
    nodes: msgspec.Raw
    edges: msgspec.Raw
    versions: msgspec.Raw
    alternatives: list[AlternativeOutline]
    chosen: int | None
    fused: bool
    us_chosen: float | None
    us_best_unfused: float | None
    speedup: float | None
    refusals: list[RefusalOutline]
    from_cache: bool
    number: int = 0


_outline = msgspec.json.Decoder(Outline)


def scan(path: str | Path) -> Iterator[tuple[Outline, bytes]]:
    """Each decision of a log as an outline, with the line that `parse` makes a record of.

    Lines that are no decision (a killed process leaves half a line, a newer version writes another schema) are
    skipped; one warning at the end counts them. Raises OSError when the file cannot be read.
    """
    count, skipped, first = 0, 0, ""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                outline = _outline.decode(line)
                fault = "" if outline.chosen is None or 0 <= outline.chosen < len(outline.alternatives) else "no choice"
            except UNREADABLE as error:
                fault = str(error)
            if not fault and outline.schema == SCHEMA:
                count += 1
                outline.number = count
                yield outline, line
                continue
            skipped += 1
            first = first or f"line {number}: {_schema(line) or fault}"
    if skipped:
        logger.warning("%s: skipped %d lines that are no decisions (the first, %s)", path, skipped, first)


def parse(line: bytes) -> dict[str, Any]:
    """The record on a line that `scan` has given."""
    return msgspec.json.decode(line)


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """All records of a log; see `scan` for what is skipped. Raises OSError when the file cannot be read."""
    return (parse(line) for _, line in scan(path))


def closest_fused(record: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest alternative with an epilogue, where none of them was chosen: its reason says best why not."""
    carrying = [alternative for alternative in record["alternatives"] if alternative["epilogue"]]
    if record["fused"] or not carrying:
        return None
    return min(carrying, key=lambda alternative: math.inf if alternative["us"] is None else alternative["us"])


class _Schema(msgspec.Struct):
    schema: int


def _schema(line: bytes) -> str:
    """What is to say of the schema of a line, where it is the fault."""
    try:
        schema = msgspec.json.decode(line, type=_Schema).schema
    except UNREADABLE:
        return ""
    return "" if schema == SCHEMA else f"schema {schema}, and this version reads {SCHEMA}"
