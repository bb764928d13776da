"""The command `nvgemm-fusion`: reads decisions, keeps them from getting worse, and shows the project at work.

Exit codes: 0 fine, 1 a check failed, 2 wrong use. What is not at hand (a file, a package) is said in one line.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from . import cache_command, log_command, plan_command, regress_command
from .log_command import LogFile, records_of
from .table import finding_table
from .terminal import CHECK_FAILED, AsJson, console, print_json, say, wrong_use

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(log_command.app, name="log")
app.add_typer(regress_command.app, name="regress")
app.add_typer(cache_command.app, name="cache")
app.command(context_settings=plan_command.CONTEXT)(plan_command.plan)


@app.command()
def demo(as_json: AsJson = False) -> None:
    """Compile a small MLP and a Llama block, and show what is fused. Needs no GPU, but the extra `bench`.

    Example: nvgemm-fusion demo
    """
    try:
        from . import demo as demonstration
    except ModuleNotFoundError as error:
        wrong_use(f"the demo needs {error.name}: pip install 'nvgemm-epilogue-fusion[bench]'")

    demonstration.main(as_json)


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
    as_json: AsJson = False,
) -> None:
    """Make one HTML page of a log, with figures, charts and filters. It needs no server and no network.

    Example: nvgemm-fusion report decisions.jsonl -o report.html
    """
    from .report import render

    page = render(records_of(file), str(file), limit)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        wrong_use(f"cannot write {output}: {error.strerror}")
    if as_json:
        print_json({"page": str(output)})
    else:
        say(f"wrote {output}")


def main() -> None:
    """The entry point of the console script."""
    logging.basicConfig(format="%(message)s")
    app()
