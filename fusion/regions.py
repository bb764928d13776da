"""Regions: which readers of a GEMM may go into its epilogue.

The question is one about a graph. `scheduler_hooks` draws the scheduler's nodes as a `networkx.DiGraph` (an edge
from a node to each reader of what it writes) and says of each node whether it is pointwise over the product, or
why not. Legal here means: convex (no path leaves the region and comes back), every node pointwise over the
product, and less to be moved through memory than without it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx

from .reasons import Reason, Refusal


@dataclass(frozen=True)
class NodeFacts:
    """What the graph knows of a node besides its edges; kept as the node attribute `facts`.

    refusal: why the node cannot be part of any epilogue, or None when it can. escapes: its result is an output of
    the graph. absorbs: Inductor would compute what this node reads inside its own kernel (it is pointwise or a
    reduction; a template and an external kernel are not). spans: it is pointwise over as many elements as the
    product has.
    """

    refusal: Refusal | None = None
    escapes: bool = False
    absorbs: bool = False
    spans: bool = False


@dataclass(frozen=True)
class Region:
    """A GEMM and the nodes that go into its epilogue, in a topological order. `stored`: those of them (and the GEMM
    itself, where the product is needed) whose values leave the epilogue, in the same order."""

    gemm: str
    nodes: tuple[str, ...]
    stored: tuple[str, ...]


@dataclass
class RegionSearch:
    """What `find_regions` found: the legal regions, longest first, and why they end where they end."""

    regions: list[Region] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def find_regions(graph: networkx.DiGraph, gemm: str) -> RegionSearch:
    """The largest legal region around `gemm` and its legal shorter prefixes.

    The nodes of the graph stand in a topological order. Grows through the descendants of the GEMM in that order: a node
    joins when it may be in an epilogue and everything that it reads from the GEMM's descendants has joined before
    (which keeps the region convex).
    """
    search = RegionSearch()
    descendants = networkx.descendants(graph, gemm)
    if not descendants:
        search.refusals.append(Refusal(Reason.NO_READER))
        return search

    grown: list[str] = []
    explained: set[str] = set()  # outside, for a reason that is noted here or at what they read
    for node in _readers_in_order(graph, [gemm], grown):
        needed = {p for p in graph.predecessors(node) if p == gemm or p in descendants}
        if needed & explained:
            continue
        refusal = _facts(graph, node).refusal
        if refusal is None and not needed <= {gemm, *grown}:
            refusal = Refusal(Reason.NOT_CONVEX, f"{node} also reads what is computed outside")
        if refusal is None:
            grown.append(node)
        elif refusal.reason is not Reason.NOT_POINTWISE or _facts(graph, node).absorbs:
            explained |= {node} | networkx.descendants(graph, node)
            search.refusals.append(refusal)
        # (That the next GEMM or an external kernel reads the result is no refusal: it is where every region ends.)

    for length in range(len(grown), 0, -1):
        region = _as_region(graph, gemm, grown[:length])
        if isinstance(region, Region):
            search.regions.append(region)
        elif not search.regions and region not in search.refusals:  # of a shorter prefix nobody asks why not
            search.refusals.append(region)
    if not search.regions and not search.refusals:
        search.refusals.append(Refusal(Reason.NO_READER))
    return search


def producers(graph: networkx.DiGraph, gemm: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """The pointwise nodes beside `gemm` that compute what `nodes` (its readers) read.

    In stock's code they are no kernels of their own: Inductor computes them in the kernel of `nodes`. Not so when
    the GEMM itself waits for them.
    """
    around = networkx.ancestors(graph, gemm) | networkx.descendants(graph, gemm) | {gemm}
    read = dict.fromkeys(producer for node in nodes for producer in graph.predecessors(node))
    return tuple(node for node in read if node not in around and _facts(graph, node).spans)


def absorbers(graph: networkx.DiGraph, gemm: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes that read the product or what `nodes` (in its epilogue) write, and would share a kernel with `nodes`
    in stock's code. A reader that also waits for something else behind `nodes`, as a later residual does, cannot."""
    behind = set(nodes).union(*(networkx.descendants(graph, node) for node in nodes))
    found: list[str] = []
    for node in _readers_in_order(graph, [gemm, *nodes], found):
        waits_for = set(graph.predecessors(node)) & behind
        if node not in nodes and _facts(graph, node).absorbs and waits_for <= {*nodes, *found}:
            found.append(node)
    return tuple(node for node in found if {gemm, *nodes} & set(graph.predecessors(node)))


def _readers_in_order(graph: networkx.DiGraph, start: Sequence[str], more: Sequence[str]) -> Iterator[str]:
    """The readers of `start`, and of what is appended to `more` on the way, each once, in a topological order."""
    position = {node: index for index, node in enumerate(graph)}
    waiting = [position[reader] for node in start for reader in graph.successors(node)]
    order, seen, known = list(graph), set(), 0
    heapq.heapify(waiting)
    while waiting:
        node = order[heapq.heappop(waiting)]
        if node not in seen:
            seen.add(node)
            yield node
            for added in more[known:]:
                for reader in graph.successors(added):
                    heapq.heappush(waiting, position[reader])
            known = len(more)


def _as_region(graph: networkx.DiGraph, gemm: str, nodes: list[str]) -> Region | Refusal:
    """`nodes` as a region, unless fusing them moves as much through memory as stock does.

    Inductor computes a pointwise value inside the kernel that reads it. So with a reader that would absorb it, a value
    gains only if it is written in any case (a GEMM or a later kernel reads it, or it is an output of the graph) and the
    product is not: then the product is what memory is spared.
    """
    stored, absorbed = [], None
    near = absorbers(graph, gemm, nodes)
    for node in (gemm, *nodes):
        outside = [reader for reader in graph.successors(node) if reader not in nodes]
        absorbing = [reader for reader in outside if reader in near]
        is_written = _facts(graph, node).escapes or len(outside) > len(absorbing)
        if absorbing:
            absorbed = Refusal(Reason.READER_FUSES, f"{absorbing[0]} reads {node}")
            if node == gemm or not is_written:
                return absorbed
        if is_written:
            stored.append(node)
    if absorbed is not None and gemm in stored:
        return absorbed
    return Region(gemm, tuple(nodes), tuple(stored)) if stored else Refusal(Reason.NO_READER)


def _facts(graph: networkx.DiGraph, node: str) -> NodeFacts:
    return graph.nodes[node]["facts"]
