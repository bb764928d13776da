"""What the commands share: how they print, and how they end."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

CHECK_FAILED, WRONG_USE = 1, 2

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead")]


def console() -> Console:
    """The terminal; where there is none to ask for its width (a file, a CI job), one that a table fits in."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    return console


def say(sentence: str) -> None:
    """Prints a line as it is."""
    typer.echo(sentence)


def counted(number: int, thing: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def print_json(value: Any) -> None:
    """Prints `value` as one line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def wrong_use(sentence: str) -> NoReturn:
    """Ends the command: what was asked for cannot be done, and `sentence` says what to do."""
    typer.echo(sentence, err=True)
    raise typer.Exit(WRONG_USE)
