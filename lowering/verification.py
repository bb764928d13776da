"""Verification: is what a kernel has stored what the reference gives, on samples of the product?

A few rows and columns are drawn, the first and the last always among them. Where they cross, the product is computed in
float64 from A and B (from what TF32 has of them, where they are float32), and the epilogue by `fusion.reference` in
float32, whose range the kernel has, too. A kernel that takes the wrong operand, row or column, misses an offset or
leaves a tile out is wrong in whole stretches, so a sample finds it; what rounding does is too little to be taken for
that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from ..fusion.ops import TO_DTYPE
from ..fusion.program import EpilogueProgram, OperandKind
from ..fusion.reference import converted, evaluate

ROWS, COLUMNS = 32, 64
"""How many of each are drawn."""
STEPS, STEPS_ON_THE_WAY = 4, 16
"""A value may be this many rounding steps of the store's dtype away; more where the program rounds on its way, since
what follows may enlarge a step that was taken to the other side."""
TF32_STEP = 2**-10
"""A step is no shorter than this where A and B are float32: their product is not known to the last bits of a store."""
FLOOR = 2**-8
"""A value may be this part of a large value (one in ten is larger) away, whatever its own size: differences cancel."""
STRAY = 1 / 1000
"""The part of the values that may be further away: where a comparison falls the other way for a last bit."""

_DROPPED_BITS = 13
_DROPPED = (1 << _DROPPED_BITS) - 1
"""Of a float32, as an integer: the last bits of its mantissa, of which TF32 has the first 10."""

_random = random.Random()


def mismatch(program: EpilogueProgram, tensors: Sequence[torch.Tensor]) -> str | None:
    """What is wrong with the outputs among a launcher's `tensors`, on a sample; None for nothing. Waits for the GPU."""
    a, b, *rest = tensors
    operands, outputs = rest[: len(program.operands)], rest[len(program.operands) :]
    rows, columns = _drawn(a.shape[0], ROWS, a.device), _drawn(b.shape[1], COLUMNS, a.device)
    accumulator = (_multiplied(a[rows]) @ _multiplied(b[:, columns])).float()
    picked = [
        _picked(tensor, operand.kind, rows, columns) for operand, tensor in zip(program.operands, operands, strict=True)
    ]
    expected = evaluate(program, accumulator, picked, torch.float32, round_stores=True)
    least = TF32_STEP if a.dtype == torch.float32 else 0.0
    steps = STEPS_ON_THE_WAY if any(i.op == TO_DTYPE for i in program.instructions) else STEPS
    for number, (output, exact) in enumerate(zip(outputs, expected, strict=True)):
        stored = _picked(output, OperandKind.TILE, rows, columns)
        wrong = _differs(stored, exact, steps, least)
        if wrong.sum().item() > STRAY * wrong.numel():
            row, column = wrong.nonzero()[0].tolist()
            found, right = stored[row, column].item(), exact[row, column].item()
            return (
                f"store {number} differs at {wrong.sum().item()} of {wrong.numel()} places, such as "
                f"({rows[row].item()}, {columns[column].item()}): {found:.6g} instead of {right:.6g}"
            )
    return None


def compute(
    program: EpilogueProgram, tensors: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Does what a launcher does with `tensors`, with torch alone: the product and the epilogue in `dtype`."""
    a, b, *rest = tensors
    operands, outputs = rest[: len(program.operands)], rest[len(program.operands) :]
    results = evaluate(program, a.to(dtype) @ b.to(dtype), operands, dtype)
    for output, result in zip(outputs, results, strict=True):
        output.copy_(converted(result, output.dtype))


def verified(
    launch: Callable[..., None], program: EpilogueProgram, every_call: bool, discard: Callable[[str], None]
) -> Callable[..., None]:
    """A launcher with its first result verified, or each. After a mismatch `discard` is told what was wrong, and torch
    computes this result and all later ones. What a CUDA graph is being made of cannot be looked at, and is not."""
    is_pending, is_wrong = True, False

    def run(*tensors: torch.Tensor) -> None:
        nonlocal is_pending, is_wrong
        if is_wrong:
            compute(program, tensors)
            return
        launch(*tensors)
        if not (is_pending or every_call) or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        is_pending = False
        found = mismatch(program, tensors)
        if found is not None:
            is_wrong = True
            discard(f"{found}; {describe(tensors)}")
            compute(program, tensors)

    return run


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """The inputs and outputs of a launch, in words."""
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} strides {t.stride()}" for t in tensors)


def _drawn(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Up to `count` of `size` indices, with the first and the last."""
    between = _random.sample(range(1, size - 1), min(count, size) - 2) if size > 2 else []
    return torch.tensor(sorted({0, *between, size - 1}), device=device)


def _picked(tensor: torch.Tensor, kind: OperandKind, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """An operand, or an output as a tile, where `rows` and `columns` cross."""
    # By their bytes, since not every torch indexes every narrow dtype on a GPU.
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    chosen = {
        OperandKind.TILE: lambda: raw[rows][:, columns],
        OperandKind.ROW: lambda: raw[columns],
        OperandKind.COLUMN: lambda: raw[rows],
        OperandKind.SCALAR: lambda: raw,
        OperandKind.NUMBER: lambda: raw,
    }[kind]()
    return chosen.view(tensor.dtype)


def _multiplied(matrix: torch.Tensor) -> torch.Tensor:
    """What of A or B enters the product: all of it, but of float32 what TF32 has, rounded to nearest, ties to even.

    Left as it is, the difference would grow with the product, and an epilogue with an exponential makes any of it.
    """
    if matrix.dtype == torch.float32:
        bits = matrix.view(torch.int32)
        rounded = (bits + (_DROPPED >> 1) + (bits >> _DROPPED_BITS & 1)) & ~_DROPPED
        matrix = torch.where(matrix.isfinite(), rounded.view(torch.float32), matrix)
    return matrix.double()


def _differs(output: torch.Tensor, exact: torch.Tensor, steps: int, least: float) -> torch.Tensor:
    """Where `output` is not `exact`, which is of the same dtype, with steps no shorter than `least`. A NaN equals a
    NaN."""
    if not exact.dtype.is_floating_point:
        return output != exact
    step = max(torch.finfo(exact.dtype).eps, least)
    output, exact = output.double(), exact.double()
    size = exact.nan_to_num(0.0, 0.0, 0.0).abs()
    large = size.quantile(0.9)
    large = torch.where(large > 0, large, size.square().mean().sqrt())
    same = (output == exact) | (output.isnan() & exact.isnan())
    return ~(same | ((output - exact).abs() <= steps * step * size + FLOOR * large))
