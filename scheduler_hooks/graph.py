"""Scheduler nodes -> the graph in which `fusion.regions` looks for regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
    OutputNode,
    Scheduler,
)

from ..fusion.reasons import Refusal
from ..fusion.regions import NodeFacts


def draw(
    scheduler: Scheduler,
    nodes: Sequence[BaseSchedulerNode],
    elements: int,
    refusal_of: Callable[[BaseSchedulerNode], Refusal | None],
) -> networkx.DiGraph:
    """The nodes by name, in their order, with an edge for every dependency (also one of order alone).

    elements: how many the product has. `refusal_of` is asked for each node, in order, why it cannot be part of the
    epilogue in question.
    """
    graph = networkx.DiGraph()
    owner = {part.get_name(): node.get_name() for node in nodes for part in node.get_nodes()}
    for node in nodes:
        outputs = node.get_outputs()
        absorbs = not (node.is_template() or isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode)))
        facts = NodeFacts(
            refusal=refusal_of(node),
            escapes=any(isinstance(user.node, OutputNode) for buffer in outputs for user in buffer.users),
            absorbs=absorbs,
            spans=absorbs and not node.is_reduction() and node.group[1][0] == elements,
        )
        graph.add_node(node.get_name(), facts=facts)
    for node in nodes:
        for dependency in node.unmet_dependencies:
            producer = scheduler.name_to_buf[dependency.name].defining_op_name()
            if owner.get(producer, node.get_name()) != node.get_name():
                graph.add_edge(owner[producer], node.get_name())
    return graph
