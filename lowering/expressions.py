"""How each op is written in CuTe DSL: the column of the op table that belongs to kernels.

One row an op: its source in float32, the largest error that is documented for the instructions behind it, and, where
it differs, its source for integers. `{0}`, `{1}` and `{2}` stand for the inputs, which are names: a Float32, a Boolean,
or an Int32 that holds an integer of any dtype (`emit` has it wrap around). What takes several lines is a function in
`HELPERS`, of which a generated module gets those that it uses.

Functions of `cute.math` without an option are those of CUDA's math library, as in Inductor's Triton kernels; there,
unlike here, they take subnormal numbers for zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EXACT = "exact"
IEEE = "IEEE 754, to nearest even"
PTX = "PTX ISA"
CUDA = "CUDA C++ Programming Guide, Mathematical Functions"


@dataclass(frozen=True)
class Error:
    """The largest distance from the correctly rounded result, in ulp of that result, and where it is documented.

    It holds for results that are normal numbers. `grows`: how much is added per unit of the argument's magnitude.
    """

    ulp: float
    source: str
    grows: float = 0.0


@dataclass(frozen=True)
class Row:
    """One op: see the module's docstring."""

    name: str
    source: str
    error: Error
    integers: str | None = None


_EXACT, _ROUNDED = Error(0, EXACT), Error(0, IEEE)
_ROWS = [
    Row("add", "{0} + {1}", _ROUNDED),
    Row("sub", "{0} - {1}", _ROUNDED),
    Row("mul", "{0} * {1}", _ROUNDED),
    # The approximate forms of division, root and exponential have no branch, unlike the IEEE ones. A branch keeps the
    # elements of a thread from overlapping: with it, a sigmoid cost a third of the whole GEMM's time on an H200.
    # This one is what Triton makes of a division, too.
    Row("div", "cute.math.div({0}, {1}, full=True)", Error(2, f"{PTX}, div.full")),
    # The IEEE form, where the quotient is rounded to an integer next and must not fall short of one.
    Row("div_rn", "{0} / {1}", _ROUNDED),
    # With a rounding named, the product is not contracted with a sum after it.
    Row("mul_rn", "cute.math.mul({0}, {1}, rounding=cute.math.RoundingMode.NEAREST_EVEN)", _ROUNDED),
    Row("fma", "cute.math.fma({0}, {1}, {2})", _ROUNDED),
    Row("neg", "-{0}", _EXACT),
    Row("abs", "cute.math.absf({0})", _EXACT, "cutlass.select_({0} < Int32(0), -{0}, {0})"),
    Row(
        "sign",
        "cutlass.select_({0} > Float32(0.0), Float32(1.0),"
        " Float32(cutlass.select_({0} < Float32(0.0), Float32(-1.0), Float32(0.0))))",
        _EXACT,
        "cutlass.select_({0} > Int32(0), Int32(1), Int32(cutlass.select_({0} < Int32(0), Int32(-1), Int32(0))))",
    ),
    Row("square", "{0} * {0}", _ROUNDED),
    Row("reciprocal", "cute.math.div(Float32(1.0), {0}, full=True)", Error(2, f"{PTX}, div.full")),
    # Inductor's rule: the larger of the two, or the one that is NaN. The hardware's max drops a NaN.
    Row("maximum", "cutlass.select_(({0} > {1}) | ({0} != {0}), {0}, {1})", _EXACT),
    Row("minimum", "cutlass.select_(({0} < {1}) | ({0} != {0}), {0}, {1})", _EXACT),
    Row(
        "relu",
        "cutlass.select_(Float32(0.0) > {0}, Float32(0.0), {0})",
        _EXACT,
        "cutlass.select_(Int32(0) > {0}, Int32(0), {0})",
    ),
    Row("copysign", "cute.math.copysign({0}, {1})", _EXACT),
    Row("fmod", "cute.math.rem({0}, {1})", Error(0, CUDA), "{0} - quotient({0}, {1}) * {1}"),
    Row("remainder", "remainder({0}, {1})", _ROUNDED, "{0} - floor_quotient({0}, {1}) * {1}"),
    Row("truncdiv", "", _EXACT, "quotient({0}, {1})"),
    Row("floordiv", "", _EXACT, "floor_quotient({0}, {1})"),
    Row("floor", "cute.math.floor({0})", _EXACT),
    Row("ceil", "cute.math.ceil({0})", _EXACT),
    Row("round", "cute.math.roundeven({0})", _EXACT),
    Row("trunc", "cute.math.trunc({0})", _EXACT),
    # As Triton computes it. ftz costs nothing here but results below 2**-126, which become 0. The product in the
    # exponent is rounded, which moves a result of e**x by up to x/2 of its last places, and the factor by as much.
    Row(
        "sigmoid",
        "cute.math.rcp(Float32(1.0) + cute.math.exp2({0} * Float32(-1.4426950408889634), **FAST), **FAST)",
        Error(4, f"{PTX}, ex2.approx.ftz and rcp.approx.ftz", grows=1.5),
    ),
    Row("tanh", "cute.math.tanh({0})", Error(2, CUDA)),
    Row("exp", "cute.math.exp({0})", Error(2, CUDA)),
    Row("exp2", "cute.math.exp2({0})", Error(2, CUDA)),
    Row("expm1", "cute.math.expm1({0})", Error(1, CUDA)),
    Row("log", "cute.math.log({0})", Error(1, CUDA)),
    Row("log2", "cute.math.log2({0})", Error(1, CUDA)),
    Row("log10", "cute.math.log10({0})", Error(2, CUDA)),
    Row("log1p", "cute.math.log1p({0})", Error(1, CUDA)),
    Row("pow", "cute.math.pow({0}, {1})", Error(4, CUDA)),
    Row("sqrt", "cute.math.sqrt({0}, approx=True)", Error(1, f"{PTX}, sqrt.approx")),
    Row("rsqrt", "cute.math.rsqrt({0})", Error(2, CUDA)),
    Row("erf", "cute.math.erf({0})", Error(2, CUDA)),
    Row("erfc", "cute.math.erfc({0})", Error(4, CUDA)),
    Row("sin", "cute.math.sin({0})", Error(2, CUDA)),
    Row("cos", "cute.math.cos({0})", Error(2, CUDA)),
    Row("tan", "cute.math.tan({0})", Error(4, CUDA)),
    Row("sinh", "cute.math.sinh({0})", Error(3, CUDA)),
    Row("cosh", "cute.math.cosh({0})", Error(2, CUDA)),
    Row("asin", "cute.math.asin({0})", Error(2, CUDA)),
    Row("acos", "cute.math.acos({0})", Error(2, CUDA)),
    Row("atan", "cute.math.atan({0})", Error(2, CUDA)),
    Row("atan2", "cute.math.atan2({0}, {1})", Error(3, CUDA)),
    Row("asinh", "cute.math.asinh({0})", Error(3, CUDA)),
    Row("acosh", "cute.math.acosh({0})", Error(4, CUDA)),
    Row("atanh", "cute.math.atanh({0})", Error(3, CUDA)),
    Row("lt", "{0} < {1}", _EXACT),
    Row("le", "{0} <= {1}", _EXACT),
    Row("gt", "{0} > {1}", _EXACT),
    Row("ge", "{0} >= {1}", _EXACT),
    Row("eq", "{0} == {1}", _EXACT),
    Row("ne", "{0} != {1}", _EXACT),
    Row("isnan", "{0} != {0}", _EXACT),
    Row("isinf", 'cute.math.absf({0}) == Float32(float("inf"))', _EXACT),
    Row("signbit", "cute.math.copysign(Float32(1.0), {0}) < Float32(0.0)", _EXACT, "{0} < Int32(0)"),
    Row("where", "cutlass.select_({0}, {1}, {2})", _EXACT),
    Row("logical_and", "{0} & {1}", _EXACT),
    Row("logical_or", "{0} | {1}", _EXACT),
    Row("logical_xor", "{0} ^ {1}", _EXACT),
    Row("logical_not", "{0} ^ Boolean(True)", _EXACT),
    Row("bitwise_and", "{0} & {1}", _EXACT),
    Row("bitwise_or", "{0} | {1}", _EXACT),
    Row("bitwise_xor", "{0} ^ {1}", _EXACT),
    Row("bitwise_not", "{0} ^ Boolean(True)", _EXACT, "{0} ^ Int32(-1)"),
    # A shift by more bits than there are is undefined for the compiler.
    Row(
        "bitwise_left_shift",
        "",
        _EXACT,
        "cutlass.select_(shifts({1}), {0} << Int32(cutlass.select_(shifts({1}), {1}, Int32(0))), Int32(0))",
    ),
    Row("bitwise_right_shift", "", _EXACT, "{0} >> Int32(cutlass.select_(shifts({1}), {1}, Int32(31)))"),
]

