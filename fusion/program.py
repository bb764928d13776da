"""EpilogueProgram: what an epilogue computes, independent of Inductor, of buffer names and of any kernel.

A program is SSA. Value 0 is the accumulator, values 1 to P are the operands in order, and every instruction
defines the next value. Stores name the values that reach memory. Programs are built with `ProgramBuilder`, which
shares equal instructions, drops dead ones and numbers the operands by first use: two graphs that compute the same
thing in the same order give equal programs, so `EpilogueProgram.digest` may key kernels, caches and logs.

The accumulator is float32. What a graph states as a rounding (`to_dtype` to a narrower type) stays an
instruction; the conversion of a stored value to the dtype of its store is part of the store.
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

from .ops import CONSTANT, OPS, TO_DTYPE

ACCUMULATOR = 0

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return _DTYPE_NAMES[dtype] if dtype in _DTYPE_NAMES else str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of `dtype_name` for the dtypes of programs. Raises KeyError for any other name."""
    return _DTYPES[name]


class OperandKind(str, enum.Enum):
    """How an operand moves over the product: with m and n, with n, with m, or not at all."""

    TILE = "tile"
    ROW = "row"
    COLUMN = "column"
    SCALAR = "scalar"


class Major(str, enum.Enum):
    """Which index of an (M, N) tensor is contiguous: `ROW` means n, `COLUMN` means m."""

    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True)
class Operand:
    """An epilogue input: `tile` (M, N), `row` (N), `column` (M) or `scalar` (one element).

    `major` matters for tiles only.
    """

    kind: OperandKind
    dtype: torch.dtype
    major: Major = Major.ROW


@dataclass(frozen=True)
class Instruction:
    """Defines one value. `constant` is set for CONSTANT alone; `dtype` is the dtype of the value.

    For TO_DTYPE, `dtype` is what the input is rounded to; the value is widened back to float32 at once, as
    Inductor's kernels compute in float32 (so a float conversion is exactly one rounding).
    """

    op: str
    inputs: tuple[int, ...]
    dtype: torch.dtype
    constant: float | bool | None = None


@dataclass(frozen=True)
class Store:
    """An (M, N) output: which value, converted to `dtype` with round-to-nearest-even, in which layout."""

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
        """Raises ValueError unless every input is defined before its use and every op is in the table."""
        defined = 1 + len(self.operands)
        for instruction in self.instructions:
            if instruction.op not in OPS and instruction.op not in (CONSTANT, TO_DTYPE):
                raise ValueError(f"unknown op {instruction.op!r}")
            arity = OPS[instruction.op].arity if instruction.op in OPS else int(instruction.op == TO_DTYPE)
            if len(instruction.inputs) != arity:
                raise ValueError(f"{instruction.op} takes {arity} values, not {len(instruction.inputs)}")
            if not all(isinstance(value, int) and 0 <= value < defined for value in instruction.inputs):
                raise ValueError(f"{instruction.op} reads a value that is not defined yet: {instruction.inputs}")
            defined += 1
        if not self.stores or not all(isinstance(s.value, int) and 0 <= s.value < defined for s in self.stores):
            raise ValueError("a program needs at least one store, of a value that it defines")

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

    def constant(self, value: float | bool) -> int:
        """A constant: a bool stays a bool, any other number is a float32."""
        dtype = torch.bool if isinstance(value, bool) else torch.float32
        value = value if isinstance(value, bool) else float(value)
        return self._instruction(Instruction(CONSTANT, (), dtype, value))

    def op(self, name: str, *inputs: int) -> int:
        """`OPS[name]` of earlier values. Raises KeyError for a name that is not in the table."""
        row = OPS[name]
        if len(inputs) != row.arity:
            raise ValueError(f"{name} takes {row.arity} values, not {len(inputs)}")
        return self._instruction(Instruction(name, inputs, row.result(*map(self.dtype_of, inputs))))

    def round_to(self, value: int, dtype: torch.dtype) -> int:
        """`value` rounded to `dtype` and widened again; nothing when `dtype` holds every such value."""
        if compute_dtype(dtype) == dtype:
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
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _constant_to_json(constant: float | bool | None) -> str | bool | None:
    return constant.hex() if isinstance(constant, float) else constant


def _constant_from_json(constant: Any) -> float | bool | None:
    if constant is None or isinstance(constant, bool):
        return constant
    if not isinstance(constant, str):
        raise ValueError(f"not a constant: {constant!r}")
    value = float.fromhex(constant)
    return math.nan if math.isnan(value) else value
