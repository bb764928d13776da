"""The scheduling backend for CUDA: what the pass decided becomes one call in the wrapper.

`FusionScheduling` is Inductor's own backend with three differences. A GEMM for which a CuTe DSL kernel was chosen is
written as one call of a launcher. A GEMM that was decided is not fused any further by Inductor's pairwise loop, so
the decision is final. And when a graph is to be fused, its construction puts our pass in front of the scheduler.
Where the graph is not to be fused it does nothing of its own; with the flag off, it is not there (see `install`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.virtualized import V

from . import fusion_pass
from .choices import is_enabled
from .kernel_call import KernelCall


class FusionScheduling(CUDACombinedScheduling):
    """See the module's docstring. `calls`: decided kernels by the name of the product's buffer. `decided`: the
    buffers of all GEMMs that the pass has decided, whoever won."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        super().__init__(scheduler)
        self.calls: dict[str, KernelCall] = {}
        self.decided: set[str] = set()
        if scheduler is not None and is_enabled():
            fusion_pass.put_in_front()

    def can_fuse_vertical(self, node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
        if self._is_decided(node1) or self._has_call(node2):
            return False
        return super().can_fuse_vertical(node1, node2)

    def can_fuse_horizontal(self, node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
        if self._is_decided(node1) or self._is_decided(node2):
            return False
        return super().can_fuse_horizontal(node1, node2)

    def codegen_template(
        self,
        template_node: BaseSchedulerNode,
        epilogue_nodes: Sequence[BaseSchedulerNode],
        prologue_nodes: Sequence[BaseSchedulerNode],
    ) -> str | None:
        call = self.calls.get(template_node.node.get_name())
        if call is None:
            return super().codegen_template(template_node, epilogue_nodes, prologue_nodes)
        for node in (template_node, *epilogue_nodes):
            node.mark_run()
        stored = {output.buffer for output in call.captured.outputs}
        for node in (template_node, *epilogue_nodes):
            # What stays inside the kernel never reaches memory.
            V.graph.removed_buffers.update(set(node.get_buffer_names()) - stored)
        call.write()
        self.free_buffers_in_scheduler()
        return None

    def _is_decided(self, node: BaseSchedulerNode) -> bool:
        template = node.get_template_node()
        return template is not None and template.get_name() in self.decided

    def _has_call(self, node: BaseSchedulerNode) -> bool:
        template = node.get_template_node()
        return template is not None and template.get_name() in self.calls
