"""EpilogueProgram -> the Python function that QuACK traces into a kernel's epilogue.

The function takes the accumulator and the operands of one element and returns the values to store. It lives in a
generated module with explicit imports: QuACK tells one epilogue from another by the source of the function and of
everything that it reaches. `expressions` says how each op is written. Values are a Float32, a Boolean, or an Int32 that
holds an integer of any dtype, wrapped around in that dtype after each op.
"""

from __future__ import annotations

import math
import re

import torch

from ..fusion.ops import CONSTANT, FLOAT, INTEGER, TO_DTYPE, kind_of
from ..fusion.program import EpilogueProgram, Instruction, Operand, OperandKind, Store, compute_dtype
from .expressions import EXPRESSIONS, INTEGER_EXPRESSIONS, helpers_of

FUNCTION_NAME = "epilogue"
ACCUMULATOR_NAME = "acc"

DSL_TYPES = {
    torch.float32: "Float32",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
    torch.float8_e4m3fn: "Float8E4M3FN",
    torch.float8_e5m2: "Float8E5M2",
    torch.bool: "Boolean",
    torch.int8: "Int8",
    torch.uint8: "Uint8",
    torch.int16: "Int16",
    torch.int32: "Int32",
}

CARRIERS = {
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.float8_e4m3fn,
    torch.float8_e5m2: torch.float8_e5m2,
    torch.uint8: torch.uint8,
    torch.int8: torch.uint8,
    torch.bool: torch.uint8,
    torch.int32: torch.float32,
}
"""The dtypes of operands and stores, and as which dtype of the same size each is loaded and stored.

QuACK knows only some dtypes, and hands all but scalars on as float32, in which it wants the results, too. That holds
every value of 8 bits; the bits of an int32 pass as those of a float32, which nothing converts on the way.
"""

_MODULE_HEAD = """\
import cutlass
import cutlass.cute as cute
from cutlass import {names}

FAST = {{"approx": True, "ftz": True}}
"""


def carrier(operand: Operand) -> torch.dtype:
    """As which dtype `operand` is loaded. A scalar comes by its address, in any dtype that the compiler has."""
    if operand.kind is OperandKind.SCALAR and operand.dtype == torch.int32:
        return torch.int32
    return CARRIERS[operand.dtype]


def operand_name(index: int) -> str:
    """The parameter of operand `index`. Never one of QuACK's reserved names (acc, D, c)."""
    return f"operand_{index}"


def store_name(index: int) -> str:
    """The key of store `index` in what the function returns: "D" is QuACK's name of the GEMM's own output."""
    return "D" if index == 0 else f"store_{index}"


def emit(program: EpilogueProgram) -> str:
    """The source of a module that defines the function `FUNCTION_NAME` for `program`."""
    names = [ACCUMULATOR_NAME, *(operand_name(index) for index in range(len(program.operands)))]
    dtypes = [torch.float32, *(compute_dtype(operand.dtype) for operand in program.operands)]
    lines = [f"def {FUNCTION_NAME}({', '.join(names)}):"]
    for index, operand in enumerate(program.operands):
        arrival = _arrival(operand, operand_name(index))
        if arrival != operand_name(index):
            lines.append(f"    {operand_name(index)} = {arrival}")
    for number, instruction in enumerate(program.instructions):
        inputs = [names[value] for value in instruction.inputs]
        expression = _expression(instruction, inputs, [dtypes[value] for value in instruction.inputs])
        names.append(f"v{number}")
        dtypes.append(compute_dtype(instruction.dtype))
        lines.append(f"    v{number} = {expression}")
    stores = ", ".join(
        f'"{store_name(i)}": {_departure(store, names[store.value])}' for i, store in enumerate(program.stores)
    )
    lines.append(f"    return {{{stores}}}")
    function = "\n".join(lines) + "\n"
    return "\n".join([_head(function), *helpers_of(function), function])


def _head(function: str) -> str:
    """The imports. Four are always there, so that a kernel that needs no others keeps its key."""
    always = {"BFloat16", "Boolean", "Float16", "Float32"}
    used = {name for name in DSL_TYPES.values() if re.search(rf"\b{name}\b", function)}
    return _MODULE_HEAD.format(names=", ".join(sorted(always | used)))


def _arrival(operand: Operand, name: str) -> str:
    """The operand in the type in which it is computed with. All but scalars of other dtypes arrive as a Float32."""
    kind, scalar = kind_of(operand.dtype), operand.kind is OperandKind.SCALAR
    if kind == FLOAT:
        return f"Float32({name})" if scalar and operand.dtype != torch.float32 else name
    if carrier(operand) == torch.float32:
        return f"Float32.bitcast({name}, Int32)"
    number = name if carrier(operand) == torch.int32 else f"Int32({name})"
    return _held(number, operand.dtype) if kind == INTEGER else f"{number} != Int32(0)"


def _departure(store: Store, name: str) -> str:
    """The value as QuACK stores it: a Float32, which it converts to the carrier of the store's dtype."""
    if store.dtype.is_floating_point:
        return name
    if CARRIERS[store.dtype] == torch.float32:
        return f"Int32.bitcast({name}, Float32)"
    return f"Float32({name} & Int32(255))" if store.dtype == torch.int8 else f"Float32({name})"


def _expression(instruction: Instruction, inputs: list[str], dtypes: list[torch.dtype]) -> str:
    """The value that `instruction` defines. The casts give the result of a selection its type back."""
    if instruction.op == CONSTANT:
        return _constant(instruction.constant)
    if instruction.op == TO_DTYPE:
        return _converted(inputs[0], dtypes[0], instruction.dtype)
    of_integers = instruction.op in INTEGER_EXPRESSIONS and kind_of(dtypes[-1]) == INTEGER
    expression = (INTEGER_EXPRESSIONS if of_integers else EXPRESSIONS)[instruction.op].format(*inputs)
    dtype = compute_dtype(instruction.dtype)
    return _held(expression, dtype) if kind_of(dtype) == INTEGER else f"{DSL_TYPES[dtype]}({expression})"


def _converted(value: str, source: torch.dtype, dtype: torch.dtype) -> str:
    """`value`, of dtype `source`, converted to `dtype` and, when that is a narrow float, widened again."""
    if kind_of(dtype) == INTEGER:
        return _held(value if kind_of(source) == INTEGER else f"Int32({value})", dtype)
    if dtype.itemsize == 1:
        # The value itself, in a form that the compiler does not look through: it would make one conversion of that
        # from an integer to float32 and this one, and there is no instruction for it.
        value = f"cute.math.copysign(cute.math.absf({value}), {value})"
    converted = f"{DSL_TYPES[dtype]}({value})"
    return converted if dtype == torch.float32 else f"Float32({converted})"


def _held(number: str, dtype: torch.dtype) -> str:
    """An Int32 that holds the integer `number` of `dtype`, wrapped around in it."""
    return f"Int32({number})" if dtype == torch.int32 else f"Int32({DSL_TYPES[dtype]}({number}))"


def _constant(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return f"Boolean({value})"
    if isinstance(value, int):
        return f"Int32({value})"
    if math.isnan(value) or math.isinf(value):
        return f'Float32(float("{value}"))'
    return f"Float32({value!r})"
