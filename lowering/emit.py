"""EpilogueProgram -> the Python function that QuACK traces into a kernel's epilogue.

The function takes the accumulator and the operands as float32 scalars of one element, and returns the values to
store. It lives in a generated module with explicit imports: QuACK tells one epilogue from another by the source of
the function and of everything that it reaches. `EXPRESSIONS` is a column of the op table: one row an op.
"""

from __future__ import annotations

import math

import torch

from ..fusion.ops import CONSTANT, TO_DTYPE
from ..fusion.program import EpilogueProgram, OperandKind, compute_dtype

FUNCTION_NAME = "epilogue"
ACCUMULATOR_NAME = "acc"

DSL_TYPES = {
    torch.float32: "Float32",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
    torch.bool: "Boolean",
}

EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    # The approximate forms of division, root and exponential have no branch, unlike the IEEE ones. A branch keeps the
    # elements of a thread from overlapping: with it, a sigmoid cost a third of the whole GEMM's time on an H200.
    "div": "cute.math.div({0}, {1}, full=True)",  # within 2 ulp, and what Triton makes of a division
    "neg": "-{0}",
    "abs": "cute.math.absf({0})",
    # Inductor's rule: the larger of the two, or the one that is NaN. The hardware's max drops a NaN.
    "maximum": "cutlass.select_(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "cutlass.select_(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "relu": "cutlass.select_(Float32(0.0) > {0}, Float32(0.0), {0})",
    # As Triton computes it. ftz costs nothing here but results below 2**-126, which become 0.
    "sigmoid": "cute.math.rcp(Float32(1.0) + cute.math.exp2({0} * Float32(-1.4426950408889634), **FAST), **FAST)",
    "tanh": "cute.math.tanh({0})",
    "exp": "cute.math.exp({0})",
    "erf": "cute.math.erf({0})",
    "sqrt": "cute.math.sqrt({0}, approx=True)",  # within 1 ulp
    "rsqrt": "cute.math.rsqrt({0})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "where": "cutlass.select_({0}, {1}, {2})",
}

_HEADER = """\
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32

FAST = {"approx": True, "ftz": True}
"""


def operand_name(index: int) -> str:
    """The parameter of operand `index`. Never one of QuACK's reserved names (acc, D, c)."""
    return f"operand_{index}"


def store_name(index: int) -> str:
    """The key of store `index` in what the function returns: "D" is QuACK's name of the GEMM's own output."""
    return "D" if index == 0 else f"store_{index}"


def emit(program: EpilogueProgram) -> str:
    """The source of a module that defines the function `FUNCTION_NAME` for `program`."""
    names = [ACCUMULATOR_NAME, *(operand_name(index) for index in range(len(program.operands)))]
    lines = [f"def {FUNCTION_NAME}({', '.join(names)}):"]
    for index, operand in enumerate(program.operands):
        if operand.kind is OperandKind.SCALAR and operand.dtype != torch.float32:  # the other kinds arrive widened
            lines.append(f"    {operand_name(index)} = Float32({operand_name(index)})")
    for number, instruction in enumerate(program.instructions):
        inputs = [names[value] for value in instruction.inputs]
        if instruction.op == CONSTANT:
            expression = _constant(instruction.constant)
        elif instruction.op == TO_DTYPE:
            expression = f"Float32({DSL_TYPES[instruction.dtype]}({inputs[0]}))"
        else:
            # The cast gives the result of a selection its type back, and does nothing to any other.
            value_type = DSL_TYPES[compute_dtype(instruction.dtype)]
            expression = f"{value_type}({EXPRESSIONS[instruction.op].format(*inputs)})"
        names.append(f"v{number}")
        lines.append(f"    v{number} = {expression}")
    stores = ", ".join(f'"{store_name(i)}": {names[store.value]}' for i, store in enumerate(program.stores))
    lines.append(f"    return {{{stores}}}")
    return _HEADER + "\n" + "\n".join(lines) + "\n"


def _constant(value: float | bool) -> str:
    if isinstance(value, bool):
        return f"Boolean({value})"
    if math.isnan(value) or math.isinf(value):
        return f'Float32(float("{value}"))'
    return f"Float32({value!r})"
