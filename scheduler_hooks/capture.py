"""Scheduler nodes -> EpilogueProgram: what Inductor's loop bodies compute, in the words of `fusion`.

A loop body is run with an ops handler that records instead of computing. Every load and store gives an index
expression, which becomes an access of the (M, N) space of the GEMM's product (`fusion.space`): a buffer written
earlier in the region must be read at the very element that was written, and any other load must be a broadcast.

One `RegionCapture` serves all regions of a GEMM: nodes are added in topological order, and `program` gives the
program that ends in any of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor import config
from torch._inductor.loop_body import LoopBody
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from ..fusion.ops import BOOL, INTEGER_DTYPES, OPS, kind_of
from ..fusion.problem import ALIGNMENT_BYTES, GEMM_DTYPES, MatrixLayout
from ..fusion.program import EpilogueProgram, Operand, OperandKind, ProgramBuilder, Store
from ..fusion.reasons import Reason, Refusal
from ..fusion.space import Access, IterationSpace, cut
from ..lowering.emit import CARRIERS

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

INDUCTOR_NAMES = {
    "truediv": "div",
    "mod": "fmod",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
"""Ops that Inductor calls by another name than the op table."""

ROUNDED_FIRST = {"floor_to_int": "floor", "ceil_to_int": "ceil", "round_to_int": "round", "trunc_to_int": "trunc"}
"""Conversions to an integer, and the op that comes before the conversion."""

OTHER_REASONS = {
    "masked": Reason.INDEX_PATTERN,
    "indirect_indexing": Reason.INDEX_PATTERN,
    "index_expr": Reason.INDEX_PATTERN,
    "value_expr": Reason.INDEX_PATTERN,
    "check_bounds": Reason.INDEX_PATTERN,
    "bucketize": Reason.INDEX_PATTERN,
}
"""Ops of Inductor that are about where something is read. What else is not in the op table is an unsupported op."""


@dataclass(frozen=True)
class BufferAccess:
    """An operand or an output as the launcher gets it: a buffer, and where its elements lie in it."""

    buffer: str
    access: Access


@dataclass(frozen=True)
class CapturedProgram:
    """A program with the buffers behind its operands and its stores, in order."""

    program: EpilogueProgram
    operands: tuple[BufferAccess, ...]
    outputs: tuple[BufferAccess, ...]


class RegionCapture:
    """Records the readers of one GEMM. `size` is the product's (M, N), `product` where the product would lie."""

    def __init__(self, size: tuple[int, int], product: BufferAccess, builder: ProgramBuilder, value: int) -> None:
        self.size = size
        self.builder = builder
        self.written: dict[str, Access] = {}
        self.values: dict[str, int] = {}
        self.write(product, value)

    def write(self, target: BufferAccess, value: int) -> None:
        """Notes that `value` was stored; a later node that loads it gets the value itself.

        Memory would have rounded it. Inductor's fused kernels do not, unless `emulate_precision_casts` is set.
        """
        dtype = V.graph.get_dtype(target.buffer)
        value = self.builder.convert(value, _computed(dtype))
        if config.emulate_precision_casts:
            value = self.builder.round_to(value, dtype)
        self.written[target.buffer] = target.access.over(self.size)
        self.values[target.buffer] = value

    def add(self, node: BaseSchedulerNode) -> Refusal | None:
        """Records one more node, or says why it cannot be part of an epilogue (and records nothing)."""
        if not isinstance(node, SchedulerNode) or node.is_template() or node.is_reduction():
            return Refusal(Reason.NOT_POINTWISE, node.get_name())
        if not isinstance(node._body, LoopBody) or any(len(sizes) for sizes in node._sizes[1:]):
            return Refusal(Reason.NOT_POINTWISE, node.get_name())
        if node.has_aliasing_or_mutation():
            return Refusal(Reason.MUTATION, node.get_name())
        try:
            recorder = _Recorder(self, self._indices(node))
            with V.set_ops_handler(recorder):
                node._body(recorder.indices.values, [])
            for name, _, _ in recorder.stores:
                _computed(V.graph.get_dtype(name))
        except _Refused as refused:
            return refused.refusal
        for name, access, value in recorder.stores:
            self.write(BufferAccess(name, access), value)
        return None

    def program(self, buffers: Sequence[str]) -> CapturedProgram | Refusal:
        """The program that stores `buffers` (written by nodes that were added), each in its own layout."""
        stores, outputs = [], []
        for buffer in buffers:
            access, dtype = self.written[buffer], V.graph.get_dtype(buffer)
            if dtype not in CARRIERS:
                return Refusal(Reason.DTYPE, f"{buffer} is {dtype}")
            layout = MatrixLayout.of(self.size, (access.stride_m, access.stride_n), access.offset, dtype.itemsize)
            if not isinstance(layout, MatrixLayout):
                return layout
            stores.append(Store(self.values[buffer], dtype, layout.major))
            outputs.append(BufferAccess(buffer, Access(*layout.strides, access.offset)))
        program, operands = self.builder.build(stores)
        return CapturedProgram(program, operands, tuple(outputs))

    def _indices(self, node: SchedulerNode) -> _Indices:
        """The loops of `node` as moves over the product, found through a load of something written before."""
        body = node._body
        for name, access in self.written.items():
            for index in body.get_all_read_expr(name):
                return _Indices.through(body, index, self.size, access)
        raise _Refused(Reason.INDEX_PATTERN, f"{node.get_name()} does not read the product")


