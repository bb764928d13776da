"""Loop bodies of real graphs -> programs that compute what eager float64 does."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from cpu_run import run_on_cpu
from hypothesis import strategies as st
from nvgemm_fusion.fusion.program import Major, OperandKind

BF16, F16 = torch.bfloat16, torch.float16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


@pytest.fixture
def forced(h200, inductor_config, instant_kernels):
    with inductor_config.patch(nvgemm_fusion_force=True, nvgemm_fusion_candidates=1):
        yield


def fused(function, inputs, calls):
    """The one fused call of `function`, after a check that it computes what the function does in float64."""
    calls.clear()
    torch._dynamo.reset()
    torch.compile(function, dynamic=False)(*inputs)
    (call,) = calls
    exact = function(*(tensor.double() for tensor in inputs)).reshape(call.gemm.size)
    for result in run_on_cpu(call, calls.buffers):
        torch.testing.assert_close(result, exact, rtol=1e-9, atol=1e-9)
    return call


def kinds(call):
    return [operand.kind.value for operand in call.spec.program.operands]


def test_bias_as_row(forced, kernel_calls):
    call = fused(lambda x, w, b: F.relu(F.linear(x, w, b)), (randn(64, 32), randn(128, 32), randn(128)), kernel_calls)
    assert kinds(call) == ["row"]


@pytest.mark.parametrize("m_equals_n", [False, True])
def test_row_and_column_are_told_apart(forced, kernel_calls, m_equals_n):
    m, n = (64, 64) if m_equals_n else (64, 128)
    inputs = randn(m, 32), randn(n, 32), randn(m, 1), randn(n)
    call = fused(lambda x, w, c, r: F.linear(x, w) * c - r, inputs, kernel_calls)
    assert kinds(call) == ["column", "row"]


def test_expanded_bias_is_a_row(forced, kernel_calls):
    def function(x, w, b):
        return torch.tanh(F.linear(x, w) + b.expand(64, 128))

    assert kinds(fused(function, (randn(64, 32), randn(128, 32), randn(128)), kernel_calls)) == ["row"]


def test_scalar_tensor_and_vector_together(forced, kernel_calls):
    def function(x, w, a, b):
        return a * F.linear(x, w) + b * 0.25

    inputs = randn(64, 32), randn(128, 32), randn(1), randn(128)
    assert kinds(fused(function, inputs, kernel_calls)) == ["scalar", "row"]


def test_three_dimensional_views(forced, kernel_calls):
    def function(x, w, b, r):
        return F.gelu(F.linear(x, w, b), approximate="tanh") * r

    call = fused(function, (randn(4, 16, 32), randn(128, 32), randn(128), randn(4, 16, 128)), kernel_calls)
    assert call.gemm.size == (64, 128) and kinds(call) == ["row", "tile"]


def test_column_major_tile(forced, kernel_calls):
    call = fused(
        lambda x, w, r: F.relu(F.linear(x, w)) + r.t(), (randn(64, 32), randn(128, 32), randn(128, 64)), kernel_calls
    )
    assert call.spec.program.operands[0].major is Major.COLUMN


def test_slices_with_an_offset(forced, kernel_calls):
    def function(x, w, r, b):
        return F.relu(F.linear(x, w)) + r[8:72, 64:192] * b[16:144]

    call = fused(function, (randn(64, 32), randn(128, 32), randn(96, 256), randn(256)), kernel_calls)
    assert [where.access.offset for where in call.captured.operands] == [8 * 256 + 64, 16]


def test_the_same_tensor_read_twice_is_one_operand(forced, kernel_calls):
    call = fused(
        lambda x, w, r: F.linear(x, w) * r + torch.sigmoid(r),
        (randn(64, 32), randn(128, 32), randn(64, 128)),
        kernel_calls,
    )
    assert kinds(call) == ["tile"]


def test_residual_is_the_input_of_the_gemm(forced, kernel_calls):
    call = fused(lambda x, w: torch.relu(x + F.linear(x, w)), (randn(64, 128), randn(128, 128)), kernel_calls)
    assert kinds(call) == ["tile"] and call.captured.operands[0].buffer == call.gemm.a.buffer


@pytest.mark.parametrize("bias", ["row", "column", "full"])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2.0, 0.5), (-1, 3)])
def test_addmm(forced, kernel_calls, bias, alpha, beta):
    shape = {"row": (128,), "column": (64, 1), "full": (64, 128)}[bias]
    kind = {"row": "row", "column": "column", "full": "tile"}[bias]

    def function(c, a, b):
        return torch.exp(torch.addmm(c, a, b, alpha=alpha, beta=beta) / 8)

    call = fused(function, (randn(*shape), randn(64, 32), randn(32, 128)), kernel_calls)
    assert kinds(call) == [kind]


def test_addmm_with_one_number_as_bias(forced, kernel_calls):
    """Inductor expands it to the full matrix before the GEMM, so it arrives as a tile of a buffer of its own."""

    def function(c, a, b):
        return torch.exp(torch.addmm(c, a, b) / 8)

    torch.compile(function)(randn(1, 1), randn(64, 32), randn(32, 128))
    (call,) = kernel_calls
    assert kinds(call) == ["tile"]


@pytest.mark.parametrize("a_major", list(Major))
@pytest.mark.parametrize("b_major", list(Major))
def test_layouts_of_a_and_b(forced, kernel_calls, a_major, b_major):
    a = randn(64, 32) if a_major is Major.ROW else randn(32, 64)
    b = randn(32, 128) if b_major is Major.ROW else randn(128, 32)

    def function(a, b):
        return torch.relu((a if a_major is Major.ROW else a.t()) @ (b if b_major is Major.ROW else b.t()))

    call = fused(function, (a, b), kernel_calls)
    assert (call.gemm.problem.a_major, call.gemm.problem.b_major) == (a_major, b_major)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_float32_output(forced, kernel_calls, dtype):
    def function(x, w, r):
        return F.linear(x, w).to(r.dtype) * r

    inputs = randn(64, 32, dtype=dtype), randn(128, 32, dtype=dtype), torch.randn(64, 128)
    call = fused(function, inputs, kernel_calls)
    assert call.spec.program.stores[0].dtype == torch.float32
    assert call.spec.program.operands[0].dtype == torch.float32


def test_a_chain_of_several_nodes_is_one_program(forced, kernel_calls, decisions):
    """After some thirty operations Inductor ends a loop and begins another."""

    def function(x, w, b):
        value = F.linear(x, w)
        for step in range(40):
            value = torch.sigmoid(value) * 1.5 - b if step % 8 == 0 else value * 1.01 + 0.125
        return value

    fused(function, (randn(64, 32), randn(128, 32), randn(128)), kernel_calls)
    (record,) = decisions()
    assert len(record["alternatives"][record["chosen"]]["fused"]) > 1


@pytest.mark.parametrize("emulate", [False, True])
def test_roundings_are_kept_when_asked_for(forced, kernel_calls, inductor_config, emulate):
    def function(x, w, b):
        return (torch.exp(F.linear(x, w)) * b).sigmoid()

    with inductor_config.patch(emulate_precision_casts=emulate):
        torch.compile(function)(randn(64, 32), randn(128, 32), randn(128))
    (call,) = kernel_calls
    roundings = [i for i in call.spec.program.instructions if i.op == "to_dtype"]
    assert len(roundings) >= 3 if emulate else not roundings
    first = call.spec.program.instructions[0]  # the product, which a kernel of its own would have rounded
    assert emulate == (first.op == "to_dtype" and first.inputs == (0,))


def test_one_row_and_one_column(forced, kernel_calls):
    for m, n in ((1, 128), (64, 8)):
        fused(lambda x, w, r: F.silu(F.linear(x, w)) * r, (randn(m, 32), randn(n, 32), randn(m, n)), kernel_calls)


UNARY = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "abs": torch.abs,
    "neg": torch.neg,
    "exp": lambda v: torch.exp(v.clamp(-4, 4)),
    "sqrt": lambda v: torch.sqrt(v.abs() + 0.5),
    "rsqrt": lambda v: torch.rsqrt(v.abs() + 0.5),
    "clamp": lambda v: v.clamp(-0.5, 1.5),
    "threshold": lambda v: torch.where(v > 0.25, v, v * 0.01),
    "affine": lambda v: v * 0.7 - 0.3,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda v, o: v / (o.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda v, o: torch.where(o <= 0, v, o),
}
SHAPES = {
    "tile": lambda m, n: (m, n),
    "transposed": lambda m, n: (n, m),
    "row": lambda m, n: (n,),
    "column": lambda m, n: (m, 1),
    "scalar": lambda m, n: (1,),
    "offset": lambda m, n: (m + 4, n + 16),
}
step = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.none()),
    st.tuples(st.sampled_from(sorted(BINARY)), st.sampled_from(sorted(SHAPES))),
)


@pytest.mark.usefixtures("forced")
@hypothesis.settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@hypothesis.given(
    steps=st.lists(step, min_size=1, max_size=6),
    size=st.sampled_from([(64, 128), (64, 64), (24, 48), (1, 64), (72, 8)]),
    leading=st.sampled_from([None, 2, 4]),
    dtype=st.sampled_from([BF16, F16]),
)
def test_random_epilogues(kernel_calls, steps, size, leading, dtype):
    """Any chain of these operations over any mix of operands is captured as what eager computes."""
    m, n = size
    operands = [randn(*SHAPES[shape](m, n), dtype=dtype) for _, shape in steps if shape is not None]
    batched = leading is not None and m % leading == 0

    def function(x, w, *operands):
        value, rest = F.linear(x, w), list(operands)
        for name, shape in steps:
            if shape is None:
                value = UNARY[name](value)
            else:
                operand = rest.pop(0)
                operand = {"transposed": operand.t(), "offset": operand[4:, 16:] if shape == "offset" else None}.get(
                    shape, operand
                )
                value = BINARY[name](value, operand)
        return value.view(leading, m // leading, n) * 2 if batched else value * 2

    call = fused(function, (randn(m, 32, dtype=dtype), randn(n, 32, dtype=dtype) / 6, *operands), kernel_calls)
    assert call.gemm.size == (m, n)
    assert all(math.isfinite(i.constant) for i in call.spec.program.instructions if isinstance(i.constant, float))
    assert {operand.kind for operand in call.spec.program.operands} <= set(OperandKind)
