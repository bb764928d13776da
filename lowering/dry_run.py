"""The emitted source, run on the CPU: what a kernel's epilogue computes, without a GPU.

The generated module is executed against stand-ins for the few names of CuTe DSL that it uses, on tensors: float64 for
floats, int32 for integers.
Compared with `fusion.reference.evaluate` this checks the emitter: operands in their places, every op emitted as it
is meant, every rounding there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import torch

from ..fusion.program import EpilogueProgram, Operand, OperandKind
from ..fusion.reference import converted
from .emit import CARRIERS, DSL_TYPES, FUNCTION_NAME, carrier, emit, operand_name, store_name


def dry_run(
    program: EpilogueProgram, accumulator: torch.Tensor, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The stores of `program` as the emitted source computes them: floats in float64, before conversion to their dtype,
    integers and bools in their own.

    Shapes as for `evaluate`: accumulator (M, N); tile (M, N), row (N,), column (M,), scalar one element.
    """
    names = dict(_STAND_INS)
    body = [line for line in emit(program).splitlines() if not line.startswith(("import ", "from "))]
    exec("\n".join(body), names)  # our own source, made two lines above
    values = {  # by name, as QuACK hands them over
        operand_name(number): _loaded(operand, tensor)
        for number, (operand, tensor) in enumerate(zip(program.operands, operands, strict=True))
    }
    results = names[FUNCTION_NAME](accumulator.double(), **values)
    return tuple(
        _stored(store.dtype, torch.as_tensor(results[store_name(i)]).expand(accumulator.shape))
        for i, store in enumerate(program.stores)
    )


def _loaded(operand: Operand, tensor: torch.Tensor) -> torch.Tensor:
    """The operand as the function gets it. Every dtype that is loaded is widened, but not the bits of an int32."""
    if carrier(operand) != operand.dtype:
        tensor = tensor.to(operand.dtype).view(carrier(operand))
    bits = carrier(operand) == torch.float32 != operand.dtype
    loaded = tensor if bits else tensor.double()
    return loaded.reshape(-1, 1) if operand.kind is OperandKind.COLUMN else loaded


def _stored(dtype: torch.dtype, result: torch.Tensor) -> torch.Tensor:
    """What lies in memory afterwards, of a result that the kernel stores as a carrier of the same bits. A float that
    the carrier cannot hold becomes the nearest that it can, as on a GPU."""
    if dtype.is_floating_point:
        return result
    if CARRIERS[dtype] == torch.uint8:
        result = result.clamp(0, 255).to(torch.uint8)
    return result.view(dtype)


class _Float32:
    """Calling it converts to float64, which stands for Float32."""

    def __call__(self, value: object) -> torch.Tensor:
        return value.double() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def bitcast(value: torch.Tensor, _: object) -> torch.Tensor:
        """The bits of a float32 as an int32."""
        return value.view(torch.int32)


class _Int32:
    """Calling it converts to int32."""

    def __call__(self, value: object) -> torch.Tensor:
        return converted(torch.as_tensor(value), torch.int32)

    @staticmethod
    def bitcast(value: torch.Tensor, _: object) -> torch.Tensor:
        """The bits of an int32 as a float32."""
        return value.contiguous().view(torch.float32)


def _as(dtype: torch.dtype) -> Callable[[object], torch.Tensor]:
    """A conversion to `dtype`."""
    return lambda value: converted(torch.as_tensor(value), dtype)


def _exact(function: Callable) -> Callable:
    """The function without the DSL's options, which choose among instructions of different accuracy."""
    return lambda *values, **options: function(*values)


_SAME_NAME = """
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc exp exp2 expm1 floor log log10 log1p log2 mul
    pow rsqrt sin sinh sqrt tan tanh trunc
""".split()
_MATH = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    "absf": torch.abs,
    "div": torch.true_divide,
    "fma": lambda x, y, z: x * y + z,
    "rcp": torch.reciprocal,
    "rem": torch.fmod,
    "roundeven": torch.round,
}
_STAND_INS = {
    **{name: _as(dtype) for dtype, name in DSL_TYPES.items()},
    "Float32": _Float32(),
    "Int32": _Int32(),
    "cutlass": types.SimpleNamespace(select_=torch.where),
    "cute": types.SimpleNamespace(
        math=types.SimpleNamespace(
            RoundingMode=types.SimpleNamespace(NEAREST_EVEN=None), **{name: _exact(f) for name, f in _MATH.items()}
        )
    ),
}
