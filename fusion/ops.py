"""The op vocabulary of epilogue programs: one row an op, and the only place where an op is declared.

A row holds the name, the arity, the rule for the result's dtype, the torch reference and the kinds of values that the
op takes. Capture maps the names of Inductor's ops to rows, `lowering.expressions` has the source of each row for a
kernel, and `docs/operations.md` is written from both; a test fails when a row has no reference or no source.

What an op computes is what Inductor's own Triton kernels compute (`torch/_inductor/codegen/triton.py`): `maximum`,
`minimum` and `relu` let a NaN through, `round` goes to even, `sign` of a NaN is 0, `remainder` has the sign of the
divisor and `fmod` that of the dividend. Which of two zeros is the larger is left open, since it is another one from
torch 2.15 on (there the positive, before that the second). Where Triton leaves a result undefined (an integer divided
by 0, a shift by more bits than there are) it is defined here, since neither a test nor a GPU may stumble over it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

CONSTANT = "constant"
TO_DTYPE = "to_dtype"

FLOAT, INTEGER, BOOL = "f", "i", "b"
INTEGER_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)
"""Integers stay in their dtype and wrap around in it. There is no int64: kernels compute in 32 bits."""


def kind_of(dtype: torch.dtype) -> str:
    """FLOAT, INTEGER or BOOL: which kind of value has `dtype`."""
    if dtype == torch.bool:
        return BOOL
    return FLOAT if dtype.is_floating_point else INTEGER


@dataclass(frozen=True)
class Op:
    """One op: how many values it takes, what it yields, how torch computes it, and which kinds of values it takes.

    `result` maps the dtypes of the inputs to the dtype of the result. `reference` takes tensors (broadcastable
    against each other) of one dtype, and must work in float32 and in float64, or in each integer dtype. `where` alone
    takes a condition of another dtype before them.
    """

    name: str
    arity: int
    result: Callable[..., torch.dtype]
    reference: Callable[..., torch.Tensor]
    takes: str = FLOAT


def _first(*dtypes: torch.dtype) -> torch.dtype:
    return dtypes[0]


def _second(*dtypes: torch.dtype) -> torch.dtype:
    return dtypes[1]


def _boolean(*dtypes: torch.dtype) -> torch.dtype:
    return torch.bool


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x * y + z


def _sign(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def _floor_quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of integers; 0 where `y` is 0. Divided by -1, the smallest integer wraps around to itself."""
    a, b = x.int(), y.int()
    quotient = torch.div(a, torch.where((b == 0) | (b == -1), 1, b), rounding_mode="floor")
    return torch.where(b == 0, 0, torch.where(b == -1, -a, quotient)).to(x.dtype)


