"""EpilogueProgram: what an epilogue computes, independent of Inductor, of buffer names and of any kernel.

A program is SSA. Value 0 is the accumulator, values 1 to P are the operands in order, and every instruction
defines the next value. Stores name the values that reach memory. Programs are built with `ProgramBuilder`, which
shares equal instructions, drops dead ones and numbers the operands by first use: two graphs that compute the same
thing in the same order give equal programs, so `EpilogueProgram.digest` may key kernels, caches and logs.

The accumulator is float32. Values are float32, bool or an integer of up to 32 bits that wraps around in its own
dtype. What a graph states as a rounding (`to_dtype` to a narrower type) stays an instruction; the conversion of a
stored value to the dtype of its store is part of the store.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .ops import BOOL, CONSTANT, FLOAT, INTEGER, INTEGER_DTYPES, OPS, TO_DTYPE, kind_of

ACCUMULATOR = 0

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.bool: "bool",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return _DTYPE_NAMES[dtype] if dtype in _DTYPE_NAMES else str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of `dtype_name` for the dtypes of programs. Raises KeyError for any other name."""
    return _DTYPES[name]


class OperandKind(str, enum.Enum):
    """How an operand moves over the product: with m and n, with n, with m, or not at all. A number lies on the host and
    is read when the kernel is launched; all others lie on the GPU."""

    TILE = "tile"
    ROW = "row"
    COLUMN = "column"
    SCALAR = "scalar"
    NUMBER = "number"


class Major(str, enum.Enum):
    """Which index of an (M, N) tensor is contiguous: `ROW` means n, `COLUMN` means m."""

    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True)
class Operand:
    """An epilogue input: `tile` (M, N), `row` (N), `column` (M), `scalar` or `number` (one element).

    `major` matters for tiles only. The dtype of a number is float32, in which the kernel gets it, whatever it had.
    """

    kind: OperandKind
    dtype: torch.dtype
    major: Major = Major.ROW


@dataclass(frozen=True)
class Instruction:
    """Defines one value. `constant` is set for CONSTANT alone; `dtype` is the dtype of the value.

    For TO_DTYPE, `dtype` is what the input is converted to. A float narrower than float32 is widened back to it at
    once, as Inductor's kernels compute in float32 (so such a conversion is exactly one rounding).
    """

    op: str
    inputs: tuple[int, ...]
    dtype: torch.dtype
    constant: float | int | bool | None = None


@dataclass(frozen=True)
class Store:
    """An (M, N) output: which value, in which layout. A float is converted to `dtype` with round-to-nearest-even (what
    is too large for a float8 becomes its largest number); a bool or an integer is of `dtype` already."""

    value: int
    dtype: torch.dtype
    major: Major = Major.ROW


