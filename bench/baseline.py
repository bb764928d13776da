"""Baseline: what was decided for every GEMM of a suite, as a JSON file that a person can read and review.

A baseline is data that may come from anywhere. The types below say what it may hold, msgspec checks it against them,
and nothing in it is executed.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..fusion.decision import Status
from ..fusion.log import UNREADABLE, closest_fused
from ..lowering.store import write_atomically

SCHEMA = 1
LARGEST_FILE = 64 << 20
"""Bytes. A GEMM takes about a thousand."""
LONGEST_TEXT = 1000

# No control characters, nor those that turn the direction of writing: what is read here is printed.
Text = Annotated[str, Meta(max_length=LONGEST_TEXT, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z")]
Size = Annotated[int, Meta(ge=1, le=1 << 40)]
Number = Annotated[float, Meta(ge=0, le=1e9)]


class WrongUse(Exception):
    """Something that a person has to put right; the message is one line that says what."""


class Problem(msgspec.Struct, frozen=True):
    """A GEMM's problem in the words of the log."""

    m: Size
    n: Size
    k: Size
    dtype: Text
    a_major: Text
    b_major: Text
    accumulator: Text
    target: Text

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


class Region(msgspec.Struct, frozen=True):
    """The largest region: the operators of its nodes, and its epilogue program. Without a node, that of the GEMM."""

    operators: tuple[Text, ...]
    digest: Text
    program: tuple[Text, ...]


class WhyNot(msgspec.Struct, frozen=True):
    """Why something was not fused or not chosen: one of the words of `fusion.reasons`, and what exactly."""

    reason: Text
    detail: Text

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Ratio(msgspec.Struct, frozen=True):
    """Time of the chosen alternative over that of the best unfused one, both of one measurement, and its spread."""

    value: Number
    spread: Number


class GemmDecision(msgspec.Struct, frozen=True):
    """What was decided for one GEMM, as far as it is compared.

    problem: None for a GEMM that got no candidates. fused: whether a CuTe DSL kernel with an epilogue was chosen, and
    fused_operators those of the nodes inside it. ratio: None where no time was measured.
    """

    problem: Problem | None
    region: Region
    fused: bool
    fused_operators: tuple[Text, ...]
    reasons: tuple[WhyNot, ...]
    ratio: Ratio | None

    @classmethod
    def of(cls, record: dict[str, Any]) -> GemmDecision:
        """From a record of the decision log."""
        operators = {node["name"]: tuple(node["operators"]) for node in record["nodes"]}
        program = record["programs"].get(record["digest"], {"readable": ""})["readable"]
        alternatives, chosen = record["alternatives"], record["chosen"]
        choice = None if chosen is None else alternatives[chosen]
        reasons = [(refusal["reason"], refusal["detail"]) for refusal in record["refusals"]]
        closest = closest_fused(record)
        if closest is not None:
            reasons.append((closest["reason"], closest["detail"]))
        return cls(
            problem=None if record["problem"] is None else msgspec.convert(record["problem"], Problem),
            region=Region(
                operators=sum((operators[node["name"]] for node in record["nodes"][1:]), ()),
                digest=record["digest"] or "",
                program=tuple(program.splitlines()),
            ),
            fused=record["fused"],
            fused_operators=sum((operators[name] for name in choice["fused"]), ()) if record["fused"] else (),
            reasons=tuple(WhyNot(printable(reason), printable(detail)) for reason, detail in reasons),
            ratio=_ratio(choice, alternatives),
        )


class Baseline(msgspec.Struct, frozen=True):
    """A suite as it was compiled once: with which versions, for which target, and with which kind of times.

    times: "measured" on a GPU, "modelled" without one; then it is modelled, too, whether a fused kernel is chosen.
    """

    schema: int
    versions: dict[Text, Text]
    target: Text
    times: Literal["measured", "modelled"]
    graphs: dict[Text, tuple[GemmDecision, ...]]


class _Schema(msgspec.Struct):
    schema: int


def read(path: Path) -> Baseline:
    """The baseline in a file. Raises WrongUse for a file that is missing or holds anything else."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_FILE:
            raise WrongUse(f"{path} is no baseline: not a file of at most {LARGEST_FILE >> 20} MiB")
        content = path.read_bytes()
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema != SCHEMA:
            raise WrongUse(
                f"the baseline {path} has schema {schema}, and this version reads {SCHEMA}: "
                + ("update nvgemm-fusion" if schema > SCHEMA else "record it again")
            )
        return msgspec.json.decode(content, type=Baseline)
    except OSError as error:
        raise WrongUse(
            f"cannot read the baseline {path}: {error.strerror} (`nvgemm-fusion regress record -o {path}` writes one)"
        ) from error
    except UNREADABLE as error:
        raise WrongUse(f"{path} is no baseline: {printable(str(error))}") from error


def write(baseline: Baseline, path: Path) -> None:
    """Writes a baseline, whole or not at all. Raises WrongUse when that cannot be done."""
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(baseline), indent=1) + b"\n")
    except OSError as error:
        raise WrongUse(f"cannot write the baseline {path}: {error.strerror}") from error


def printable(text: str) -> str:
    """`text` on one line of at most 300 characters, without those that would move the cursor of a terminal."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())[:300]


def _ratio(choice: dict[str, Any] | None, alternatives: Sequence[dict[str, Any]]) -> Ratio | None:
    unfused = [a for a in alternatives if a["us"] and not a["fused"] and not a["epilogue"]]
    if choice is None or choice["status"] != Status.MEASURED.value or not choice["us"] or not unfused:
        return None
    best = min(unfused, key=lambda alternative: alternative["us"])
    value = choice["us"] / best["us"]
    # The spreads of two times add up in squares; when the best unfused one was chosen there is but one time.
    relative = 0.0 if best is choice else math.hypot(*(a["spread"] / a["us"] for a in (choice, best)))
    return Ratio(round(value, 4), round(value * relative, 4))
