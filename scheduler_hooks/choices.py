"""Candidates into the template buffer: called for every GEMM that Inductor lowers with several choices.

Our candidates stand beside those of ATen and Triton in the MultiTemplateBuffer until the scheduler pass decides.
They are never benchmarked by Inductor's own autotuning: the pass takes them out first.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.autotune_process import use_pipelined_autotuning
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._inductor.virtualized import V

from ..fusion import log, trace
from ..fusion.decision import Decision, NodeOrigin
from ..fusion.program import ProgramBuilder, Store
from ..fusion.reasons import Reason, Refusal
from ..lowering.candidates import candidates
from ..lowering.compiler import shared_compiler
from ..lowering.kernel import Candidate, KernelSpec
from ..lowering.packages import missing_packages
from ..lowering.targets import Target, current_target
from .gemm import Gemm
from .virtual_device import current_virtual_device

logger = logging.getLogger("nvgemm_fusion")

aten = torch.ops.aten
GEMM_OPS = {aten.mm.default: 2, aten.addmm.default: 3}
"""The ATen operators whose GEMMs get candidates, with their number of tensors."""

OTHER_GEMM_OPS = (aten.bmm.default, aten.baddbmm.default, aten._int_mm.default, aten._scaled_mm.default)
"""GEMMs that get none yet, but a line in the log."""


class NvgemmChoice(ExternKernelCaller):
    """A candidate in Inductor's list of choices: an external kernel that writes to a given output.

    alpha and beta: the scalars of `aten.addmm` (1 for mm), which Inductor keeps with each of its own choices. known_as:
    the key of one of those. Inductor compiles its choices, unless it finds in its cache how long each of them takes; of
    ours it would find nothing.
    """

    def __init__(
        self,
        candidate: Candidate,
        inputs: list[Any],
        layout: ir.Layout,
        alpha: float,
        beta: float,
        known_as: str,
    ) -> None:
        ir.ChoiceCaller.__init__(self, f"nvgemm_{candidate}".replace(" ", "_"), inputs, layout, str(candidate))
        self.candidate = candidate
        self.alpha = alpha
        self.beta = beta
        self.known_as = known_as
        self.has_out_variant = True

    def __str__(self) -> str:
        return f"NvgemmChoice({self.candidate})"

    def hash_key(self) -> str:
        return self.known_as

    def call_name(self) -> str:
        return self.name

    def to_callable(self) -> Any:
        raise NotImplementedError("candidates are timed by the scheduler pass")

    def output_node(self) -> ir.TensorBox:
        return ir.TensorBox.create(NvgemmBuffer(self))


class NvgemmBuffer(ir.TemplateBuffer):
    """A GEMM for which a candidate was chosen with nothing fused: what stands in the graph afterwards."""

    def __init__(self, choice: NvgemmChoice) -> None:
        super().__init__(choice.layout, choice.input_nodes, None)
        self.choice = choice


def is_enabled() -> bool:
    """Whether GEMMs of the graph in hand are to be fused at all."""
    if not config.nvgemm_epilogue_fusion or V.graph.cpp_wrapper or V.graph.aot_mode or V.graph.fx_wrapper:
        return False
    if config.deterministic or use_pipelined_autotuning() or not config.triton.codegen_upcast_to_fp32:
        return False
    missing = missing_packages()
    if missing:
        _say_what_is_missing(tuple(missing))
    return not missing


@functools.lru_cache(maxsize=None)
def _say_what_is_missing(missing: tuple[str, ...]) -> None:
    logger.warning(
        "nvgemm_epilogue_fusion is set, but %s cannot be found: compiling without it. To install: pip install %s",
        " and ".join(missing),
        " ".join(missing),
    )


def target_of_graph() -> Target | Refusal:
    """The GPU that the graph is compiled for."""
    virtual = current_virtual_device()
    return current_target() if virtual is None else virtual.target


def add_candidates(choices: list[Any]) -> list[Any]:
    """Inductor's preprocessing function: the choices of one GEMM, with our candidates appended."""
    if not choices or not is_enabled():
        return choices
    try:
        return _with_candidates(choices)
    except Exception:  # a compile must not fail because of us
        logger.warning("no candidates for %s", V.graph.current_node, exc_info=True)
        return choices


def _with_candidates(choices: list[Any]) -> list[Any]:
    node = V.graph.current_node
    inputs, layout = choices[0].input_nodes, choices[0].layout
    if node.target in OTHER_GEMM_OPS:
        _log_refusal(node, Refusal(Reason.UNSUPPORTED_OP, str(node.target)))
        return choices
    if GEMM_OPS.get(node.target, 0) < len(inputs) or len(inputs) not in (2, 3):
        return choices
    # Lowering addmm may lower a plain mm on the way (beta == 0): the scalars belong to three tensors only.
    scalars = node.kwargs if len(inputs) == 3 else {}
    alpha, beta = scalars.get("alpha", 1), scalars.get("beta", 1)
    if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        _log_refusal(node, Refusal(Reason.SYMBOLIC_SHAPE, "alpha or beta"))
        return choices
    target = target_of_graph()
    gemm = Gemm.of(inputs, layout, target, alpha, beta) if isinstance(target, Target) else target
    if isinstance(gemm, Refusal):
        _log_refusal(node, gemm)
        return choices
    builder = ProgramBuilder()
    program, _ = builder.build([Store(gemm.start(builder), layout.dtype)])
    found = candidates(gemm.problem, target, program, config.nvgemm_fusion_candidates)
    if isinstance(found, Refusal):
        _log_refusal(node, found)
        return choices
    # The best competes in any case, with nothing fused. Where it is missing, there will be something to compile.
    shared_compiler(config.compile_threads).expect(KernelSpec.of(gemm.problem, found[0], program, target))
    key = choices[0].hash_key()
    return [*choices, *(NvgemmChoice(candidate, inputs, layout, alpha, beta, key) for candidate in found)]


def _log_refusal(node: torch.fx.Node, refusal: Refusal) -> None:
    """Writes down that the GEMM of `node` gets no candidates; the scheduler pass will not see it."""
    publish(Decision(graph_name(), node.name, None, (), (), None, (refusal,), (origin(node.name, [node]),)))


def publish(decision: Decision) -> None:
    """Writes a decision down wherever somebody may look for it."""
    log.write(decision, config.nvgemm_fusion_log)
    trace.publish(decision)


def origin(name: str, nodes: Iterable[torch.fx.Node]) -> NodeOrigin:
    """Where something called `name` comes from, by the FX nodes that it was lowered from."""
    ordered = sorted(nodes)  # as they stand in their graph
    operators = (node.meta.get("original_aten", node.target) for node in ordered)
    packets = (getattr(operator, "_overloadpacket", operator) for operator in operators)
    lines = (_innermost_line(node.meta.get("stack_trace") or "") for node in ordered)
    return NodeOrigin(
        name,
        tuple(dict.fromkeys(getattr(packet, "__name__", str(packet)) for packet in packets)),
        tuple(dict.fromkeys(filter(None, lines))),
    )


def _innermost_line(stack_trace: str) -> str:
    """`file:line: code` of the last frame of a stack trace as FX keeps it; empty for an empty one."""
    frames = re.findall(r'File "(.+)", line (\d+), in .+\n\s+(.+)', stack_trace)
    return "{}:{}: {}".format(*frames[-1]) if frames else ""


def graph_name() -> str:
    """The graph in hand, as it is called in the log."""
    number = V.graph.graph_id if V.graph.graph_id is not None else V.graph.post_grad_graph_id
    return f"graph{number}" + ("_backward" if V.graph.is_backward else "")
