"""A kernel call of generated code, computed on the CPU: the reference and the emitted source on the graph's inputs."""

from __future__ import annotations

import torch
from nvgemm_fusion.fusion.reference import evaluate
from nvgemm_fusion.lowering.dry_run import dry_run


def run_on_cpu(call, buffers):
    """The output of `call` (which reads only inputs of the graph), by the reference and by the emitted source.

    buffers: the tensors of the graph's inputs by name.
    """
    count = len(call.spec.program.operands)
    a, b, *operands = (
        torch.as_strided(
            buffers[view.buffer], view.size, view.strides, buffers[view.buffer].storage_offset() + view.offset
        )
        for view in call.arguments()[: 2 + count]
    )
    accumulator = a.double() @ b.double()
    (by_reference,) = evaluate(call.spec.program, accumulator, operands)
    (as_emitted,) = dry_run(call.spec.program, accumulator, operands)
    return by_reference, as_emitted
