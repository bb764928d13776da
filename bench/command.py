"""The command `nvgemm-fusion`: reads decision logs, and shows the project at work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..fusion import log
from .table import console, decision_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
log_app = typer.Typer(no_args_is_help=True, help="Read the decisions that `config.nvgemm_fusion_log` collects.")
app.add_typer(log_app, name="log")

WRONG_USE = 2


@app.command()
def demo() -> None:
    """Compile a small MLP and a Llama block, and show what is fused. Needs no GPU, and the extra `bench`."""
    from . import demo as demonstration

    demonstration.main()


@log_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="a decision log: one JSON object a line")],
    as_json: Annotated[bool, typer.Option("--json", help="print the records as one JSON array")] = False,
) -> None:
    """Print the decisions of a log as a table.

    Example: nvgemm-fusion log show decisions.jsonl
    """
    records = _records(file)
    if as_json:
        json.dump(records, sys.stdout)
        return
    console().print(decision_table(records, f"{len(records)} decisions in {file}"))


def _records(file: Path) -> list[dict[str, Any]]:
    """The records of a log; ends the command with one line when there are none to be had."""
    try:
        records = list(log.read(file))
    except (OSError, UnicodeDecodeError) as error:
        typer.echo(f"cannot read {file}: {error}", err=True)
        raise typer.Exit(WRONG_USE) from None
    if not records:
        typer.echo(f"{file} holds no decision: was it written with config.nvgemm_fusion_log?", err=True)
        raise typer.Exit(WRONG_USE)
    return records


def main() -> None:
    """The entry point of the console script."""
    app()
