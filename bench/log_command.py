"""`nvgemm-fusion log`: the decisions of a log, as a table, one in full, and against those of another log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..fusion import log
from .difference import changes
from .selection import Selection
from .table import change_table, decision_table
from .terminal import AsJson, console, print_json, wrong_use

app = typer.Typer(no_args_is_help=True, help="Read the decisions that `config.nvgemm_fusion_log` collects.")

T = TypeVar("T")

LogFile = Annotated[Path, typer.Argument(help="a decision log: one JSON object a line")]


@app.command()
def show(
    file: LogFile,
    reason: Annotated[str | None, typer.Option(help="where this stands as a reason, such as 'index pattern'")] = None,
    backend: Annotated[str | None, typer.Option(help="where ATEN, TRITON or NVGEMM was chosen")] = None,
    shape: Annotated[str | None, typer.Option(help="this MxNxK, with * for any size, such as 256x*x4096")] = None,
    fused: Annotated[bool | None, typer.Option("--fused/--unfused", help="where a kernel has an epilogue")] = None,
    speedup: Annotated[float | None, typer.Option(help="at least this much faster than the best unfused")] = None,
    limit: Annotated[int, typer.Option(min=1, help="how many to print")] = 50,
    as_json: AsJson = False,
) -> None:
    """Print the decisions of a log as a table.

    Example: nvgemm-fusion log show decisions.jsonl --reason "index pattern"
    """
    try:
        selection = Selection.of(reason, backend, shape, fused, speedup)
    except ValueError as error:
        wrong_use(str(error))
    selected = ((outline.number, line) for outline, line in _at_hand(file, log.scan(file)) if outline in selection)
    shown = [(number, log.parse(line)) for number, line in islice(selected, limit)]
    more = sum(1 for _ in selected)
    if as_json:
        print_json([{"number": number, **record} for number, record in shown])
    elif not shown:
        console().print(f"no decision in {file} is like that")
    else:
        console().print(decision_table(shown, f"{len(shown)} of {len(shown) + more} decisions in {file}"))


@app.command()
def explain(
    file: LogFile,
    number: Annotated[int, typer.Argument(min=1, help="which decision: its number in `log show`")],
    as_json: AsJson = False,
) -> None:
    """Print one decision in full, with the source of the kernel's epilogue.

    Example: nvgemm-fusion log explain decisions.jsonl 3
    """
    record = next(islice(records_of(file), number - 1, None), None)
    if record is None:
        wrong_use(f"{file} has fewer than {number} decisions: see `nvgemm-fusion log show {file}`")
    if as_json:
        print_json(record)
        return
    from .explanation import explanation

    for part in explanation(record):
        console().print(part)


@app.command()
def diff(before: LogFile, after: LogFile, as_json: AsJson = False) -> None:
    """Print what changed from one log to another: fusions lost and won, other winners, slower and faster.

    Example: nvgemm-fusion log diff main.jsonl branch.jsonl
    """
    found = changes(records_of(before), records_of(after))
    if as_json:
        print_json([vars(change) for change in found])
    elif not found:
        console().print("the same decisions")
    else:
        console().print(change_table(found, f"from {before} to {after}"))


def records_of(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a log, one by one; ends the command with one line when there is none."""
    return _at_hand(file, log.read(file))


def _at_hand(file: Path, contents: Iterator[T]) -> Iterator[T]:
    """What a log holds, one by one; ends the command with one line when it cannot be read or holds nothing."""
    count = 0
    try:
        for count, content in enumerate(contents, 1):
            yield content
    except OSError as error:
        wrong_use(f"cannot read {file}: {error.strerror}")
    if not count:
        wrong_use(f"{file} holds no decision: was it written with config.nvgemm_fusion_log?")
