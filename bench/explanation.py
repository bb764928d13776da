"""One decision in full, for the terminal: what it was about, what was tried, and the kernel's source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from ..fusion.program import EpilogueProgram
from ..lowering.emit import emit


def explanation(record: dict[str, Any]) -> Iterator[RenderableType]:
    """The parts of a decision record, top to bottom."""
    problem = record["problem"]
    title = f"{record['graph']} {record['gemm']}"
    if problem is None:
        yield Panel("a GEMM that got no candidates", title=title)
    else:
        sizes = f"{problem['m']} x {problem['n']} x {problem['k']}"
        layouts = f"A {problem['a_major']}-major, B {problem['b_major']}-major"
        where = f"{record['target']} ({problem['target']})" if record["target"] else problem["target"]
        yield Panel(escape(f"{sizes}  {problem['dtype']}  {layouts}  on {where}"), title=title)
    yield _nodes(record)
    for refusal in record["refusals"]:
        yield escape(f"not fused further: {refusal['reason']}: {refusal['detail']}")
    if record["alternatives"]:
        yield _alternatives(record)
    elif record["chosen"] is None:
        yield "left to Inductor"
    for digest, program in record["programs"].items():
        yield Panel(escape(program["readable"]), title=f"epilogue program {digest}")
    digest = _chosen_epilogue(record)
    if digest:
        source = emit(EpilogueProgram.from_json(record["programs"][digest]["ssa"]))
        yield Panel(Syntax(source, "python", background_color="default"), title=f"source of the epilogue {digest}")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield escape(f"decided with {versions}" + (" (earlier, and kept)" if record["from_cache"] else ""))


def _nodes(record: dict[str, Any]) -> Table:
    table = Table(title="nodes", title_justify="left")
    for heading in ("node", "operators", "where it comes from"):
        table.add_column(heading)
    for node in record["nodes"]:
        table.add_row(*map(escape, (node["name"], ", ".join(node["operators"]), "\n".join(node["source"]))))
    return table


def _alternatives(record: dict[str, Any]) -> Table:
    table = Table(title="alternatives, fastest first", title_justify="left")
    for heading in ("", "us", "±", "backend", "candidate", "fused", "separate", "compile s", "why not"):
        table.add_column(heading, justify="right" if heading in ("us", "±", "compile s") else "left")
    numbered = list(enumerate(record["alternatives"]))
    for index, alternative in sorted(numbered, key=lambda pair: (pair[1]["us"] is None, pair[1]["us"])):
        time = "--" if alternative["us"] is None else f"{alternative['us']:.1f}"
        why = "" if alternative["reason"] is None else f"{alternative['reason']}: {alternative['detail']}"
        table.add_row(
            "*" if index == record["chosen"] else "",
            time + (" modelled" if alternative["status"] == "modelled" else ""),
            "--" if alternative["spread"] is None else f"{alternative['spread']:.1f}",
            alternative["backend"],
            escape(alternative["candidate"]),
            escape(", ".join(alternative["fused"])),
            escape(", ".join(alternative["separate"])),
            f"{alternative['compile_s']:.1f}" if alternative["compile_s"] else "",
            escape(why),
        )
    return table


def _chosen_epilogue(record: dict[str, Any]) -> str:
    """The digest of the program that the chosen kernel carries; empty when it carries none."""
    return "" if record["chosen"] is None else record["alternatives"][record["chosen"]]["epilogue"]
