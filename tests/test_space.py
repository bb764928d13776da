"""Which operand an access is follows from its index over the product, never from a shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvgemm_fusion.fusion.problem import MatrixLayout
from nvgemm_fusion.fusion.program import Major, Operand, OperandKind
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.fusion.space import Access, IterationSpace, Loop, cut

BF16 = torch.bfloat16


def test_views_of_the_product_are_the_same_space():
    space = IterationSpace.from_product((12, 8), (8, 1), [(3, 32), (4, 8), (8, 1)])
    assert space.loops == (Loop(3, 0, 4), Loop(4, 0, 1), Loop(8, 1, 1))
    assert space.access([0, 0, 1], 0) == Access(0, 1, 0)
    assert space.access([4, 1, 0], 5) == Access(1, 0, 5)
    assert space.access([32, 8, 1], 0) == Access(8, 1, 0)
    assert space.access([0, 0, 0], 3) == Access(0, 0, 3)


def test_what_is_no_broadcast_is_none():
    space = IterationSpace.from_product((12, 8), (8, 1), [(3, 32), (4, 8), (8, 1)])
    assert space.access([1, 0, 0], 0) is None  # moves with the outer half of m alone
    assert space.access([8, 32, 1], 0) is None  # m permuted


@pytest.mark.parametrize(
    "loops",
    [
        [(12, 8)],  # a part of the product
        [(12, 8), (4, 2)],  # every other column
        [(12, 8), (8, 1), (2, 0)],  # the product itself broadcast
        [(11, 8), (8, 1)],
        [(6, 8), (8, 1), (2, 96)],
    ],
)
def test_another_space_is_none(loops):
    assert IterationSpace.from_product((12, 8), (8, 1), loops) is None


def test_flattened_loops_are_cut():
    assert cut((12, 8), (8, 1), 96, 1) == 8
    assert cut((12, 8), (1, 12), 96, 1) == 12  # a column-major product
    assert cut((12, 8), (8, 1), 8, 1) is None
    assert cut((12, 8), (16, 1), 96, 1) is None  # padded rows cannot be flattened
    assert cut((12, 8), (8, 1), 96, 0) is None


def test_square_products_tell_rows_from_columns():
    space = IterationSpace.from_product((8, 8), (8, 1), [(8, 8), (8, 1)])
    assert space.access([0, 1], 0).operand((8, 8), BF16) == Operand(OperandKind.ROW, BF16)
    assert space.access([1, 0], 0).operand((8, 8), BF16) == Operand(OperandKind.COLUMN, BF16)
    assert space.access([8, 1], 0).operand((8, 8), BF16) == Operand(OperandKind.TILE, BF16, Major.ROW)
    assert space.access([1, 8], 0).operand((8, 8), BF16) == Operand(OperandKind.TILE, BF16, Major.COLUMN)
    assert space.access([0, 0], 0).operand((8, 8), BF16) == Operand(OperandKind.SCALAR, BF16)


@pytest.mark.parametrize(
    ("access", "reason"),
    [
        (Access(0, 2, 0), Reason.LAYOUT),
        (Access(3, 0, 0), Reason.LAYOUT),
        (Access(0, 1, 4), Reason.ALIGNMENT),
        (Access(68, 1, 0), Reason.ALIGNMENT),
        (Access(64, 1, 4), Reason.ALIGNMENT),
        (Access(64, 2, 0), Reason.LAYOUT),
        (Access(32, 1, 0), Reason.LAYOUT),
    ],
)
def test_operands_that_kernels_cannot_read(access, reason):
    refusal = access.operand((64, 64), BF16)
    assert isinstance(refusal, Refusal) and refusal.reason is reason


def test_along_an_axis_of_size_one_nothing_moves():
    assert Access(512, 1, 0).over((1, 512)) == Access(0, 1, 0)
    assert Access(1, 1, 0).over((512, 1)) == Access(1, 0, 0)


@pytest.mark.parametrize(
    ("size", "strides", "offset", "expected"),
    [
        ((16, 64), (64, 1), 0, MatrixLayout(Major.ROW, 64)),
        ((16, 64), (1, 16), 0, MatrixLayout(Major.COLUMN, 16)),
        ((16, 64), (128, 1), 64, MatrixLayout(Major.ROW, 128)),
        ((1, 61), (61, 1), 0, MatrixLayout(Major.ROW, 64)),
        ((64, 1), (1, 1), 0, MatrixLayout(Major.COLUMN, 64)),
        ((16, 61), (61, 1), 0, Reason.ALIGNMENT),
        ((16, 64), (64, 1), 4, Reason.ALIGNMENT),
        ((16, 64), (64, 2), 0, Reason.LAYOUT),
        ((65535, 32768), (32768, 1), 0, MatrixLayout(Major.ROW, 32768)),
        ((65537, 32768), (32768, 1), 0, Reason.TOO_LARGE),
        ((1 << 17, 1 << 15), (1, 1 << 17), 0, Reason.TOO_LARGE),
        ((16, 64), (1 << 28, 1), 0, Reason.TOO_LARGE),
        ((16, 64), (0, 1), 0, Reason.LAYOUT),
    ],
)
def test_matrix_layouts(size, strides, offset, expected):
    layout = MatrixLayout.of(size, strides, offset, 2)
    assert layout == expected if isinstance(expected, MatrixLayout) else layout.reason is expected


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=3),
    st.lists(st.integers(2, 5), min_size=1, max_size=3),
    st.integers(0, 7),
    st.integers(0, 7),
    st.randoms(use_true_random=False),
)
def test_any_split_of_the_product_gives_every_element_its_place(m_parts, n_parts, a, b, random):
    """The loops in any order, and an access a * m + b * n + 3: found again, and right at every (m, n)."""
    m, n = math.prod(m_parts), math.prod(n_parts)
    loops, moves = [], []
    for parts, unit, coefficient in ((m_parts, n, a), (n_parts, 1, b)):
        step = 1
        for size in reversed(parts):
            loops.append((size, step * unit))
            moves.append(step * coefficient)
            step *= size
    order = list(range(len(loops)))
    random.shuffle(order)
    space = IterationSpace.from_product((m, n), (n, 1), [loops[i] for i in order])
    assert space.access([moves[i] for i in order], 3) == Access(a, b, 3)