ERRORS: dict[str, Error] = {row.name: row.error for row in _ROWS}
EXPRESSIONS: dict[str, str] = {row.name: row.source or row.integers for row in _ROWS}
INTEGER_EXPRESSIONS: dict[str, str] = {row.name: row.integers for row in _ROWS if row.integers is not None}
"""Where an op is written differently for integers. An op of integers alone has one source, in both tables."""

HELPERS: dict[str, str] = {
    "shifts": """\
def shifts(y):
    return (y >= Int32(0)) & (y < Int32(32))
""",
    # Dividing by 0 is undefined for the compiler, and so is dividing the smallest integer by -1.
    "floor_quotient": """\
def floor_quotient(x, y):
    safe = Int32(cutlass.select_((y == Int32(0)) | (y == Int32(-1)), Int32(1), y))
    quotient = Int32(cutlass.select_(y == Int32(-1), Int32(0) - x, x // safe))
    return Int32(cutlass.select_(y == Int32(0), Int32(0), quotient))
""",
    "quotient": """\
def quotient(x, y):
    floor = floor_quotient(x, y)
    inexact = (floor < Int32(0)) & (floor * y != x)
    return Int32(cutlass.select_(inexact, floor + Int32(1), floor))
""",
    "remainder": """\
def remainder(x, y):
    rest = cute.math.rem(x, y)
    other_side = (rest != Float32(0.0)) & ((rest < Float32(0.0)) ^ (y < Float32(0.0)))
    return Float32(cutlass.select_(other_side, rest + y, rest))
""",
}
"""Functions of a generated module, each after those that it calls."""


def helpers_of(source: str) -> list[str]:
    """The sources of the helpers that `source` calls, itself or through one of them, in the order of `HELPERS`."""
    used: list[str] = []
    for name, helper in reversed(HELPERS.items()):
        if any(re.search(rf"\b{name}\(", text) for text in (source, *used)):
            used.insert(0, helper)
    return used
