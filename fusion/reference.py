"""The reference: an epilogue program computed with torch, op by op, from the table in `ops`.

In float64 it is the oracle of every test and of the check of a kernel against wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .ops import CONSTANT, INTEGER, OPS, TO_DTYPE, kind_of
from .program import EpilogueProgram, OperandKind


def evaluate(
    program: EpilogueProgram,
    accumulator: torch.Tensor,
    operands: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float64,
    round_stores: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The stores of `program`, each an (M, N) tensor.

    accumulator: (M, N), the raw product; operands: tile (M, N), row (N,), column (M,), scalar or number (one
    element), of any dtype; `dtype`: what every float is computed in (integers and bools stay what they are). Roundings
    that the program states are carried out in every `dtype`; the conversion to the dtype of a store only when
    `round_stores`.
    Raises ValueError for shapes that do not fit.
    """
    m, n = accumulator.shape
    values = [accumulator.to(dtype)]
    values += [
        _expand(tensor, operand.kind, m, n).to(dtype if operand.dtype.is_floating_point else operand.dtype)
        for operand, tensor in zip(program.operands, operands, strict=True)
    ]
    for instruction in program.instructions:
        inputs = [values[value] for value in instruction.inputs]
        held = dtype if instruction.dtype.is_floating_point else instruction.dtype
        if instruction.op == CONSTANT:
            value = torch.tensor(instruction.constant, dtype=held, device=accumulator.device)
        elif instruction.op == TO_DTYPE:
            value = converted(inputs[0], instruction.dtype).to(held)
        else:
            value = OPS[instruction.op].reference(*inputs)
        values.append(value)
    results = (values[store.value].expand(m, n) for store in program.stores)
    if round_stores:
        return tuple(converted(result, store.dtype).to(store.dtype) for result, store in zip(results, program.stores))
    return tuple(results)


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` converted to `dtype` as the GPU's instruction does (PTX ISA, cvt).

    What is too large for a float8 becomes its largest number, not an infinity or a NaN; a float becomes the nearest
    int32 towards 0, which wraps around in a narrower integer, and a NaN becomes 0. A float32 holds what it is given, to
    any precision.
    """
    if dtype == torch.float32:
        return value
    if value.is_floating_point() and kind_of(dtype) == INTEGER:
        limits = torch.iinfo(torch.int32)
        value = value.double().nan_to_num(0.0, limits.max, limits.min).clamp(limits.min, limits.max).to(torch.int32)
    if dtype.is_floating_point and dtype.itemsize == 1:
        value = value.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return value.to(dtype)


def _expand(tensor: torch.Tensor, kind: OperandKind, m: int, n: int) -> torch.Tensor:
    expected = {
        OperandKind.TILE: (m, n),
        OperandKind.ROW: (n,),
        OperandKind.COLUMN: (m,),
        OperandKind.SCALAR: (),
        OperandKind.NUMBER: (),
    }[kind]
    if not expected and tensor.numel() == 1:
        tensor = tensor.reshape(())
    if tuple(tensor.shape) != expected:
        raise ValueError(f"a {kind.value} operand has shape {expected} here, not {tuple(tensor.shape)}")
    return tensor.unsqueeze(1) if kind is OperandKind.COLUMN else tensor
