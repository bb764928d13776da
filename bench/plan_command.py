"""`nvgemm-fusion plan`: runs a script on a GPU that is not there, and prints what would be fused on it.

Exit codes: 0 fine, 1 the script failed, 2 wrong use (one line says what to do); a script that ends itself with
`sys.exit` has the last word.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..fusion import log as decision_log
from .table import decision_table
from .terminal import CHECK_FAILED, AsJson, console, counted, print_json, say, wrong_use

if TYPE_CHECKING:
    from ..scheduler_hooks.virtual_script import ScriptRun

CONTEXT = {"allow_interspersed_args": False}
"""What stands behind the script is the script's, also where it looks like an option."""


def plan(
    script: Annotated[Path, typer.Argument(help="a Python program that calls torch.compile")],
    arguments: Annotated[list[str] | None, typer.Argument(help="what the script itself is given")] = None,
    target: Annotated[str, typer.Option(help="H100, H200, B200, 'RTX 5090' or A100")] = "H200",
    log: Annotated[Path | None, typer.Option(help="keep the decisions there, for `nvgemm-fusion log`")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a script without a GPU, and print what would be fused on one. All times are modelled.

    The script needs no change: its CUDA tensors have shapes, but no values. Options of `plan` stand before it.

    Example: nvgemm-fusion plan --target H100 train.py --batch-size 8
    """
    from ..lowering.targets import TARGETS

    if target not in TARGETS:
        wrong_use(f"--target {target!r} is not known: choose one of {', '.join(TARGETS)}")
    if not script.is_file():
        wrong_use(f"there is no script {script}: `nvgemm-fusion plan` takes a Python file")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl" if log is None else log
        try:
            path.write_bytes(b"")
        except OSError as error:
            wrong_use(f"cannot write {path}: {error.strerror}")
        with _on_stderr() if as_json else contextlib.nullcontext():
            run = _run(script, arguments or [], target, path)
        records = list(decision_log.read(path))
    sentence = _summary(records, target, run)
    if as_json:
        decisions = [{"number": number, **record} for number, record in enumerate(records, 1)]
        print_json({"script": str(script), "target": target, "summary": sentence, "decisions": decisions})
    else:
        if records:
            console().print(decision_table(enumerate(records, 1), f"{script} on a virtual {target}"))
        say(sentence)
    raise typer.Exit(run.exit_code)


def _run(script: Path, arguments: list[str], target: str, log: Path) -> ScriptRun:
    """Runs the script, and ends the command where it does not come to its end."""
    from ..scheduler_hooks.virtual_script import CannotRun, ScriptFailed, run_script

    try:
        return run_script(script, arguments, target, log)
    except CannotRun as error:
        wrong_use(str(error))
    except ScriptFailed as error:
        typer.echo(error, err=True)
        typer.echo(f"{script} failed, so there is no plan: the traceback above has only your frames", err=True)
        raise typer.Exit(CHECK_FAILED) from None


def _summary(records: list[dict[str, Any]], target: str, run: ScriptRun) -> str:
    """What a line can say of the plan, and why there is none where there is none."""
    if not records:
        if run.gpu_graphs:
            return (
                f"nothing to decide: no GEMM in what was compiled for the GPU ({counted(run.gpu_graphs, 'graph')}) "
                "has several kernels to choose from"
            )
        if run.cpu_graphs:
            return f"nothing to plan: all that was compiled ({counted(run.cpu_graphs, 'graph')}) lies on the CPU"
        return "nothing to plan: the script compiles nothing with Inductor (is torch.compile's result called?)"
    gemms, fused = counted(len(records), "GEMM"), sum(record["fused"] for record in records)
    if all(any(refusal["reason"] == "target" for refusal in record["refusals"]) for record in records):
        return f"{gemms} on a virtual {target}, nothing fused: no kernel of ours is for this GPU (reason: target)"
    return f"{gemms} on a virtual {target}, {fused} fused; all times are modelled, none was measured"


@contextlib.contextmanager
def _on_stderr() -> Iterator[None]:
    """What is printed in the block, also by C++ and by other processes, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
