"""Numerics: is what was compiled right, measured against float64?

Errors are relative, in the Frobenius norm. A graph is compared with itself in eager float64, an emitted epilogue with
the reference of its program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..fusion.program import EpilogueProgram, OperandKind
from ..fusion.reference import evaluate
from ..lowering.dry_run import dry_run

FLOAT64_LIMIT = 1e-6
"""The error that something computed in float64 may have."""
EAGER_FACTOR = 2.0
"""How many times the error of eager something computed in the graph's own dtype may have. A wrong number has far more,
and what is right has about the same: it rounds no more often."""
M, N = 64, 128
"""The size at which emitted epilogues are run."""


@dataclass(frozen=True)
class Exact:
    """What a graph computes in float64.

    eager_error: the error of eager in the graph's own dtype. rounding: the relative step of the narrowest dtype that
    the graph names itself, so that it rounds on its way in float64 too; 0 where it names none.
    """

    outputs: tuple[torch.Tensor, ...]
    eager_error: float
    rounding: float

    def fault(self, outputs: Sequence[torch.Tensor], in_float64: bool = False) -> str:
        """What is wrong with `outputs`, empty for nothing. in_float64: they were computed in float64."""
        shapes, expected = ([tuple(tensor.shape) for tensor in of] for of in (outputs, self.outputs))
        if shapes != expected:
            return f"the result has shape {shapes}, not {expected}"
        found = error(outputs, self.outputs)
        limit = FLOAT64_LIMIT
        if self.rounding or not in_float64:
            limit += EAGER_FACTOR * self.eager_error + self.rounding
        if found <= limit:  # never true for a NaN
            return ""
        return f"the result is wrong: relative error {found:.1e} against float64, and {limit:.1e} is allowed"


def exact(function: Callable[..., Any], inputs: Sequence[torch.Tensor], eager: Any) -> Exact | None:
    """`function` in float64, where `eager` is its result as it stands. None when float64 does not go through it."""
    double = copy.deepcopy(function).double() if isinstance(function, torch.nn.Module) else function
    wide = [relaid(tensor, widened) for tensor in inputs]
    try:
        with _Roundings() as roundings:
            outputs = tensors(double(*wide))
    except Exception:  # it ran as it stands, so it names a dtype somewhere that does not mix with float64
        return None
    return Exact(outputs, error(tensors(eager), outputs), roundings.coarsest)


def error(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest relative error of several tensors. An infinity and a NaN equal themselves."""
    return max(map(_error, results, exact), default=0.0)


def epilogue_errors(record: dict[str, Any]) -> Iterator[tuple[str, EpilogueProgram, float]]:
    """The digest and the program of each epilogue of a decision record, with the error that its emitted source has,
    run on the CPU, against its reference."""
    generator = torch.Generator().manual_seed(0)
    shapes = {OperandKind.TILE: (M, N), OperandKind.ROW: (N,), OperandKind.COLUMN: (M,)}
    for digest in dict.fromkeys(a["epilogue"] for a in record["alternatives"] if a["epilogue"]):
        program = EpilogueProgram.from_json(record["programs"][digest]["ssa"])
        accumulator = torch.randn(M, N, dtype=torch.float64, generator=generator)
        operands = [
            torch.randn(shapes.get(operand.kind, (1,)), generator=generator).to(operand.dtype)
            for operand in program.operands
        ]
        found = error(dry_run(program, accumulator, operands), evaluate(program, accumulator, operands))
        yield digest, program, found


def wrong_epilogues(record: dict[str, Any]) -> Iterator[str]:
    """A sentence for each epilogue of a decision record whose emitted source is not its program."""
    for digest, program, found in epilogue_errors(record):
        if not found <= FLOAT64_LIMIT:  # a NaN is wrong, too
            ops = ", ".join(dict.fromkeys(instruction.op for instruction in program.instructions))
            yield f"the emitted epilogue {digest} ({ops}) is wrong: relative error {found:.1e} against its program"


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in what a function returned, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def relaid(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`convert` applied to all the memory behind `tensor`: the result has the same strides and the same offset."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = convert(tensor.detach().as_strided((elements,), (1,), 0))
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: floating point as float64, everything else as it is."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    result, exact = result.double(), exact.double()
    same = (result == exact) | (result.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, result - exact).norm()
    return (difference / exact[exact.isfinite()].norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


class _Roundings(TorchDispatchMode):
    """Notes in `coarsest` the relative step of the narrowest floating dtype below float64; 0 where there is none."""

    coarsest = 0.0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        narrow = (t.dtype for t in tensors(result) if t.is_floating_point() and t.dtype != torch.float64)
        self.coarsest = max([self.coarsest, *(torch.finfo(dtype).eps for dtype in narrow)])
        return result
