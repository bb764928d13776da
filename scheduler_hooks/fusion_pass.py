"""The scheduler pass: for each GEMM with candidates, finds the regions, has the alternatives timed, and applies
the decision to the scheduler's nodes.

The pass stands in `config._pre_fusion_custom_pass` for the length of one scheduler only: the scheduling backend puts
it there when a graph is to be fused (`put_in_front`), and it takes itself out when it is called, calling first what
a user has set. So a user may set a pass at any time, and finds it as it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import networkx
from torch._inductor import config, ir
from torch._inductor.scheduler import BaseSchedulerNode, FusedSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from ..fusion.decision import Backend, Decision, choose
from ..fusion.program import ProgramBuilder
from ..fusion.reasons import Reason, Refusal
from ..fusion.regions import RegionSearch, find_regions, producers
from ..lowering.packages import versions
from ..lowering.targets import Target
from . import torch_versions, tuning
from .alternatives import compile_ahead, compile_stock_ahead, contenders, time_stock_ahead
from .capture import BufferAccess, RegionCapture
from .choices import NvgemmChoice, graph_name, is_enabled, origin, publish, target_of_graph
from .contest import Contender, Contest
from .gemm import Gemm, product_access
from .graph import draw

logger = logging.getLogger("nvgemm_fusion")

Pass = Callable[[list[BaseSchedulerNode]], list[BaseSchedulerNode]]


def put_in_front() -> None:
    """Has the pass called by the scheduler that is being constructed, before a pass that the user has set."""
    user_pass = config._pre_fusion_custom_pass
    if not isinstance(user_pass, FusionPass):
        config._pre_fusion_custom_pass = FusionPass(user_pass)


class FusionPass:
    """Called with the scheduler's nodes in topological order; returns them with decided regions fused."""

    def __init__(self, user_pass: Pass | None) -> None:
        self.user_pass = user_pass

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        config._pre_fusion_custom_pass = self.user_pass
        if self.user_pass is not None:
            nodes = self.user_pass(nodes)
        if not nodes or not is_enabled():
            return nodes
        scheduler = nodes[0].scheduler
        torch_versions.complete(scheduler)
        choices = {node: _take_out_candidates(node.node)[0] for node in nodes if _has_candidates(node)}
        if len(choices) > 1:
            _start_ahead(choices, nodes)
        for gemm, choice in choices.items():
            try:
                nodes = _decide(gemm, choice, nodes)
            except Exception:  # a compile must not fail because of us: this GEMM stays as stock would have it
                logger.warning("left %s to Inductor", gemm.get_name(), exc_info=True)
        return scheduler.topological_sort_schedule(nodes)


def _has_candidates(node: BaseSchedulerNode) -> bool:
    return (
        isinstance(node, SchedulerNode)
        and isinstance(node.node, ir.MultiTemplateBuffer)
        and any(isinstance(choice, NvgemmChoice) for choice in node.node.choices)
    )


def _take_out_candidates(buffer: ir.MultiTemplateBuffer) -> list[NvgemmChoice]:
    """Our candidates of a template buffer, which afterwards has only Inductor's own choices.

    The list is changed in place: the function that times the choices holds the same one.
    """
    ours = [choice for choice in buffer.choices if isinstance(choice, NvgemmChoice)]
    buffer.choices[:] = [choice for choice in buffer.choices if not isinstance(choice, NvgemmChoice)]
    return ours


def _start_ahead(choices: Mapping[SchedulerNode, NvgemmChoice], nodes: list[BaseSchedulerNode]) -> None:
    """Starts the compilation of what will compete for each GEMM, so that it runs while one after the other is decided.

    Of nodes that several GEMMs could have, as the product of a gated MLP, the first one's kernels alone are started:
    whatever fuses there takes them, and the others would be in vain. Our kernels come before Inductor's: which of those
    compete is known when Inductor has timed its choices, which is a good time for ours to compile.
    """
    contests: dict[SchedulerNode, tuple[Contest, frozenset[str]]] = {}
    wanted: frozenset[str] = frozenset()
    for gemm, choice in choices.items():
        with _only_a_warning(gemm):
            found = _contest(gemm, choice, nodes)
            if not isinstance(found, Refusal) and not (_is_kept() and tuning.is_known(found[0])):
                contests[gemm] = found[0], wanted
                wanted = wanted.union(found[0].members)
                compile_ahead(*contests[gemm])
    # The last first: of GEMMs that look alike, Inductor compiles the choices of the first alone, and drops from its
    # list alone what does not compile. The others would miss a time for that, and have all choices timed again.
    for gemm in reversed(contests):
        with _only_a_warning(gemm):
            time_stock_ahead(contests[gemm][0])
    for gemm in contests:
        with _only_a_warning(gemm):
            compile_stock_ahead(contests[gemm][0])


@contextlib.contextmanager
def _only_a_warning(gemm: SchedulerNode) -> Iterator[None]:
    """What is not started now is when the GEMM is decided; and what goes wrong then, is reported then."""
    try:
        yield
    except Exception:
        logger.warning("kernels for %s are not compiled ahead", gemm.get_name(), exc_info=True)


def _is_kept() -> bool:
    """Whether decisions are kept on disk."""
    return config.nvgemm_fusion_cache and not config.nvgemm_fusion_force


