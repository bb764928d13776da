"""The command `nvgemm-fusion`: reads decision logs, and shows the project at work.

Exit codes: 0 fine, 1 a check failed, 2 wrong use. What is not at hand (a file, a package) is said in one line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ..fusion import log
from . import cache_command, regress_command
from .difference import changes
from .selection import Selection
from .table import change_table, decision_table, finding_table
from .terminal import CHECK_FAILED, AsJson, console, print_json, say, wrong_use

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
log_app = typer.Typer(no_args_is_help=True, help="Read the decisions that `config.nvgemm_fusion_log` collects.")
app.add_typer(log_app, name="log")
app.add_typer(regress_command.app, name="regress")
app.add_typer(cache_command.app, name="cache")

T = TypeVar("T")

LogFile = Annotated[Path, typer.Argument(help="a decision log: one JSON object a line")]


@app.command()
def demo() -> None:
    """Compile a small MLP and a Llama block, and show what is fused. Needs no GPU, but the extra `bench`.

    Example: nvgemm-fusion demo
    """
    from . import demo as demonstration

    demonstration.main()


@app.command()
def doctor(
    virtual: Annotated[bool, typer.Option(help="only what the virtual device needs: a GPU may be missing")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, whether it fits, and what to do where it does not. Exits with 1 for a fault.

    Example: nvgemm-fusion doctor --virtual
    """
    from .doctor import State, examine

    findings = list(examine(virtual))
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        console().print(finding_table(findings))
    raise typer.Exit(CHECK_FAILED if any(finding.state is State.FAULT for finding in findings) else 0)


@app.command()
def report(
    file: LogFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="the page to write")] = Path("report.html"),
    limit: Annotated[int, typer.Option(min=1, help="how many decisions to show one by one")] = 500,
) -> None:
    """Make one HTML page of a log, with figures, charts and filters. It needs no server and no network.

    Example: nvgemm-fusion report decisions.jsonl -o report.html
    """
    from .report import render

    page = render(list(_records(file)), str(file), limit)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        wrong_use(f"cannot write {output}: {error.strerror}")
    say(f"wrote {output}")


@log_app.command()
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


@log_app.command()
def explain(
    file: LogFile,
    number: Annotated[int, typer.Argument(min=1, help="which decision: its number in `log show`")],
    as_json: AsJson = False,
) -> None:
    """Print one decision in full, with the source of the kernel's epilogue.

    Example: nvgemm-fusion log explain decisions.jsonl 3
    """
    record = next(islice(_records(file), number - 1, None), None)
    if record is None:
        wrong_use(f"{file} has fewer than {number} decisions: see `nvgemm-fusion log show {file}`")
    if as_json:
        print_json(record)
        return
    from .explanation import explanation

    for part in explanation(record):
        console().print(part)


@log_app.command()
def diff(before: LogFile, after: LogFile, as_json: AsJson = False) -> None:
    """Print what changed from one log to another: fusions lost and won, other winners, slower and faster.

    Example: nvgemm-fusion log diff main.jsonl branch.jsonl
    """
    found = changes(_records(before), _records(after))
    if as_json:
        print_json([vars(change) for change in found])
    elif not found:
        console().print("the same decisions")
    else:
        console().print(change_table(found, f"from {before} to {after}"))


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a log."""
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


def main() -> None:
    """The entry point of the console script."""
    logging.basicConfig(format="%(message)s")
    app()