def _quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of integers, towards 0."""
    floor = _floor_quotient(x, y)
    return torch.where((floor < 0) & (floor * y != x), floor + 1, floor)


def _remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.remainder(x, y) if x.is_floating_point() else x - _floor_quotient(x, y) * y


def _fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmod(x, y) if x.is_floating_point() else x - _quotient(x, y) * y


def _left_shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where((y < 0) | (y > 31), 0, x.int() << y.int().clamp(0, 31)).to(x.dtype)


def _right_shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.int() >> torch.where((y < 0) | (y > 31), 31, y.int())).to(x.dtype)


_ROWS = [
    # arithmetic
    Op("add", 2, _first, operator.add, FLOAT + INTEGER),
    Op("sub", 2, _first, operator.sub, FLOAT + INTEGER),
    Op("mul", 2, _first, operator.mul, FLOAT + INTEGER),
    Op("div", 2, _first, torch.true_divide),
    Op("div_rn", 2, _first, torch.true_divide),
    Op("mul_rn", 2, _first, operator.mul),
    Op("fma", 3, _first, _fma),
    Op("neg", 1, _first, operator.neg, FLOAT + INTEGER),
    Op("abs", 1, _first, torch.abs, FLOAT + INTEGER),
    Op("sign", 1, _first, _sign, FLOAT + INTEGER),
    Op("square", 1, _first, torch.square, FLOAT + INTEGER),
    Op("reciprocal", 1, _first, torch.reciprocal),
    Op("maximum", 2, _first, torch.maximum, FLOAT + INTEGER),
    Op("minimum", 2, _first, torch.minimum, FLOAT + INTEGER),
    Op("relu", 1, _first, torch.relu, FLOAT + INTEGER),
    Op("copysign", 2, _first, torch.copysign),
    Op("fmod", 2, _first, _fmod, FLOAT + INTEGER),
    Op("remainder", 2, _first, _remainder, FLOAT + INTEGER),
    Op("truncdiv", 2, _first, _quotient, INTEGER),
    Op("floordiv", 2, _first, _floor_quotient, INTEGER),
    # rounding
    Op("floor", 1, _first, torch.floor),
    Op("ceil", 1, _first, torch.ceil),
    Op("round", 1, _first, torch.round),
    Op("trunc", 1, _first, torch.trunc),
    # transcendental
    Op("sigmoid", 1, _first, torch.sigmoid),
    Op("tanh", 1, _first, torch.tanh),
    Op("exp", 1, _first, torch.exp),
    Op("exp2", 1, _first, torch.exp2),
    Op("expm1", 1, _first, torch.expm1),
    Op("log", 1, _first, torch.log),
    Op("log2", 1, _first, torch.log2),
    Op("log10", 1, _first, torch.log10),
    Op("log1p", 1, _first, torch.log1p),
    Op("pow", 2, _first, torch.pow),
    Op("sqrt", 1, _first, torch.sqrt),
    Op("rsqrt", 1, _first, torch.rsqrt),
    Op("erf", 1, _first, torch.erf),
    Op("erfc", 1, _first, torch.erfc),
    Op("sin", 1, _first, torch.sin),
    Op("cos", 1, _first, torch.cos),
    Op("tan", 1, _first, torch.tan),
    Op("sinh", 1, _first, torch.sinh),
    Op("cosh", 1, _first, torch.cosh),
    Op("asin", 1, _first, torch.asin),
    Op("acos", 1, _first, torch.acos),
    Op("atan", 1, _first, torch.atan),
    Op("atan2", 2, _first, torch.atan2),
    Op("asinh", 1, _first, torch.asinh),
    Op("acosh", 1, _first, torch.acosh),
    Op("atanh", 1, _first, torch.atanh),
    # comparison and selection
    Op("lt", 2, _boolean, operator.lt, FLOAT + INTEGER),
    Op("le", 2, _boolean, operator.le, FLOAT + INTEGER),
    Op("gt", 2, _boolean, operator.gt, FLOAT + INTEGER),
    Op("ge", 2, _boolean, operator.ge, FLOAT + INTEGER),
    Op("eq", 2, _boolean, operator.eq, FLOAT + INTEGER + BOOL),
    Op("ne", 2, _boolean, operator.ne, FLOAT + INTEGER + BOOL),
    Op("isnan", 1, _boolean, torch.isnan),
    Op("isinf", 1, _boolean, torch.isinf),
    Op("signbit", 1, _boolean, torch.signbit, FLOAT + INTEGER),
    Op("where", 3, _second, torch.where, FLOAT + INTEGER + BOOL),
    # logic and bits
    Op("logical_and", 2, _boolean, operator.and_, BOOL),
    Op("logical_or", 2, _boolean, operator.or_, BOOL),
    Op("logical_xor", 2, _boolean, operator.xor, BOOL),
    Op("logical_not", 1, _boolean, operator.invert, BOOL),
    Op("bitwise_and", 2, _first, operator.and_, INTEGER + BOOL),
    Op("bitwise_or", 2, _first, operator.or_, INTEGER + BOOL),
    Op("bitwise_xor", 2, _first, operator.xor, INTEGER + BOOL),
    Op("bitwise_not", 1, _first, operator.invert, INTEGER + BOOL),
    Op("bitwise_left_shift", 2, _first, _left_shift, INTEGER),
    Op("bitwise_right_shift", 2, _first, _right_shift, INTEGER),
]

OPS: dict[str, Op] = {row.name: row for row in _ROWS}
"""Every op that takes values and yields one. A constant and a conversion (`CONSTANT`, `TO_DTYPE`) carry data of
their own, so they stand in `program.Instruction` rather than in this table."""