def _contest(
    node: SchedulerNode, choice: NvgemmChoice, nodes: list[BaseSchedulerNode]
) -> tuple[Contest, list[Refusal]] | Refusal:
    """The contest for one GEMM, and why its regions are not larger."""
    buffer, target = node.node, target_of_graph()
    if torch_versions.is_placed(node):
        return Refusal(Reason.PLACED, node.get_name())
    if not isinstance(target, Target):
        return target
    gemm = Gemm.of(buffer.inputs, buffer.get_layout(), target, choice.alpha, choice.beta)
    if not isinstance(gemm, Gemm):
        return gemm
    builder = ProgramBuilder()
    product = BufferAccess(buffer.get_name(), product_access(buffer.get_layout()))
    capture = RegionCapture(gemm.size, product, builder, gemm.start(builder))
    graph = draw(node.scheduler, nodes, gemm.size[0] * gemm.size[1], _refuser(capture, node))
    by_name = {n.get_name(): n for n in nodes}
    search = _as_exact(find_regions(graph, node.get_name()), graph, by_name)
    return Contest(node, gemm, target, capture, graph, search.regions, by_name, choice), search.refusals


def _decide(
    node: SchedulerNode, choice: NvgemmChoice, nodes: list[BaseSchedulerNode]
) -> list[BaseSchedulerNode]:
    """Decides one GEMM, writes the decision down, and returns the nodes with it applied."""
    found = _contest(node, choice, nodes)
    if isinstance(found, Refusal):
        _write(node, None, (), None, (found,))
        return nodes
    contest, outside = found
    winner = tuning.recall(contest) if _is_kept() else None
    entrants = contenders(contest) if winner is None else [winner]
    if not isinstance(entrants, list):
        _write(node, contest.gemm, (), None, (*outside, entrants))
        return nodes
    explained, chosen = (entrants[0].alternative,), 0
    if winner is None:
        explained, chosen = choose([entrant.alternative for entrant in entrants], force=config.nvgemm_fusion_force)
    refusals = (*outside, *contest.refusals)
    decision = _write(node, contest.gemm, explained, chosen, refusals, contest, from_cache=winner is not None)
    if chosen is None:
        return nodes
    if _is_kept() and winner is None:
        tuning.keep(contest, entrants[chosen], decision)
    return _apply(entrants[chosen], contest, nodes)


def _as_exact(search: RegionSearch, graph: networkx.DiGraph, nodes: dict[str, BaseSchedulerNode]) -> RegionSearch:
    """The regions whose results are no less exact than those of Inductor's own kernel.

    What computes an operand is a part of that kernel in stock's code, and the operand is never rounded. In a kernel of
    its own, it writes the operand to memory, in the dtype of its buffer.
    """
    if config.emulate_precision_casts:  # then Inductor's kernels round it, too
        return search
    regions, refusals = [], list(search.refusals)
    for region in search.regions:
        beside = producers(graph, region.gemm, region.nodes)
        dtypes = {name: V.graph.get_dtype(name) for node in beside for name in nodes[node].get_buffer_names()}
        rounded = [name for name, dtype in dtypes.items() if dtype.is_floating_point and dtype.itemsize < 4]
        if rounded:
            refusals.append(Refusal(Reason.ROUNDS_MORE, f"{rounded[0]} would be rounded to {dtypes[rounded[0]]}"))
        else:
            regions.append(region)
    return RegionSearch(regions, list(dict.fromkeys(refusals)))


def _refuser(capture: RegionCapture, gemm: SchedulerNode) -> Callable[[BaseSchedulerNode], Refusal | None]:
    """Records node after node in `capture`, as far as they depend on the GEMM; answers why one was not recorded."""
    scheduling = gemm.scheduler.get_backend(gemm.get_device())

    def refusal_of(node: BaseSchedulerNode) -> Refusal | None:
        template = node.get_template_node()
        if template is not None and template.get_name() in scheduling.decided:
            return Refusal(Reason.TAKEN, node.get_name())
        if torch_versions.is_placed(node):
            return Refusal(Reason.PLACED, node.get_name())
        if not any(dependency.name in capture.written for dependency in node.read_writes.reads):
            return Refusal(Reason.INDEX_PATTERN, f"{node.get_name()} does not read the product")
        return capture.add(node)

    return refusal_of


def _apply(winner: Contender, contest: Contest, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Makes the template buffer the winner, and fuses the winner's nodes into one."""
    node, buffer = contest.node, contest.node.node
    scheduling = node.scheduler.get_backend(node.get_device())
    scheduling.decided.add(buffer.get_name())
    if winner.call is not None:
        scheduling.calls[buffer.get_name()] = winner.call
    if winner.region is None:
        # Inductor finalises the buffer as its fastest choice, and there is only one.
        buffer._choice_timings[None] = {winner.choice: winner.alternative.timing.us / 1e3}
        return nodes
    if winner.alternative.backend is Backend.TRITON:
        buffer.finalize_as_triton_caller(winner.choice)
    members = [contest.nodes[name] for name in winner.region.nodes]
    fused = functools.reduce(FusedSchedulerNode.fuse, members, node)
    node.scheduler.name_to_fused_node.update({part.get_name(): fused for part in fused.get_nodes()})
    return [fused if n is node else n for n in nodes if n not in members]


def _write(
    node: SchedulerNode,
    gemm: Gemm | None,
    alternatives: Sequence[Any],
    chosen: int | None,
    refusals: tuple[Refusal, ...],
    contest: Contest | None = None,
    from_cache: bool = False,
) -> Decision:
    members = [] if contest is None else [contest.nodes[name] for name in contest.members]
    decision = Decision(
        graph=graph_name(),
        gemm=node.node.get_name(),
        problem=None if gemm is None else gemm.problem,
        programs=() if contest is None else tuple(c.program for c in contest.programs.values()),
        alternatives=tuple(alternatives),
        chosen=chosen,
        refusals=tuple(dict.fromkeys(refusals)),
        nodes=tuple(origin(part.get_name(), part.node.get_origins()) for part in (node, *members)),
        edges=() if contest is None else contest.edges,
        target="" if contest is None else contest.target.name,
        from_cache=from_cache,
        versions=versions(),
    )
    publish(decision)
    return decision
