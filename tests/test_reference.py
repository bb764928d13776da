"""The op table, its torch references, and the emitted source run on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from nvgemm_fusion.fusion.ops import OPS
from nvgemm_fusion.fusion.program import ACCUMULATOR, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.fusion.reference import evaluate
from nvgemm_fusion.lowering.dry_run import dry_run
from nvgemm_fusion.lowering.emit import EXPRESSIONS, emit, operand_name

def program_of(name):
    """The op applied to the accumulator, a tile operand and the accumulator negated, in float32."""
    builder = ProgramBuilder()
    tile = builder.operand("tile", Operand(OperandKind.TILE, torch.float32))
    inputs = [ACCUMULATOR, tile, builder.op("neg", ACCUMULATOR)][: OPS[name].arity]
    return builder.build([Store(builder.op(name, *inputs), torch.float32)])[0]


def test_no_emission_without_a_row():
    assert set(EXPRESSIONS) == set(OPS)


@pytest.mark.parametrize("name", ["maximum", "minimum", "relu"])
def test_a_nan_goes_through(name):
    program = program_of(name)
    nan = torch.full((2, 2), math.nan, dtype=torch.float64)
    one = torch.ones(2, 2, dtype=torch.float64)
    for accumulator, tile in ((nan, one), (one, nan)):
        operands = [tile] if program.operands else []
        if name == "relu" and accumulator is one:
            continue
        assert dry_run(program, accumulator, operands)[0].isnan().all()


def test_operands_go_where_their_kinds_say():
    builder = ProgramBuilder()
    value = ACCUMULATOR
    for weight, kind in enumerate(OperandKind, 1):
        dtype = torch.float32 if kind is OperandKind.NUMBER else torch.bfloat16
        operand = builder.operand(kind, Operand(kind, dtype))
        value = builder.op("add", builder.op("mul", value, builder.constant(float(weight))), operand)
    program, keys = builder.build([Store(value, torch.bfloat16)])
    shapes = {"tile": (4, 4), "row": (4,), "column": (4,), "scalar": (1,), "number": ()}  # square: shapes tell nothing
    tensors = {kind: torch.randn(shapes[kind.value]).bfloat16() for kind in OperandKind}
    accumulator = torch.randn(4, 4, dtype=torch.float64)
    expected = accumulator
    for weight, kind in enumerate(OperandKind, 1):
        tensor = tensors[kind].double()
        expected = expected * weight + (tensor.unsqueeze(1) if kind is OperandKind.COLUMN else tensor)
    operands = [tensors[key] for key in keys]
    for compute in (evaluate, dry_run):
        torch.testing.assert_close(compute(program, accumulator, operands)[0], expected, rtol=1e-14, atol=0)


def test_stated_roundings_are_carried_out_in_every_precision():
    builder = ProgramBuilder()
    value = builder.op("mul", builder.round_to(ACCUMULATOR, torch.bfloat16), builder.constant(3.0))
    program, _ = builder.build([Store(value, torch.float32)])
    accumulator = torch.tensor([[1.003]], dtype=torch.float64)
    expected = accumulator.bfloat16().double() * 3
    for compute in (evaluate, dry_run):
        assert torch.equal(compute(program, accumulator, [])[0], expected)


def test_wrong_shapes_are_refused():
    builder = ProgramBuilder()
    row = builder.operand("r", Operand(OperandKind.ROW, torch.bfloat16))
    program, _ = builder.build([Store(builder.op("add", ACCUMULATOR, row), torch.bfloat16)])
    with pytest.raises(ValueError, match="row operand"):
        evaluate(program, torch.zeros(4, 8), [torch.zeros(4)])
    with pytest.raises(ValueError):
        evaluate(program, torch.zeros(4, 8), [])


def test_generated_names_are_never_reserved_ones():
    names = {operand_name(index) for index in range(100)}
    assert not names & {"acc", "D", "c", "C", "A", "B"}


def test_special_constants_are_emitted():
    builder = ProgramBuilder()
    value = ACCUMULATOR
    for constant in (math.inf, -math.inf, math.nan, -0.0, 1e-45):
        value = builder.op("maximum", value, builder.constant(constant))
    program, _ = builder.build([Store(value, torch.float32)])
    compile(emit(program), "emitted", "exec")
    assert dry_run(program, torch.zeros(1, 1), [])[0].isnan().all()
