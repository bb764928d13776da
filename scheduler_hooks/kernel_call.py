"""KernelCall: a CuTe DSL kernel that was chosen, with the buffers it is called on, and how that is written."""

from __future__ import annotations

import json
from dataclasses import dataclass

from torch._inductor.virtualized import V

from ..fusion.program import Operand, OperandKind
from ..lowering.kernel import KernelSpec
from .capture import BufferAccess, CapturedProgram
from .gemm import Gemm


@dataclass(frozen=True)
class KernelCall:
    """A kernel with the buffers that it is called on, in the order of the launcher's parameters."""

    spec: KernelSpec
    gemm: Gemm
    captured: CapturedProgram

    def arguments(self) -> list[str]:
        """A, B, the operands and the outputs, as expressions in the wrapper's code."""
        matrices = [
            _reference(matrix.buffer, matrix.size, matrix.layout.strides, matrix.offset)
            for matrix in (self.gemm.a, self.gemm.b)
        ]
        operands = [
            self._operand(operand, buffer)
            for operand, buffer in zip(self.spec.program.operands, self.captured.operands)
        ]
        outputs = [
            _reference(output.buffer, self.gemm.size, (output.access.stride_m, output.access.stride_n), 0)
            for output in self.captured.outputs
        ]
        return [*matrices, *operands, *outputs]

    def write(self) -> None:
        """Writes the loading of the kernel into the wrapper's head (once a kernel), and its call where we are."""
        wrapper = V.graph.wrapper_code
        name = f"nvgemm_{self.spec.key[:16]}"
        wrapper.add_import_once("from nvgemm_fusion.lowering.launcher import load_kernel")
        if name not in wrapper.src_to_kernel:
            wrapper.src_to_kernel[name] = name
            wrapper.define_kernel(name, f"load_kernel({json.dumps(json.dumps(self.spec.to_json()))})", gpu=False)
        wrapper.writeline(f"{name}({', '.join(self.arguments())})  # {self.spec.candidate}")

    def _operand(self, operand: Operand, buffer: BufferAccess) -> str:
        m, n = self.gemm.size
        size, strides = {
            OperandKind.TILE: ((m, n), (buffer.access.stride_m, buffer.access.stride_n)),
            OperandKind.ROW: ((n,), (1,)),
            OperandKind.COLUMN: ((m,), (1,)),
            OperandKind.SCALAR: ((1,), (1,)),
        }[operand.kind]
        return _reference(buffer.buffer, size, strides, buffer.access.offset)


def _reference(buffer: str, size: tuple[int, ...], strides: tuple[int, ...], offset: int) -> str:
    """`buffer` as a tensor of this size: by its name where it has it, else reinterpreted."""
    name = V.graph.scheduler.mutation_real_name.get(buffer, buffer)
    layout = V.graph.get_buffer(buffer).get_layout()
    if offset == 0 and tuple(layout.size) == size and tuple(layout.stride) == strides:
        return name
    return f"reinterpret_tensor({name}, {size}, {strides}, {offset})"
