"""A kernel call of generated code, computed on the CPU: the reference and the emitted source on the graph's inputs."""

from __future__ import annotations

import torch
from nvgemm_fusion.fusion.program import OperandKind
from nvgemm_fusion.fusion.reference import evaluate
from nvgemm_fusion.lowering.dry_run import dry_run


def run_on_cpu(call, buffers):
    """The output of `call` (which reads only inputs of the graph), by the reference and by the emitted source.

    buffers: the tensors of the graph's inputs by name.
    """
    matrices = [
        torch.as_strided(buffers[x.buffer], x.size, x.layout.strides, buffers[x.buffer].storage_offset() + x.offset)
        for x in (call.gemm.a, call.gemm.b)
    ]
    m, n = call.gemm.size
    operands = []
    for operand, where in zip(call.spec.program.operands, call.captured.operands):
        access, base = where.access, buffers[where.buffer]
        size, strides = {
            OperandKind.TILE: ((m, n), (access.stride_m, access.stride_n)),
            OperandKind.ROW: ((n,), (access.stride_n,)),
            OperandKind.COLUMN: ((m,), (access.stride_m,)),
            OperandKind.SCALAR: ((1,), (1,)),
        }[operand.kind]
        operands.append(torch.as_strided(base, size, strides, base.storage_offset() + access.offset))
    accumulator = matrices[0].double() @ matrices[1].double()
    (by_reference,) = evaluate(call.spec.program, accumulator, operands)
    (as_emitted,) = dry_run(call.spec.program, accumulator, operands)
    return by_reference, as_emitted
