"""Tuning: decisions that were measured, kept on disk and carried from machine to machine.

An entry says which alternative won a contest, and everything that the contest depended on: the problem, the epilogue
programs, who was allowed to compete, the GPU, the versions. It is data: JSON that is checked against the types below
and never executed. A tuning file is a list of entries (its schema is described in `docs/tuning-file.md`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..fusion.log import UNREADABLE
from ..fusion.problem import Problem
from ..fusion.reasons import Reason, Refusal
from .kernel import Candidate
from .store import default_directory, write_atomically
from .targets import TARGETS

logger = logging.getLogger("nvgemm_fusion")

SCHEMA = 1

Name = Annotated[str, msgspec.Meta(max_length=200)]
Text = Annotated[str, msgspec.Meta(max_length=100_000)]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Microseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Timestamp = Annotated[str, msgspec.Meta(pattern=r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\+00:00\Z")]


class ProblemData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fusion.problem.Problem` as it stands in the log."""

    m: Size
    n: Size
    k: Size
    dtype: Name
    a_major: Literal["row", "column"]
    b_major: Literal["row", "column"]
    accumulator: Name
    target: Name


class ProgramData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An epilogue program: its digest, by which it is found, and its readable form, for people."""

    digest: Digest
    readable: Text


class Contest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the outcome depends on, but for the versions.

    programs: the epilogue of each region, largest first, and of the GEMM alone. beside: how many nodes beside the
    GEMM compute an operand. backends: whose kernels competed (besides ours), and candidates: how many of ours
    (None: all).
    """

    target: Name
    problem: ProblemData
    programs: Annotated[tuple[ProgramData, ...], msgspec.Meta(min_length=1, max_length=1000)]
    beside: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    backends: Annotated[tuple[Name, ...], msgspec.Meta(max_length=20)]
    candidates: Annotated[int, msgspec.Meta(ge=0)] | None

    @property
    def key(self) -> str:
        """Names the contest: a digest of all of it but the readable forms."""
        programs = [program.digest for program in self.programs]
        content = [self.target, self.problem, programs, self.beside, self.backends, self.candidates]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]


class Winner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The alternative that was chosen. candidate: the configuration of one of our kernels; name: how Inductor tells its
    own choices apart. program: the place of its region's program in `Contest.programs`, None when no node is fused."""

    backend: Literal["ATEN", "TRITON", "NVGEMM"]
    name: Text
    program: Annotated[int, msgspec.Meta(ge=0, le=1000)] | None
    candidate: Candidate | None
    us: Microseconds
    spread: Microseconds


class TuningEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contest and how it ended. us_best_unfused: None when nothing unfused was timed. measured_at: UTC, ISO 8601."""

    contest: Contest
    winner: Winner
    us_best_unfused: Microseconds | None
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=50)]
    measured_at: Timestamp

    def misfit(self, versions: dict[str, str], target: str | None = None) -> Refusal | None:
        """Why this entry says nothing here: other versions, or another GPU than `target` (None: any that is known)."""
        if self.contest.target not in TARGETS or target not in (None, self.contest.target):
            elsewhere = f", not on {target}" if target else ""
            return Refusal(Reason.TARGET, f"measured on {self.contest.target}{elsewhere}")
        for name, version in versions.items():
            if self.versions.get(name) != version:
                return Refusal(Reason.VERSION, f"measured with {name} {self.versions.get(name)}, here is {version}")
        return None


class TuningFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entries as a file."""

    kind: Literal["nvgemm-fusion tuning"]
    schema: int
    entries: tuple[TuningEntry, ...]


def problem_data(problem: Problem) -> ProblemData:
    """The problem as it stands in an entry."""
    return msgspec.convert(problem.to_json(), ProblemData)


class TuningStore:
    """The entries under one folder, a file each; shared by any number of processes."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or default_directory()) / "decisions"

    def find(self, contest: Contest) -> TuningEntry | None:
        """The entry of `contest`, if there is one that can be read."""
        path = self._path(contest)
        entry = self._read(path) if path.exists() else None
        return entry if entry is not None and entry.contest.key == contest.key else None

    def put(self, entry: TuningEntry) -> None:
        """Keeps `entry` in place of an earlier one. Raises OSError when the disk refuses."""
        path = self._path(entry.contest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(entry))

    def merge(self, entries: Iterable[TuningEntry], overwrite: bool = False) -> int:
        """Keeps those of `entries` that are newer than what is here (with `overwrite`: all); returns how many."""
        count = 0
        for entry in entries:
            present = self.find(entry.contest)
            if overwrite or present is None or present.measured_at < entry.measured_at:
                self.put(entry)
                count += 1
        return count

    def entries(self) -> Iterator[TuningEntry]:
        """All entries that can be read, in no order that means anything."""
        for path in sorted(self.directory.glob("*.json")):
            entry = self._read(path)
            if entry is not None:
                yield entry

    def clear(self) -> int:
        """Removes all entries; returns how many there were. Raises OSError when the disk refuses."""
        paths = list(self.directory.glob("*.json"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _read(self, path: Path) -> TuningEntry | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=TuningEntry)
        except (OSError, *UNREADABLE) as error:
            logger.warning("ignored the kept decision %s: %s", path, error)
            return None

    def _path(self, contest: Contest) -> Path:
        return self.directory / f"{contest.key}.json"


def write_file(path: Path, entries: Sequence[TuningEntry]) -> None:
    """Writes a tuning file. Raises OSError when it cannot be written."""
    content = msgspec.json.encode(TuningFile("nvgemm-fusion tuning", SCHEMA, tuple(entries)))
    write_atomically(path, msgspec.json.format(content, indent=1) + b"\n")


def read_file(path: Path) -> tuple[TuningEntry, ...]:
    """The entries of a tuning file.

    Raises OSError when it cannot be read, and ValueError, with one line that says where and what, for anything but a
    tuning file of this schema.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TuningFile)
    except UNREADABLE as error:
        raise ValueError(f"not a tuning file: {error}") from None
    if file.schema != SCHEMA:
        raise ValueError(f"a tuning file of schema {file.schema}, and this version reads {SCHEMA}")
    return file.entries
