"""KernelCall: a CuTe DSL kernel that was chosen, with the buffers it is called on, and how that is written."""

from __future__ import annotations

import json
from dataclasses import dataclass

from torch._inductor import config
from torch._inductor.virtualized import V

from ..fusion.program import OperandKind
from ..lowering.kernel import KernelSpec
from .capture import CapturedProgram
from .gemm import Gemm


@dataclass(frozen=True)
class View:
    """A tensor of `size` in a buffer: element strides, and the offset of its first element."""

    buffer: str
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class KernelCall:
    """A kernel with the buffers that it is called on."""

    spec: KernelSpec
    gemm: Gemm
    captured: CapturedProgram

    def arguments(self) -> list[View]:
        """A, B, the operands and the outputs, in the order of the launcher's parameters."""
        m, n = self.gemm.size
        views = [View(x.buffer, x.size, x.layout.strides, x.offset) for x in (self.gemm.a, self.gemm.b)]
        for operand, where in zip(self.spec.program.operands, self.captured.operands):
            access = where.access
            size, strides = {
                OperandKind.TILE: ((m, n), (access.stride_m, access.stride_n)),
                OperandKind.ROW: ((n,), (1,)),
                OperandKind.COLUMN: ((m,), (1,)),
                OperandKind.SCALAR: ((1,), (1,)),
                OperandKind.NUMBER: ((), ()),
            }[operand.kind]
            views.append(View(where.buffer, size, strides, access.offset))
        views += [
            View(output.buffer, (m, n), (output.access.stride_m, output.access.stride_n))
            for output in self.captured.outputs
        ]
        return views

    def write(self) -> None:
        """Writes the loading of the kernel into the wrapper's head (once a kernel), and its call where we are."""
        wrapper = V.graph.wrapper_code
        name = f"nvgemm_{self.spec.key[:16]}"
        wrapper.add_import_once("from nvgemm_fusion.lowering.launcher import load_kernel")
        if name not in wrapper.src_to_kernel:
            wrapper.src_to_kernel[name] = name
            verify = config.nvgemm_fusion_verify
            options = "" if verify == "off" else f", {'always' if verify == 'always' else 'first'!r}"
            source = json.dumps(json.dumps(self.spec.to_json()))
            wrapper.define_kernel(name, f"load_kernel({source}{options})", gpu=False)
        arguments = ", ".join(map(_expression, self.arguments()))
        wrapper.writeline(f"{name}({arguments})  # {self.spec.candidate}")


def _expression(view: View) -> str:
    """The view in the wrapper's code: the buffer's name where it is the whole buffer, else reinterpreted."""
    name = V.graph.scheduler.mutation_real_name.get(view.buffer, view.buffer)
    layout = V.graph.get_buffer(view.buffer).get_layout()
    if view.offset == 0 and tuple(layout.size) == view.size and tuple(layout.stride) == view.strides:
        return name
    return f"reinterpret_tensor({name}, {view.size}, {view.strides}, {view.offset})"
