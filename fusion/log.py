"""The decision record: one JSON object a line, appended to a file that several processes may share.

The schema is versioned (`SCHEMA`). A log that cannot be written costs one warning and nothing else. Reading a log
needs no torch, so that a command over a log starts at once; and it is `orjson` that reads, since logs get long.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from .decision import Decision

SCHEMA = 1

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
        "refusals": [{"reason": r.reason.value, "detail": r.detail} for r in decision.refusals],
        "from_cache": decision.from_cache,
    }


def to_line(decision: Decision) -> bytes:
    """The record as a line of the log. A number that JSON does not have (an infinity) becomes null."""
    return orjson.dumps(to_record(decision), option=orjson.OPT_APPEND_NEWLINE)


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


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a log. A line that is not a record of this schema (a killed process leaves half a line) is
    skipped with a warning. Raises OSError when the file cannot be read."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = orjson.loads(line)
            except ValueError:
                logger.warning("%s line %d is not JSON, skipped", path, number)
                continue
            if not isinstance(record, dict) or record.get("schema") != SCHEMA:
                logger.warning("%s line %d is not a decision of schema %d, skipped", path, number, SCHEMA)
                continue
            yield record