@dataclass(frozen=True)
class _Indices:
    """The loops of a body: what stands for each loop variable, the loops that are left, and their space."""

    values: list[sympy.Expr]
    ranges: dict[sympy.Symbol, int]
    space: IterationSpace

    @classmethod
    def through(cls, body: LoopBody, index: sympy.Expr, size: tuple[int, int], access: Access) -> _Indices:
        """From `index`, with which `body` reads a buffer whose elements lie at `access`."""
        strides = (access.stride_m, access.stride_n)
        values: dict[sympy.Symbol, sympy.Expr] = {}
        ranges: dict[sympy.Symbol, int] = {}
        steps = {variable: _integer(count) for variable, count in body.var_ranges.items()}
        coefficients, _ = _affine(index, [v for v, count in steps.items() if count != 1])
        coefficient_of = dict(zip([v for v, count in steps.items() if count != 1], coefficients))
        for number, (variable, count) in enumerate(steps.items()):
            if count == 1:
                values[variable] = sympy.Integer(0)
                continue
            inner_steps = cut(size, strides, count, coefficient_of[variable])
            parts = [count] if inner_steps is None else [count // inner_steps, inner_steps]
            value = sympy.Integer(0)
            for part, part_steps in enumerate(parts):
                symbol = sympy.Symbol(f"i{number}_{part}", integer=True, nonnegative=True)
                ranges[symbol] = part_steps
                value = value * part_steps + symbol
            values[variable] = value
        moved = _simplify(index.subs(values), ranges)
        coefficients, offset = _affine(moved, list(ranges))
        space = IterationSpace.from_product(size, strides, list(zip(ranges.values(), coefficients)))
        if space is None or offset != access.offset:
            raise _Refused(Reason.INDEX_PATTERN, f"reads the product at {index}")
        return cls(list(values.values()), ranges, space)

    def access(self, index: sympy.Expr) -> Access:
        """The access of any other index of the body."""
        simplified = _simplify(index, self.ranges)
        coefficients, offset = _affine(simplified, list(self.ranges))
        access = self.space.access(coefficients, offset)
        if access is None:
            raise _Refused(Reason.INDEX_PATTERN, f"no broadcast: {simplified}")
        return access


class _Recorder(DefaultHandler):
    """An ops handler whose values are the numbers of a ProgramBuilder, wrapped in `_Value`."""

    def __init__(self, capture: RegionCapture, indices: _Indices) -> None:
        self.capture = capture
        self.builder = capture.builder
        self.indices = indices
        self.stores: list[tuple[str, Access, int]] = []

    def load(self, name: str, index: sympy.Expr) -> _Value:
        access = self.indices.access(index)
        if name in self.capture.values:
            if access != self.capture.written[name]:
                raise _Refused(Reason.INDEX_PATTERN, f"{name} is read at another element than it was written")
            return _Value(self.capture.values[name])
        dtype = V.graph.get_dtype(name)
        operand = operand_of(name, access, self.capture.size, dtype)
        if not isinstance(operand, Operand):
            raise _Refused(operand.reason, operand.detail)
        return _Value(self.builder.operand(BufferAccess(name, access), operand))

    def store(self, name: str, index: sympy.Expr, value: _Value, mode: str | None = None) -> None:
        if mode is not None:
            raise _Refused(Reason.ATOMIC, name)
        (number,) = self._numbers([value])
        self.stores.append((name, self.indices.access(index), number))

    def constant(self, value: float | bool, dtype: torch.dtype) -> _Value:
        if dtype.is_floating_point:
            return _Value(self.builder.constant(float(value)))
        # An int64 itself is refused where one is made; beside another integer its constant has to be held only.
        held = torch.int32 if dtype == torch.int64 else _computed(dtype)
        if held != torch.bool and not torch.iinfo(held).min <= value <= torch.iinfo(held).max:
            raise _Refused(Reason.DTYPE, f"the constant {value} of {dtype}")
        return _Value(self.builder.constant(value, held))

    def to_dtype(
        self, x: _Value, dtype: torch.dtype, src_dtype: torch.dtype | None = None, use_compute_types: bool = True
    ) -> _Value:
        (number,) = self._numbers([x])
        number = self.builder.convert(number, _computed(dtype))
        # With compute types, Inductor's kernels go on in float32: a conversion to a 16-bit float rounds nothing.
        rounds = dtype in FLOAT8_DTYPES or not use_compute_types
        return _Value(self.builder.round_to(number, dtype) if rounds else number)

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Value:
        if name == "identity":
            return args[0]
        if name in ROUNDED_FIRST and len(args) == 2:
            return self.to_dtype(self._default(ROUNDED_FIRST[name], args[:1], {}), args[1])
        op = INDUCTOR_NAMES.get(name, name)
        if op not in OPS or kwargs or len(args) != OPS[op].arity:
            raise _Refused(OTHER_REASONS.get(name, Reason.UNSUPPORTED_OP), name)
        conditions, values = (args[:1], args[1:]) if op == "where" else ((), args)
        numbers = [self.builder.convert(number, torch.bool) for number in self._numbers(conditions)]
        return _Value(self.builder.op(op, *numbers, *self._alike(op, self._numbers(values))))

    def _alike(self, op: str, numbers: Sequence[int]) -> list[int]:
        """The values in the one dtype in which Inductor's kernels compute `op`, if there is one that the op takes."""
        dtype = functools.reduce(torch.promote_types, map(self.builder.dtype_of, numbers))
        if OPS[op].takes == BOOL:  # logic asks of a number whether it is 0
            dtype = torch.bool
        if kind_of(dtype) not in OPS[op].takes:
            raise _Refused(Reason.DTYPE, f"{op} of {dtype}")
        return [self.builder.convert(number, dtype) for number in numbers]

    def _numbers(self, values: Sequence[Any]) -> list[int]:
        """The values' numbers in the builder. A Python number is a constant of the dtype of the values beside it."""
        known = [self.builder.dtype_of(value.number) for value in values if isinstance(value, _Value)]
        dtype = functools.reduce(torch.promote_types, known) if known else None
        numbers = []
        for value in values:
            if isinstance(value, _Value):
                numbers.append(value.number)
            elif isinstance(value, (bool, int, float)):
                integer = dtype in INTEGER_DTYPES and isinstance(value, int)
                numbers.append(self.constant(value, dtype).number if integer else self.builder.constant(value))
            else:
                raise _Refused(Reason.UNSUPPORTED_OP, f"a value of type {type(value).__name__}")
        return numbers


@dataclass(frozen=True)
class _Value:
    """The number of a value in the builder; a type of its own, so that a Python number is not taken for one."""

    number: int


class _Refused(Exception):
    """Leaves a loop body that cannot be captured. Caught in `RegionCapture.add`, never seen outside."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


def _computed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed here. Refuses what has none."""
    if dtype in (*GEMM_DTYPES, *FLOAT8_DTYPES):
        return torch.float32
    if dtype not in (torch.bool, *INTEGER_DTYPES):
        raise _Refused(Reason.DTYPE, f"a conversion to {dtype}")
    return dtype


def operand_of(buffer: str, access: Access, size: tuple[int, int], dtype: torch.dtype) -> Operand | Refusal:
    """The operand that `buffer` is when read with `access` over an (M, N) product of `size`, or why it is none."""
    node = V.graph.get_buffer(buffer)
    if node.get_device_or_error().type != "cuda":
        if node.get_size():
            return Refusal(Reason.DEVICE, buffer)
        if not dtype.is_floating_point:
            return Refusal(Reason.DTYPE, f"{buffer} is {dtype}, on the CPU")
        return Operand(OperandKind.NUMBER, torch.float32)
    if dtype not in CARRIERS:
        return Refusal(Reason.DTYPE, f"{buffer} is {dtype}")
    operand = access.operand(size, dtype)
    if isinstance(operand, Operand) and operand.kind is not OperandKind.SCALAR and not starts_aligned(buffer):
        return Refusal(Reason.ALIGNMENT, f"{buffer} does not start at a multiple of {ALIGNMENT_BYTES} bytes")
    return operand


def starts_aligned(buffer: str) -> bool:
    """Whether Inductor knows that `buffer` starts at a multiple of 16 bytes (it copies inputs that stop to)."""
    return buffer not in V.graph.unaligned_buffers


def _affine(index: sympy.Expr, variables: Sequence[sympy.Symbol]) -> tuple[list[int], int]:
    """The coefficients of `variables` in `index`, and what is left."""
    expanded = sympy.expand(index)
    coefficients = [expanded.coeff(variable) for variable in variables]
    rest = sympy.expand(expanded - sum(c * v for c, v in zip(coefficients, variables)))
    if not rest.is_Integer or not all(coefficient.is_Integer for coefficient in coefficients):
        raise _Refused(Reason.INDEX_PATTERN, str(index))
    return [int(coefficient) for coefficient in coefficients], int(rest)


def _simplify(index: sympy.Expr, ranges: dict[sympy.Symbol, int]) -> sympy.Expr:
    return V.graph.sizevars.simplify_with_ranges(sympy.expand(index), {s: sympy.Integer(n) for s, n in ranges.items()})


def _integer(size: Any) -> int:
    if not isinstance(size, (int, sympy.Integer)):
        raise _Refused(Reason.SYMBOLIC_SHAPE, str(size))
    return int(size)