@dataclass(frozen=True)
class EpilogueProgram:
    """See the module's docstring. Immutable and hashable."""

    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    stores: tuple[Store, ...]

    @property
    def is_identity(self) -> bool:
        """True when the accumulator itself is all that is stored: what a plain GEMM computes."""
        return [store.value for store in self.stores] == [ACCUMULATOR]

    @cached_property
    def digest(self) -> str:
        """A canonical key of 16 hexadecimal digits (64 bits of SHA-256 of the JSON form)."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain data, exact: constants are written in hexadecimal floating point."""
        return {
            "operands": [[o.kind.value, dtype_name(o.dtype), o.major.value] for o in self.operands],
            "instructions": [
                [i.op, list(i.inputs), dtype_name(i.dtype), _constant_to_json(i.constant)] for i in self.instructions
            ],
            "stores": [[s.value, dtype_name(s.dtype), s.major.value] for s in self.stores],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EpilogueProgram:
        """The inverse of `to_json`. Raises ValueError for anything that `to_json` cannot have written."""
        try:
            program = cls(
                operands=tuple(
                    Operand(OperandKind(kind), dtype_from_name(dtype), Major(major))
                    for kind, dtype, major in data["operands"]
                ),
                instructions=tuple(
                    Instruction(op, tuple(inputs), dtype_from_name(dtype), _constant_from_json(constant))
                    for op, inputs, dtype, constant in data["instructions"]
                ),
                stores=tuple(
                    Store(value, dtype_from_name(dtype), Major(major)) for value, dtype, major in data["stores"]
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an epilogue program: {error!r}") from error
        program.validate()
        return program

    def validate(self) -> None:
        """Raises ValueError unless every op is in the table, every input is defined before its use and is of a kind
        that the op takes, and every value has the dtype that the table says."""
        if any(operand.kind is OperandKind.NUMBER and operand.dtype != torch.float32 for operand in self.operands):
            raise ValueError("a number is passed as a float32")
        dtypes = [torch.float32, *(compute_dtype(operand.dtype) for operand in self.operands)]
        for instruction in self.instructions:
            defined = len(dtypes)
            if instruction.op not in OPS and instruction.op not in (CONSTANT, TO_DTYPE):
                raise ValueError(f"unknown op {instruction.op!r}")
            arity = OPS[instruction.op].arity if instruction.op in OPS else int(instruction.op == TO_DTYPE)
            if len(instruction.inputs) != arity:
                raise ValueError(f"{instruction.op} takes {arity} values, not {len(instruction.inputs)}")
            if not all(isinstance(value, int) and 0 <= value < defined for value in instruction.inputs):
                raise ValueError(f"{instruction.op} reads a value that is not defined yet: {instruction.inputs}")
            _check_dtypes(instruction, [dtypes[value] for value in instruction.inputs])
            dtypes.append(compute_dtype(instruction.dtype))
        if not self.stores or not all(isinstance(s.value, int) and 0 <= s.value < len(dtypes) for s in self.stores):
            raise ValueError("a program needs at least one store, of a value that it defines")
        for store in self.stores:
            if dtypes[store.value] != compute_dtype(store.dtype):
                raise ValueError(f"a {dtypes[store.value]} value cannot be stored as {store.dtype}")

    def readable(self) -> str:
        """A form for people: one line an operand, an instruction and a store."""
        names = ["acc", *(f"o{i}" for i in range(len(self.operands)))]
        lines = [
            f"o{i}: {o.kind.value} {dtype_name(o.dtype)}"
            + (" column-major" if o.kind is OperandKind.TILE and o.major is Major.COLUMN else "")
            for i, o in enumerate(self.operands)
        ]
        for number, instruction in enumerate(self.instructions):
            names.append(f"v{number}")
            if instruction.op == CONSTANT:
                arguments = repr(instruction.constant)
            else:
                arguments = ", ".join(names[value] for value in instruction.inputs)
                arguments += f", {dtype_name(instruction.dtype)}" if instruction.op == TO_DTYPE else ""
            lines.append(f"v{number} = {instruction.op}({arguments})")
        for store in self.stores:
            suffix = " column-major" if store.major is Major.COLUMN else ""
            lines.append(f"store {names[store.value]} as {dtype_name(store.dtype)}{suffix}")
        return "\n".join(lines)


class ProgramBuilder:
    """Builds one program. Values are the integers that its methods return; `ACCUMULATOR` is there from the start.

    Operands are identified by a key of the caller's choice (a buffer name and an access): the same key gives the
    same value, and `operand_keys` of the built program's builder says which key became which operand.
    """

    def __init__(self) -> None:
        self._values: list[Operand | Instruction | None] = [None]
        self._numbers: dict[Any, int] = {}
        self._keys: dict[int, Any] = {}

    def operand(self, key: Any, operand: Operand) -> int:
        """The value of the operand `key`, declared on its first use."""
        number = self._define(("operand", key), operand)
        self._keys[number] = key
        return number

    def constant(self, value: float | bool, dtype: torch.dtype | None = None) -> int:
        """A constant of `dtype`; without one, a bool stays a bool and any other number is a float32."""
        dtype = dtype or (torch.bool if isinstance(value, bool) else torch.float32)
        number = {FLOAT: float, INTEGER: int, BOOL: bool}[kind_of(dtype)](value)
        return self._instruction(Instruction(CONSTANT, (), dtype, number))

    def op(self, name: str, *inputs: int) -> int:
        """`OPS[name]` of earlier values. Raises KeyError for a name that is not in the table, and ValueError for
        values that the op does not take."""
        row = OPS[name]
        if len(inputs) != row.arity:
            raise ValueError(f"{name} takes {row.arity} values, not {len(inputs)}")
        dtypes = [self.dtype_of(value) for value in inputs]
        instruction = Instruction(name, inputs, row.result(*dtypes))
        _check_dtypes(instruction, dtypes)
        return self._instruction(instruction)

    def convert(self, value: int, dtype: torch.dtype) -> int:
        """`value` as a value of `dtype`, which is float32, bool or an integer (to be rounded, see `round_to`)."""
        defined, source, target = self._values[value], self.dtype_of(value), kind_of(dtype)
        if source == dtype:
            return value
        if isinstance(defined, Instruction) and defined.op == CONSTANT and _holds(dtype, defined.constant):
            return self.constant(defined.constant, dtype)
        if source == torch.bool:
            return self.op("where", value, self.constant(1, dtype), self.constant(0, dtype))
        if target == BOOL:
            return self.op("ne", value, self.constant(0, source))
        return self._instruction(Instruction(TO_DTYPE, (value,), dtype))

    def round_to(self, value: int, dtype: torch.dtype) -> int:
        """`value` rounded to `dtype` and widened again; nothing when `dtype` holds every such value, or this one."""
        defined = self._values[value]
        is_rounded = isinstance(defined, Operand) or (isinstance(defined, Instruction) and defined.op == TO_DTYPE)
        if compute_dtype(dtype) == dtype or (is_rounded and defined.dtype == dtype):
            return value
        return self._instruction(Instruction(TO_DTYPE, (value,), dtype))

    def dtype_of(self, value: int) -> torch.dtype:
        """The dtype in which `value` is computed."""
        return torch.float32 if value == ACCUMULATOR else compute_dtype(self._values[value].dtype)

    def build(self, stores: list[Store]) -> tuple[EpilogueProgram, tuple[Any, ...]]:
        """The canonical program of these stores, and the key of each of its operands in order."""
        live, pending = set(), [store.value for store in stores]
        while pending:
            value = pending.pop()
            if value not in live:
                live.add(value)
                defined = self._values[value]
                pending.extend(defined.inputs if isinstance(defined, Instruction) else ())
        instructions = [v for v in sorted(live) if isinstance(self._values[v], Instruction)]
        uses = [value for number in instructions for value in self._values[number].inputs]
        uses += [store.value for store in stores]
        operands = list(dict.fromkeys(value for value in uses if isinstance(self._values[value], Operand)))
        renumbered = {value: new for new, value in enumerate([ACCUMULATOR, *operands, *instructions])}
        program = EpilogueProgram(
            operands=tuple(self._values[value] for value in operands),
            instructions=tuple(
                replace(self._values[v], inputs=tuple(renumbered[i] for i in self._values[v].inputs))
                for v in instructions
            ),
            stores=tuple(replace(store, value=renumbered[store.value]) for store in stores),
        )
        program.validate()
        return program, tuple(self._keys[value] for value in operands)

    def _instruction(self, instruction: Instruction) -> int:
        # 0.0 and -0.0 (and NaN, which equals nothing) must not share a number through Python's equality.
        key = replace(instruction, constant=None), _constant_to_json(instruction.constant)
        return self._define(key, instruction)

    def _define(self, key: Any, definition: Operand | Instruction) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._values)
            self._values.append(definition)
        return self._numbers[key]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed: float32 for the narrower floats, as in Inductor."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _check_dtypes(instruction: Instruction, inputs: list[torch.dtype]) -> None:
    """Raises ValueError unless the dtype of `instruction` fits its op and the dtypes of its inputs."""
    op, dtype = instruction.op, instruction.dtype
    if op == CONSTANT:
        kind = {float: FLOAT, int: INTEGER, bool: BOOL}.get(type(instruction.constant))
        fits = kind == kind_of(dtype) and dtype in (torch.float32, torch.bool, *INTEGER_DTYPES)
    elif op == TO_DTYPE:
        fits = BOOL not in (kind_of(dtype), *map(kind_of, inputs))
    else:
        values = inputs[1:] if op == "where" else inputs
        fits = len(set(values)) == 1 and kind_of(values[0]) in OPS[op].takes and dtype == OPS[op].result(*inputs)
        fits = fits and (op != "where" or inputs[0] == torch.bool)
    if not fits:
        names = ", ".join(map(dtype_name, inputs))
        raise ValueError(f"{op} of ({names}) to {dtype_name(dtype)} with constant {instruction.constant}")


def _holds(dtype: torch.dtype, constant: float | int | bool) -> bool:
    """Whether an integer of `dtype` has the value of `constant`; always true for another `dtype`."""
    if kind_of(dtype) != INTEGER:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= constant <= limits.max and float(constant).is_integer()


def _constant_to_json(constant: float | int | bool | None) -> str | int | bool | None:
    return constant.hex() if isinstance(constant, float) else constant


def _constant_from_json(constant: Any) -> float | int | bool | None:
    if constant is None or isinstance(constant, (bool, int)):
        return constant
    if not isinstance(constant, str):
        raise ValueError(f"not a constant: {constant!r}")
    value = float.fromhex(constant)
    return math.nan if math.isnan(value) else value
