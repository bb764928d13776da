"""Decision records as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ..fusion.log import closest_fused

if TYPE_CHECKING:
    from .difference import Change
    from .doctor import Finding


def decision_table(numbered: Iterable[tuple[int, dict[str, Any]]], title: str) -> Table:
    """One row a GEMM, with its number in the log: its problem and what comes after it, the choice, the alternatives
    with times, and why not more."""
    numbered = list(numbered)
    modelled = any(a["status"] == "modelled" for _, record in numbered for a in record["alternatives"])
    unit = "modelled us" if modelled else "us"
    table = Table(title=title, show_lines=True)
    for heading in ("", "GEMM", "choice", f"alternatives, {unit} (fastest of each kind)", "why not more"):
        table.add_column(heading, no_wrap=heading.startswith("alternatives"))
    for number, record in numbered:
        table.add_row(str(number), *("\n".join(lines) for lines in _row(record)))
    return table


def change_table(changes: Iterable[Change], title: str) -> Table:
    """One row a change between two logs."""
    table = Table(title=title)
    for heading in ("change", "GEMM", "from what to what"):
        table.add_column(heading)
    for change in changes:
        record = change.after or change.before
        table.add_row(change.kind, " ".join(_gemm(record)), escape(change.detail))
    return table


def finding_table(findings: Iterable[Finding]) -> Table:
    """One row a thing that `doctor` has looked at."""
    table = Table()
    for heading in ("", "state", "found", "what to do"):
        table.add_column(heading)
    colours = {"fine": "green", "note": "yellow", "fault": "red"}
    for finding in findings:
        state = finding.state.value
        table.add_row(finding.name, f"[{colours[state]}]{state}[/]", escape(finding.found), escape(finding.fix))
    return table


def _gemm(record: dict[str, Any]) -> list[str]:
    """The product, its size, and what comes after it."""
    problem = record["problem"]
    lines = [f"{record['graph']} {record['gemm']}"]
    if problem is not None:
        lines.append(f"{problem['m']} x {problem['n']} x {problem['k']}")
    operators = [operator for node in record["nodes"][1:] for operator in node["operators"]]
    if operators:
        lines.append(f"then {', '.join(operators)}")
    return list(map(escape, lines))


def _row(record: dict[str, Any]) -> tuple[list[str], ...]:
    chosen, alternatives = record["chosen"], record["alternatives"]
    gemm = _gemm(record)
    if chosen is None:
        return gemm, ["left to Inductor"], [], _why_not(record)
    choice = alternatives[chosen]
    time = f"{choice['us']:.1f} us" + (" (modelled)" if choice["status"] == "modelled" else "")
    return gemm, [_describe(choice, record["fused"]), time], _best_of_each_kind(alternatives), _why_not(record)


def _describe(alternative: dict[str, Any], bold: bool) -> str:
    carried = f" + {len(alternative['fused'])} fused" if alternative["fused"] else ""
    carried = carried or (" + bias fused" if alternative["epilogue"] else "")
    text = escape(f"{alternative['backend']} {alternative['candidate']}{carried}")
    return f"[bold]{text}[/bold]" if bold else text


def _best_of_each_kind(alternatives: list[dict[str, Any]]) -> list[str]:
    """A line for each (backend, fused or not): the fastest, or why none of them has a time."""
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for alternative in alternatives:
        kinds.setdefault((alternative["backend"], bool(alternative["fused"])), []).append(alternative)
    lines = []
    for (backend, fused), members in kinds.items():
        name = f"{backend} {'fused' if fused else 'unfused'}"
        timed = [member for member in members if member["us"] is not None]
        if timed:
            best = min(timed, key=lambda member: member["us"])
            lines.append(f"{best['us']:8.1f} {name} (of {len(members)})")
        else:
            lines.append(f"      -- {name}: {members[0]['reason']}")
    return lines


def _why_not(record: dict[str, Any]) -> list[str]:
    """The reasons why nothing more was fused, and why a fused kernel was not chosen."""
    lines = [f"{r['reason']}: {r['detail']}" for r in record["refusals"]]
    closest = closest_fused(record)
    if closest is not None:
        lines.append(f"fused kernel {closest['reason']}: {closest['detail']}")
    return list(map(escape, lines))
