"""`nvgemm-fusion regress`: record what is fused in a suite of graphs, and check against it. A gate for CI.

Exit codes: 0 fine, 1 a check failed, 2 wrong use (one line says what to do).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .terminal import CHECK_FAILED, AsJson, print_json, say, wrong_use

app = typer.Typer(no_args_is_help=True, help="Hold what is fused: record a baseline once, check against it in CI.")

Suite = Annotated[Path | None, typer.Option(help="a Python file with a generator `graphs`; ours without it")]


@app.command()
def record(
    output: Annotated[Path, typer.Option("--output", "-o", help="the baseline to write")],
    suite: Suite = None,
    as_json: AsJson = False,
) -> None:
    """Compile a suite and write down what is fused. Writes nothing, and exits with 1, when a result is wrong.

    Example: nvgemm-fusion regress record -o baseline.json
    """
    from . import regression

    with _wrong_use_in_a_line():
        recorded = regression.record(output, suite)
    decisions = recorded.decisions
    gemms = [gemm for graph in decisions.graphs.values() for gemm in graph]
    if as_json:
        counts = {"graphs": len(decisions.graphs), "gemms": len(gemms), "fused": sum(gemm.fused for gemm in gemms)}
        where = {"target": decisions.target, "times": decisions.times}
        print_json({"baseline": str(output), **counts, **where, "faults": recorded.faults})
    elif recorded.faults:
        for graph, faults in recorded.faults.items():
            say(f"FAILED: {graph}: {'; '.join(faults)}")
    else:
        say(
            f"{output}: {len(decisions.graphs)} graphs, {len(gemms)} GEMMs ({sum(gemm.fused for gemm in gemms)} "
            f"fused), {decisions.times} on {decisions.target}"
        )
    raise typer.Exit(CHECK_FAILED if recorded.faults else 0)


@app.command()
def check(
    baseline: Annotated[Path, typer.Argument(help="what `regress record` wrote")],
    suite: Suite = None,
    log: Annotated[Path | None, typer.Option(help="where the decisions go [default: BASELINE.check.jsonl]")] = None,
    junit: Annotated[Path | None, typer.Option(help="a JUnit XML file to write")] = None,
    markdown: Annotated[Path | None, typer.Option(help="a summary for a pull request to write")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a suite again and compare it with its baseline. Exits with 1 for a regression.

    Example: nvgemm-fusion regress check baseline.json --junit regress.xml
    """
    from . import regression, regression_report

    with _wrong_use_in_a_line():
        report = regression.check(baseline, suite, log)
        if junit is not None:
            regression_report.write(junit, regression_report.to_junit(report))
        if markdown is not None:
            regression_report.write(markdown, regression_report.to_markdown(report))
    if as_json:
        print_json(regression_report.to_json(report))
    else:
        for line in regression_report.to_text(report):
            say(line)
    raise typer.Exit(CHECK_FAILED if report.failed else 0)


@contextmanager
def _wrong_use_in_a_line() -> Iterator[None]:
    from .baseline import WrongUse

    try:
        yield
    except WrongUse as error:
        wrong_use(str(error))
