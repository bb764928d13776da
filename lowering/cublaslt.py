"""cuBLASLt: the one epilogue that torch has inside a matrix product of its own, a bias row and then GELU or ReLU.

`torch._addmm_activation` hands it to cuBLASLt; Inductor never makes use of it. So it takes part in the contest beside
ATen's other kernels, as a candidate that has no configuration and needs no compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..fusion.program import EpilogueProgram, Major, OperandKind
from ..fusion.reference import evaluate
from .kernel import Candidate, KernelSpec

CUBLASLT = "cublaslt"
CANDIDATE = Candidate(CUBLASLT, 0, 0)

_ACTIVATIONS = {"gelu": functools.partial(F.gelu, approximate="tanh"), "relu": torch.relu}
_SAMPLES = 16, 64


@functools.lru_cache(maxsize=None)
def activation(program: EpilogueProgram) -> str | None:
    """ "gelu" or "relu" when that, of the product and a bias row, is what `program` computes in 16 bits; else None.

    Told by what comes out for random numbers in float64, because there are many ways to write a GELU.
    """
    if len(program.stores) != 1 or [operand.kind for operand in program.operands] != [OperandKind.ROW]:
        return None
    (store,), (bias,) = program.stores, program.operands
    if store.dtype not in (torch.float16, torch.bfloat16) or bias.dtype != store.dtype or store.major is not Major.ROW:
        return None
    generator = torch.Generator().manual_seed(0)
    product = 3 * torch.randn(_SAMPLES, dtype=torch.float64, generator=generator)
    row = 3 * torch.randn(_SAMPLES[1], dtype=torch.float64, generator=generator)
    (result,) = evaluate(program, product, [row])
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(result, function(product + row), rtol=1e-10, atol=1e-12):
            return name
    return None


def launcher(spec: KernelSpec) -> Callable[..., None]:
    """launch(a, b, bias, out), for a program that has an `activation`."""
    use_gelu = activation(spec.program) == "gelu"
    function = torch.ops.aten._addmm_activation.out

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
        function(bias, a, b, use_gelu=use_gelu, out=out)

    return launch
