"""The emitted source, run on the CPU: what a kernel's epilogue computes, without a GPU.

The generated module is executed against stand-ins for the few names of CuTe DSL that it uses, on float64 tensors.
Compared with `fusion.reference.evaluate` this checks the emitter: operands in their places, every op emitted as it
is meant, every rounding there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import torch

from ..fusion.program import EpilogueProgram, OperandKind
from .emit import FUNCTION_NAME, emit, store_name


def dry_run(
    program: EpilogueProgram, accumulator: torch.Tensor, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The stores of `program` as the emitted source computes them, in float64 and before conversion to their dtypes.

    Shapes as for `evaluate`: accumulator (M, N); tile (M, N), row (N,), column (M,), scalar one element.
    """
    names = dict(_STAND_INS)
    body = [line for line in emit(program).splitlines() if not line.startswith(("import ", "from "))]
    exec("\n".join(body), names)  # our own source, made two lines above
    values = [
        tensor.double().reshape(-1, 1) if operand.kind is OperandKind.COLUMN else tensor.double()
        for operand, tensor in zip(program.operands, operands, strict=True)
    ]
    results = names[FUNCTION_NAME](accumulator.double(), *values)
    shape = accumulator.shape
    return tuple(torch.as_tensor(results[store_name(i)]).expand(shape) for i in range(len(program.stores)))


def _float32(value: object) -> torch.Tensor:
    return value.double() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def _boolean(value: object) -> torch.Tensor:
    return value.bool() if isinstance(value, torch.Tensor) else torch.tensor(value)


def _exact(function: Callable) -> Callable:
    """The function without the DSL's options, which choose among instructions of different accuracy."""
    return lambda *values, **options: function(*values)


_MATH = {
    "absf": torch.abs,
    "div": torch.true_divide,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "rcp": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}
_STAND_INS = {
    "Float32": _float32,
    "Float16": lambda value: value.half(),
    "BFloat16": lambda value: value.bfloat16(),
    "Boolean": _boolean,
    "cutlass": types.SimpleNamespace(select_=torch.where),
    "cute": types.SimpleNamespace(math=types.SimpleNamespace(**{name: _exact(f) for name, f in _MATH.items()})),
}
