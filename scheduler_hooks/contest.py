"""Contest: one GEMM with the regions that could be fused into it, and who competes to compute them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import networkx
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode

from ..fusion.decision import Alternative, Status
from ..fusion.program import EpilogueProgram
from ..fusion.reasons import Refusal
from ..fusion.regions import Region, absorbers, producers
from ..lowering.compiler import CompiledKernel
from ..lowering.targets import Target
from .capture import CapturedProgram, RegionCapture
from .choices import NvgemmChoice
from .gemm import Gemm
from .kernel_call import KernelCall


@dataclass
class Contest:
    """One GEMM: what surrounds it, and which regions are legal (largest first). `programs` has the epilogue of each
    region that has one, and of the GEMM alone under None; `refusals`, why others have none."""

    node: SchedulerNode
    gemm: Gemm
    target: Target
    capture: RegionCapture
    graph: networkx.DiGraph
    regions: list[Region]
    nodes: dict[str, BaseSchedulerNode]
    choice: NvgemmChoice
    refusals: list[Refusal] = field(default_factory=list)
    programs: dict[Region | None, CapturedProgram] = field(default_factory=dict)
    _separate: dict[Region | None, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for region in (*self.regions, None):
            stored = (self.node.get_name(),) if region is None else region.stored
            captured = self.capture.program([self.nodes[name].node.get_name() for name in stored])
            if isinstance(captured, CapturedProgram):
                self.programs[region] = captured
            else:
                self.refusals.append(captured)

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes that every entrant computes."""
        return self.regions[0].nodes if self.regions else ()

    @functools.cached_property
    def readers(self) -> tuple[str, ...]:
        """Further nodes that every entrant computes: those that would share a kernel with the members."""
        return absorbers(self.graph, self.node.get_name(), self.members) if self.members else ()

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Who reads from whom, as far as the GEMM or a member is one of the two."""
        inside = {self.node.get_name(), *self.members}
        return tuple((writer, reader) for writer, reader in self.graph.edges if writer in inside or reader in inside)

    @property
    def largest_program(self) -> EpilogueProgram | None:
        """The epilogue of the largest region that has one, else of the GEMM alone."""
        return next((captured.program for captured in self.programs.values()), None)

    def separate(self, region: Region | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What stays outside when `region` is fused: the nodes that are computed before the GEMM, and those after."""
        if region not in self._separate:  # every entrant asks, and the answer takes a walk through the whole graph
            gemm, inside = self.node.get_name(), () if region is None else region.nodes
            rest = tuple(name for name in self.members if name not in inside)
            before = producers(self.graph, gemm, inside)
            beside = tuple(name for name in producers(self.graph, gemm, rest) if name not in before)
            self._separate[region] = before, beside + rest + self.readers
        return self._separate[region]


@dataclass(frozen=True)
class Contender:
    """An alternative, and what it takes to apply it: a stock choice or a kernel call, and the region fused. waits:
    whether it is compiled only when the choice alone, without the region, is faster than any other alternative."""

    alternative: Alternative
    region: Region | None
    choice: Any
    call: KernelCall | None = None
    compiled: CompiledKernel | None = None
    waits: bool = False

    def with_kernel(self, compiled: CompiledKernel | Refusal) -> Contender:
        """The same with its kernel, or out of the contest with the reason why it has none."""
        if isinstance(compiled, CompiledKernel):
            alternative = replace(self.alternative, compile_s=compiled.seconds)
            return replace(self, alternative=alternative, compiled=compiled)
        return replace(self, alternative=replace(self.alternative, status=Status.FAILED, refusal=compiled))
