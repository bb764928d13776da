"""Regions: which readers of a GEMM may go into its epilogue.

The question is one about a graph. `scheduler_hooks` draws the scheduler's nodes as a `networkx.DiGraph` (an edge
from a node to each reader of what it writes) and says of each node whether it is pointwise over the product, or
why not. Legal here means: convex (no path leaves the region and comes back), every node pointwise over the
product, and every value that leaves it going to readers that could not have computed it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    Grows through the descendants of the GEMM in topological order: a node joins when it may be in an epilogue and
    everything that it reads from the GEMM's descendants has joined before (which keeps the region convex).
    """
    search = RegionSearch()
    descendants = networkx.descendants(graph, gemm)
    if not descendants:
        search.refusals.append(Refusal(Reason.NO_READER))
        return search

    grown: list[str] = []
    explained: set[str] = set()  # outside, for a reason that is noted here or at what they read
    position = {node: index for index, node in enumerate(graph)}
    for node in networkx.lexicographical_topological_sort(graph.subgraph(descendants), key=position.__getitem__):
        needed = {p for p in graph.predecessors(node) if p == gemm or p in descendants}
        if needed & explained:
            explained.add(node)
        if needed & explained or not needed & {gemm, *grown}:
            continue
        refusal = _facts(graph, node).refusal
        if refusal is None and not needed <= {gemm, *grown}:
            refusal = Refusal(Reason.NOT_CONVEX, f"{node} also reads what is computed outside")
        if refusal is None:
            grown.append(node)
        elif refusal.reason is not Reason.NOT_POINTWISE or _facts(graph, node).absorbs:
            explained.add(node)
            search.refusals.append(refusal)
        # (That the next GEMM or an external kernel reads the result is no refusal: it is where every region ends.)

    for length in range(len(grown), 0, -1):
        region = _as_region(graph, gemm, grown[:length], grown)
        if isinstance(region, Region):
            search.regions.append(region)
        elif region not in search.refusals:
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


def _as_region(graph: networkx.DiGraph, gemm: str, nodes: list[str], grown: list[str]) -> Region | Refusal:
    """`nodes`, which are the first of `grown`, as a region, if what leaves it is not computed by its readers anyway.

    Inductor computes a pointwise value inside the kernel that reads it, so writing it to memory may cost more than it
    saves. A value that is written in any case (another kind of kernel reads it, or it is an output of the graph) costs
    nothing to a further reader: there, the region may end, or go on and store it on the way.
    """
    stored = []
    for node in (gemm, *nodes):
        outside = [reader for reader in graph.successors(node) if reader not in nodes]
        absorbing = [reader for reader in outside if _facts(graph, reader).absorbs]
        is_written = _facts(graph, node).escapes or len(outside) > len(absorbing)
        unwilling = [reader for reader in absorbing if reader not in grown or not is_written]
        if unwilling:
            return Refusal(Reason.READER_FUSES, f"{unwilling[0]} reads {node}")
        if is_written:
            stored.append(node)
    return Region(gemm, tuple(nodes), tuple(stored)) if stored else Refusal(Reason.NO_READER)


def _facts(graph: networkx.DiGraph, node: str) -> NodeFacts:
    return graph.nodes[node]["facts"]
