"""`nvgemm-fusion cache`: the kernels and decisions on disk, and decisions carried from one machine to another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import AsJson, print_json, say, wrong_use

app = typer.Typer(no_args_is_help=True, help="What is kept on disk: compiled kernels and measured decisions.")

TuningFile = Annotated[Path, typer.Argument(help="a tuning file: JSON, see docs/tuning-file.md")]


@app.command()
def info(as_json: AsJson = False) -> None:
    """Say where the cache is, what it holds, how large it may get, and which kernels are banned.

    Example: nvgemm-fusion cache info
    """
    from ..fusion.program import dtype_name
    from ..lowering.store import KernelStore, size_limit
    from ..lowering.tuning import TuningStore

    kernels, decisions = KernelStore(), TuningStore()
    (count, size), limit = kernels.size(), size_limit()
    found: dict[str, Any] = {
        "folder": str(kernels.directory.parent),
        "kernels": count,
        "kernel_bytes": size,
        "kernel_bytes_limit": limit,
        "decisions": sum(1 for _ in decisions.entries()),
        "bans": [
            {
                "candidate": str(spec.candidate),
                "epilogue": spec.program.digest,
                "dtype": dtype_name(spec.dtype),
                "reason": why.reason.value,
                "detail": why.explanation,
            }
            for spec, why in kernels.bans()
        ],
    }
    if as_json:
        print_json(found)
    else:
        room = "no limit" if limit is None else f"limit {limit // 1_000_000} MB"
        say(f"{found['folder']}: {count} kernels ({size / 1e6:.1f} MB, {room}), {found['decisions']} decisions")
        for ban in found["bans"]:
            kernel = f"{ban['candidate']}, {ban['dtype']}, epilogue {ban['epilogue']}"
            say(f"banned: {kernel}: {ban['reason']}: {ban['detail']}")


@app.command()
def clear(
    kernels: Annotated[bool, typer.Option(help="remove the compiled kernels")] = True,
    decisions: Annotated[bool, typer.Option(help="remove the measured decisions")] = True,
    as_json: AsJson = False,
) -> None:
    """Remove what is kept: kernels are compiled again, and GEMMs timed again, when they are needed.

    Example: nvgemm-fusion cache clear --no-kernels
    """
    from ..lowering.store import KernelStore
    from ..lowering.tuning import TuningStore

    try:
        removed_kernels = KernelStore().clear() if kernels else 0
        removed_decisions = TuningStore().clear() if decisions else 0
    except OSError as error:
        wrong_use(f"cannot remove {error.filename}: {error.strerror}")
    if as_json:
        print_json({"kernels": removed_kernels, "decisions": removed_decisions})
    else:
        say(f"removed {removed_kernels} kernels and {removed_decisions} decisions")


@app.command("export")
def export_file(file: TuningFile, as_json: AsJson = False) -> None:
    """Write all decisions that are kept here to a file.

    Example: nvgemm-fusion cache export h200.json
    """
    from ..lowering.tuning import TuningStore, write_file

    entries = list(TuningStore().entries())
    if not entries:
        wrong_use("there is no decision to export: compile something with the flag on, on a GPU")
    try:
        write_file(file, entries)
    except OSError as error:
        wrong_use(f"cannot write {file}: {error.strerror}")
    if as_json:
        print_json({"file": str(file), "decisions": len(entries)})
    else:
        say(f"{len(entries)} decisions in {file}")


@app.command("import")
def import_file(
    file: TuningFile,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="also replace newer measurements")] = False,
    as_json: AsJson = False,
) -> None:
    """Take in the decisions of a file that say something here. Nothing in it is executed.

    Example: nvgemm-fusion cache import h200.json
    """
    from ..lowering.packages import versions
    from ..lowering.targets import current_target
    from ..lowering.tuning import TuningStore, read_file

    try:
        entries = read_file(file)
    except (OSError, ValueError) as error:
        wrong_use(f"cannot read {file}: {getattr(error, 'strerror', None) or error}")
    here = current_target()
    misfits = [entry.misfit(versions(), here.name if here else None) for entry in entries]
    fitting = [entry for entry, misfit in zip(entries, misfits) if misfit is None]
    try:
        taken = TuningStore().merge(fitting, overwrite)
    except OSError as error:
        wrong_use(f"cannot write the cache: {error.strerror}")
    skipped = Counter(str(misfit) for misfit in misfits if misfit is not None)
    if len(fitting) > taken:
        skipped["what is here is as new (--overwrite takes them all the same)"] = len(fitting) - taken
    if as_json:
        print_json({"taken": taken, "skipped": skipped})
        return
    for reason, count in skipped.items():
        say(f"skipped {count}: {reason}")
    say(f"took in {taken} of {len(entries)} decisions")
