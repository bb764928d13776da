"""The graph of a region, placed for drawing: writers above their readers, boxes in rows, lines around the boxes."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import Any

import networkx

BOX_WIDTH, BOX_HEIGHT = 136, 46
BEND_WIDTH = 12
COLUMN_GAP, ROW_GAP, MARGIN = 20, 34, 8
"""Pixels of the drawing at its natural size."""


def place(graph: networkx.DiGraph) -> dict[str, Any] | None:
    """Where each node and each edge of `graph` (from a writer to its reader) goes; None when it has a cycle.

    Returns the `width` and `height` of the drawing, its `boxes` (of which `node`, the left upper corner `x`, `y`, and
    `width`, `height`) and its `lines` (from `writer` to `reader`; `path` is for SVG's path element), all in pixels.
    """
    if not networkx.is_directed_acyclic_graph(graph):
        return None
    rows = _rows(graph)
    routes = {(writer, reader): _route(writer, reader, rows) for writer, reader in graph.edges}
    centres = _centres(rows, routes)
    left = min((centre - BOX_WIDTH / 2 for centre in centres.values()), default=0) - MARGIN
    right = max((centre + BOX_WIDTH / 2 for centre in centres.values()), default=0) + MARGIN
    tops = {row: MARGIN + row * (BOX_HEIGHT + ROW_GAP) for row in range(max(rows.values(), default=0) + 1)}
    stops = {stop: (round(centre - left, 1), tops[_row(stop, rows)]) for stop, centre in centres.items()}
    return {
        "width": round(right - left),
        "height": max(tops.values()) + BOX_HEIGHT + MARGIN,
        "boxes": [
            {
                "node": node,
                "x": stops[node][0] - BOX_WIDTH / 2,
                "y": stops[node][1],
                "width": BOX_WIDTH,
                "height": BOX_HEIGHT,
            }
            for node in graph
        ],
        "lines": [
            {"writer": writer, "reader": reader, "path": _path([stops[stop] for stop in route])}
            for (writer, reader), route in routes.items()
        ],
    }


def _rows(graph: networkx.DiGraph) -> dict[str, int]:
    """The row of each node: below all that it reads, and what reads nothing right above its first reader."""
    rows = {node: row for row, nodes in enumerate(networkx.topological_generations(graph)) for node in nodes}
    for node in graph:
        if graph.in_degree(node) == 0 and graph.out_degree(node) > 0:
            rows[node] = min(rows[reader] for reader in graph.successors(node)) - 1
    return rows


def _route(writer: str, reader: str, rows: dict[str, int]) -> list[Hashable]:
    """The stops of an edge: its two nodes, and between them a bend in each row that it passes through, so that the
    line goes beside the boxes there and not behind them."""
    return [writer, *((writer, reader, row) for row in range(rows[writer] + 1, rows[reader])), reader]


def _row(stop: Hashable, rows: dict[str, int]) -> int:
    return stop[2] if isinstance(stop, tuple) else rows[stop]


def _centres(rows: dict[str, int], routes: dict[tuple[str, str], list[Hashable]]) -> dict[Hashable, float]:
    """How far right of the middle the centre of each stop is. Each row is ordered by where its writers are, which
    keeps lines from crossing in graphs as small as these."""
    writers: dict[Hashable, list[Hashable]] = {stop: [] for stop in rows}
    for route in routes.values():
        for above, below in pairwise(route):
            writers.setdefault(below, []).append(above)
    members: dict[int, list[Hashable]] = {}
    for stop in writers:
        members.setdefault(_row(stop, rows), []).append(stop)
    centres: dict[Hashable, float] = {}
    for row in sorted(members):
        above = {stop: [centres[writer] for writer in writers[stop]] for stop in members[row]}
        order = sorted(members[row], key=lambda stop: sum(above[stop]) / len(above[stop]) if above[stop] else 0.0)
        widths = [BEND_WIDTH if isinstance(stop, tuple) else BOX_WIDTH for stop in order]
        edge = -(sum(widths) + COLUMN_GAP * (len(order) - 1)) / 2
        for stop, width in zip(order, widths):
            centres[stop] = edge + width / 2
            edge += width + COLUMN_GAP
    return centres


def _path(stops: list[tuple[float, float]]) -> str:
    """From under the first box to the top of the last: curves between the rows, straight down through a row."""
    (x, y), *rest = stops
    y += BOX_HEIGHT
    steps = [f"M{x:g} {y:g}"]
    for next_x, next_y in rest:
        middle = (y + next_y) / 2
        steps.append(f"C{x:g} {middle:g} {next_x:g} {middle:g} {next_x:g} {next_y:g}")
        x, y = next_x, next_y + BOX_HEIGHT
        steps.append(f"V{y:g}")
    return " ".join(steps[:-1])
