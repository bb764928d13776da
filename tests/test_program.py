"""The epilogue program: canonical, exact as data, and refused when malformed."""

from __future__ import annotations

import math

import pytest
import torch
from nvgemm_fusion.fusion.program import (
    ACCUMULATOR,
    EpilogueProgram,
    Major,
    Operand,
    OperandKind,
    ProgramBuilder,
    Store,
)

ROW = Operand(OperandKind.ROW, torch.bfloat16)
TILE = Operand(OperandKind.TILE, torch.float16, Major.COLUMN)


def bias_relu(name="bias"):
    builder = ProgramBuilder()
    value = builder.op("relu", builder.op("add", ACCUMULATOR, builder.operand(name, ROW)))
    return builder.build([Store(value, torch.bfloat16)])


def test_names_do_not_matter():
    (one, keys), (other, _) = bias_relu("a"), bias_relu("b")
    assert one == other and one.digest == other.digest
    assert keys == ("a",)


def test_dead_values_vanish_and_operands_are_numbered_by_use():
    builder = ProgramBuilder()
    unused = builder.operand("unused", TILE)
    second, first = builder.operand("second", ROW), builder.operand("first", TILE)
    builder.op("exp", unused)
    value = builder.op("mul", builder.op("add", ACCUMULATOR, first), second)
    program, keys = builder.build([Store(value, torch.float32)])
    assert keys == ("first", "second")
    assert [i.op for i in program.instructions] == ["add", "mul"]


def test_equal_instructions_are_shared_but_zeros_keep_their_sign():
    builder = ProgramBuilder()
    assert builder.op("exp", ACCUMULATOR) == builder.op("exp", ACCUMULATOR)
    assert builder.constant(0.0) != builder.constant(-0.0)
    assert builder.constant(math.nan) == builder.constant(math.nan)
    assert builder.constant(1) == builder.constant(1.0) != builder.constant(True)


def test_rounding_to_a_dtype_that_holds_every_value_is_nothing():
    builder = ProgramBuilder()
    assert builder.round_to(ACCUMULATOR, torch.float32) == ACCUMULATOR
    assert builder.round_to(ACCUMULATOR, torch.bfloat16) != ACCUMULATOR


@pytest.mark.parametrize("constant", [0.1, -0.0, 1e-45, 3.4e38, math.inf, -math.inf, math.nan, True])
def test_json_is_exact(constant):
    builder = ProgramBuilder()
    value = builder.constant(constant)
    if isinstance(constant, bool):
        value = builder.op("where", value, ACCUMULATOR, builder.operand("t", TILE))
    value = builder.round_to(builder.op("add", ACCUMULATOR, value), torch.float16)
    program, _ = builder.build([Store(value, torch.float16, Major.COLUMN)])
    again = EpilogueProgram.from_json(program.to_json())
    assert again.to_json() == program.to_json() and again.digest == program.digest


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": [["explode", [0], "float32", None]]},
        {"instructions": [["add", [0], "float32", None]]},
        {"instructions": [["add", [0, 9], "float32", None]]},
        {"instructions": [["add", [0, -1], "float32", None]]},
        {"instructions": [["relu", ["0"], "float32", None]]},
        {"instructions": [["constant", [], "float32", 1.5]]},
        {"instructions": None},
        {"operands": [["sideways", "bfloat16", "row"]]},
        {"operands": [["row", "complex64", "row"]]},
        {"stores": []},
        {"stores": [[7, "bfloat16", "row"]]},
    ],
    ids=str,
)
def test_malformed_data_is_refused(change):
    data = bias_relu()[0].to_json() | change
    with pytest.raises(ValueError):
        EpilogueProgram.from_json(data)


def test_readable():
    assert bias_relu()[0].readable() == "o0: row bfloat16\nv0 = add(acc, o0)\nv1 = relu(v0)\nstore v1 as bfloat16"


def test_identity():
    program, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
    assert program.is_identity and not bias_relu()[0].is_identity
