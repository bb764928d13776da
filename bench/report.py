"""A decision log as one HTML page that needs no server and no network: figures, filters, and each decision in full.

A log is data from elsewhere. The readers at the end of this file take what does not have the schema's shape as
missing, and the template escapes every value. The script of the page gets no data of its own: it reads the page.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import networkx

from ..fusion.decision import Status
from ..fusion.reasons import Reason
from .drawing import place

LEFT_TO_INDUCTOR = "left to Inductor"
NOT_MEASURED = "not measured"
LONGEST_TEXT = 4000
"""Characters of one value that the page shows."""
MOST_ENTRIES = 24
"""Entries of one list in a decision that the page shows; it says how many it leaves out."""
COUNTED = ("fused", "backend", "from_cache", "unmeasured", "speedup", "mark", "reasons", "target", "versions")
"""What the figures at the top are made of."""


def render(records: Iterable[dict[str, Any]], title: str, limit: int = 500) -> str:
    """The page for the records of a log, as text that UTF-8 can encode.

    The figures at the top count all records; the first `limit` are shown one by one, at about 6 kB each. Raises
    ValueError with one line for the user: no record, a record that is no object, a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"the limit is {limit}, and a report shows at least one decision")
    decisions = []
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"record {number} is not a decision but a {type(record).__name__}")
        decision = _decision(record)
        # Logs get long, so of those that are not shown only what is counted is kept.
        decisions.append(decision if number <= limit else {figure: decision[figure] for figure in COUNTED})
    if not decisions:
        raise ValueError("there is no decision to report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["digits"] = _digits
    shown = decisions[:limit]
    return environment.get_template("report.html.jinja").render(
        title=_text(title),
        summary=_summary(decisions),
        decisions=shown,
        reasons=sorted({reason for decision in shown for reason in decision["reasons"]}),
        backends=sorted({decision["backend"] for decision in shown}),
        most=MOST_ENTRIES,
    ).lstrip()


def _summary(decisions: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures at the top of the page."""
    versions: dict[str, set[str]] = {}
    speedups: dict[str, list[float]] = {}
    for decision in decisions:
        for package, version in decision["versions"].items():
            versions.setdefault(package, set()).add(version)
        if decision["speedup"]:
            # A mean over both would pass modelled times off as measured ones.
            speedups.setdefault(decision["mark"] or "measured", []).append(decision["speedup"])
    reasons = Counter(reason for decision in decisions for reason in decision["reasons"])
    return {
        "count": len(decisions),
        "fused": sum(decision["fused"] for decision in decisions),
        "left_alone": Counter(decision["backend"] for decision in decisions if not decision["fused"]).most_common(),
        "from_cache": sum(decision["from_cache"] for decision in decisions),
        "unmeasured": any(decision["unmeasured"] for decision in decisions),
        "speedups": {kind: (statistics.geometric_mean(known), len(known)) for kind, known in speedups.items()},
        "reasons": [(reason, count, _sentence(reason)) for reason, count in reasons.most_common()],
        "targets": sorted({decision["target"] for decision in decisions} - {""}),
        "versions": {package: sorted(seen) for package, seen in versions.items()},
    }


def _decision(record: dict[str, Any]) -> dict[str, Any]:
    """What the page says of one decision."""
    alternatives = [_alternative(alternative) for alternative in _objects(record.get("alternatives"))]
    chosen, fused = _whole(record.get("chosen")), record.get("fused") is True
    choice = alternatives[chosen] if chosen is not None and chosen < len(alternatives) else None
    timed = sorted((a for a in alternatives if a["us"] is not None), key=lambda a: a["us"])
    untimed = [a for a in alternatives if a["us"] is None]
    why_not = [_refusal(refusal) for refusal in _objects(record.get("refusals"))]
    # The fastest with an epilogue says best why none of them was chosen.
    carrying = [a for a in (*timed, *untimed) if a["epilogue"]]
    if carrying and not fused:
        why_not.append({**carrying[0], "of": f"{carrying[0]['backend']} {carrying[0]['candidate']}"})
    reasons = dict.fromkeys(entry["reason"] for entry in (*why_not, *untimed) if entry["reason"])
    us_chosen, us_unfused = _number(record.get("us_chosen")), _number(record.get("us_best_unfused"))
    problem, nodes = _object(record.get("problem")), _nodes(record, choice)
    sides = [_whole(problem.get(side)) for side in "mnk"]
    return {
        "graph": _text(record.get("graph")),
        "gemm": _text(record.get("gemm")) or "GEMM without a name",
        "size": " × ".join("?" if side is None else str(side) for side in sides) if problem else "",
        "problem": {key: _text(problem.get(key)) or "?" for key in ("dtype", "accumulator", "a_major", "b_major")},
        "target": _text(record.get("target")) or _text(problem.get("target")),
        "versions": {_text(package): _text(version) for package, version in _object(record.get("versions")).items()},
        "from_cache": record.get("from_cache") is True,
        "choice": choice,
        "backend": choice["backend"] if choice else LEFT_TO_INDUCTOR,
        "fused": fused,
        "us_chosen": us_chosen,
        "us_best_unfused": us_unfused,
        "speedup": _number(us_unfused / us_chosen) if us_chosen and us_unfused else None,
        # One time that was not measured is enough for the comparison not to be a measured one.
        "mark": next((a["mark"] for a in timed if a["mark"]), "" if timed else NOT_MEASURED),
        "unmeasured": any(a["mark"] for a in timed),
        "timed": [a for rank, a in enumerate(timed) if rank < MOST_ENTRIES or a is choice],
        # The longest bar, in microseconds. One very slow alternative would make the others look alike.
        "scale": min(max(a["us"] + a["spread"] for a in timed), 2 * timed[0]["us"]) or 1 if timed else 1,
        "untimed": untimed[:MOST_ENTRIES],
        "alternatives": len(alternatives),
        "why_not": why_not,
        "reasons": list(reasons)[:MOST_ENTRIES],
        "nodes": nodes,
        "then": [operator for node in nodes[1:] for operator in node["operators"]],
        "drawing": _drawing(nodes, record.get("edges")),
        "program": _program(record, choice),
    }


def _alternative(alternative: dict[str, Any]) -> dict[str, Any]:
    """One bar of the chart. `mark` is what stands beside a time that was not measured."""
    status = _text(alternative.get("status"))
    us = None if status == Status.FAILED else _number(alternative.get("us"))
    return {
        **_refusal(alternative),
        "backend": _text(alternative.get("backend")) or "unknown backend",
        "candidate": _text(alternative.get("candidate")),
        "epilogue": _text(alternative.get("epilogue")),
        "fused": _texts(alternative.get("fused")),
        "separate": _texts(alternative.get("separate")),
        "us": us,
        "spread": min(_number(alternative.get("spread")) or 0, us or 0),
        "mark": {Status.MEASURED: "", Status.MODELLED: "modelled"}.get(status, NOT_MEASURED),
    }


def _refusal(entry: dict[str, Any]) -> dict[str, Any]:
    """A reason and what exactly; `of` is the alternative that it is about, empty for the region."""
    reason = _text(entry.get("reason"))
    return {"reason": reason, "detail": _text(entry.get("detail")) or _sentence(reason), "of": ""}


def _sentence(reason: str) -> str:
    return next((known.sentence for known in Reason if known == reason), "")


def _nodes(record: dict[str, Any], choice: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The GEMM and the members of the largest region, each with its role in the chosen alternative."""
    nodes = []
    for node in _objects(record.get("nodes")):
        name = _text(node.get("name"))
        role = "fused" if choice and name in choice["fused"] else "not fused"
        nodes.append(
            {
                "name": name,
                "role": role if nodes else "GEMM",
                "operators": _texts(node.get("operators")),
                "source": _texts(node.get("source")),
            }
        )
    return nodes


def _drawing(nodes: list[dict[str, Any]], edges: Any) -> dict[str, Any] | None:
    """The graph of the region and its neighbours, placed; None when the log has no edges, or has them in a circle."""
    graph = networkx.DiGraph()
    for node in nodes:
        graph.add_node(node["name"], role=node["role"], operators=", ".join(node["operators"]))
    for edge in edges if isinstance(edges, list | tuple) else ():
        if len(ends := _texts(edge)) == 2:
            graph.add_edge(*ends)
    left_out = list(graph)[MOST_ENTRIES:]
    graph.remove_nodes_from(left_out)
    placed = place(graph) if graph.edges else None
    if placed is None:
        return None
    outside = {"role": "outside", "operators": ""}
    kernel = {node for node, role in graph.nodes(data="role") if role in ("GEMM", "fused")}
    return {
        **placed,
        "boxes": [{**outside, **graph.nodes[box["node"]], **box} for box in placed["boxes"]],
        "lines": [{**line, "inside": {line["writer"], line["reader"]} <= kernel} for line in placed["lines"]],
        "left_out": len(left_out),
    }


def _program(record: dict[str, Any], choice: dict[str, Any] | None) -> dict[str, Any] | None:
    """The epilogue program of the chosen kernel; where that has none, the one of the largest region."""
    programs = {_text(digest): _object(program) for digest, program in _object(record.get("programs")).items()}
    carried = choice["epilogue"] if choice else ""
    readable = _text(programs.get(carried or _text(record.get("digest")), {}).get("readable"))
    return {"readable": readable, "chosen": bool(carried)} if readable else None


def _digits(us: float) -> str:
    """Microseconds to a tenth, or from a thousand on to the whole."""
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _text(value: Any) -> str:
    """A string of the log at a length that a page can show, without the lone surrogates that UTF-8 cannot encode."""
    if not isinstance(value, str):
        return ""
    value = value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + "…"
    return value.encode("utf-8", "replace").decode("utf-8")


def _texts(value: Any) -> list[str]:
    return [_text(item) for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    """The entries of a list, at the indices that they have in the log."""
    return [_object(item) for item in value] if isinstance(value, list | tuple) else []


def _number(value: Any) -> float | None:
    """A finite number that is not negative; `json` reads NaN and Infinity too."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if right else None


def _whole(value: Any) -> int | None:
    right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if right else None
