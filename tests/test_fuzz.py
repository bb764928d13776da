"""Random programs and random graphs: whatever they are, what is emitted is what they mean."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from cpu_run import run_on_cpu
from hypothesis import strategies as st
from nvgemm_fusion.bench.random_graphs import BINARY, LEAVES, UNARY, operands, written
from nvgemm_fusion.fusion.ops import FLOAT, INTEGER, OPS, kind_of
from nvgemm_fusion.fusion.program import (
    ACCUMULATOR,
    EpilogueProgram,
    Major,
    Operand,
    OperandKind,
    ProgramBuilder,
    Store,
    compute_dtype,
)
from nvgemm_fusion.fusion.reference import evaluate
from nvgemm_fusion.lowering.compiler import CompiledKernel, KernelCompiler
from nvgemm_fusion.lowering.dry_run import dry_run
from nvgemm_fusion.lowering.emit import CARRIERS
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.providers import QUACK
from nvgemm_fusion.lowering.store import KernelStore

SPECIALS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.5, 0.5, 3.0, 1e30, -1e-30]
M, N = 4, 12
COMPUTED = [torch.float32, torch.float32, torch.float32, torch.int32, torch.int8, torch.uint8, torch.bool]


def settings(examples):
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],  # what fails is short, and shrinking it would take minutes
        suppress_health_check=list(hypothesis.HealthCheck),
    )


class Writer:
    """Writes a random program. Values that are alike but for the sign of a NaN or of a zero are made the same where
    that sign would tell (the reference and the emission may differ in it), and a result that they round differently is
    rounded away."""

    def __init__(self, draw):
        self.draw, self.builder = draw, ProgramBuilder()
        self.values = [ACCUMULATOR]
        for number in range(draw(st.integers(0, 4))):
            kind = draw(st.sampled_from(list(OperandKind)))
            dtype = torch.float32 if kind is OperandKind.NUMBER else draw(st.sampled_from(list(CARRIERS)))
            major = draw(st.sampled_from(list(Major))) if kind is OperandKind.TILE else Major.ROW
            self.values.append(self.builder.operand(number, Operand(kind, dtype, major)))

    def program(self, steps):
        for _ in range(steps):
            self.values.append(self.step())
        dtype = self.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, *CARRIERS]))
        value = self.values[-1]
        if kind_of(dtype) == INTEGER and self.builder.dtype_of(value) == torch.float32:
            value = self.without_nan(value)
        return self.builder.build([Store(self.builder.convert(value, compute_dtype(dtype)), dtype)])

    def step(self):
        choice = self.draw(st.sampled_from(["op"] * 6 + ["constant", "round"]))
        if choice == "constant":
            number = self.draw(st.sampled_from([0.0, -0.0, 1.0, 0.1, -3.5, math.inf, math.nan, 1e-40]))
            return self.builder.constant(number)
        if choice == "round":
            narrow = self.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]))
            return self.builder.round_to(self.value(torch.float32), narrow)
        dtype = self.draw(st.sampled_from(COMPUTED))
        name = self.draw(st.sampled_from(sorted(name for name, op in OPS.items() if kind_of(dtype) in op.takes)))
        inputs = [self.value(dtype) for _ in range(OPS[name].arity)]
        if name == "where":
            inputs[0] = self.value(torch.bool)
        if name in ("copysign", "signbit") and kind_of(dtype) == FLOAT:
            inputs[-1] = self.without_nan(inputs[-1])
        result = self.builder.op(name, *inputs)
        if name in ("maximum", "minimum", "relu") and kind_of(dtype) == FLOAT:
            return self.builder.op("add", result, self.builder.constant(0.0))
        return self.builder.round_to(result, torch.bfloat16) if name == "sigmoid" else result

    def value(self, dtype):
        value = self.draw(st.sampled_from(self.values[-6:]))
        if kind_of(dtype) == INTEGER and self.builder.dtype_of(value) == torch.float32:
            value = self.without_nan(value)
        return self.builder.convert(value, dtype)

    def without_nan(self, value):
        return self.builder.op("where", self.builder.op("isnan", value), self.builder.constant(1.0), value)


@st.composite
def programs(draw, steps=st.integers(1, 12)):
    return Writer(draw).program(draw(steps))[0]


def tensors_of(program, seed):
    """Random values for the accumulator and the operands, a third of them special."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {OperandKind.TILE: (M, N), OperandKind.ROW: (N,), OperandKind.COLUMN: (M,)}

    def floats(shape):
        values = 3 * torch.randn(shape, dtype=torch.float64, generator=generator)
        special = torch.tensor(SPECIALS, dtype=torch.float64)[torch.randint(len(SPECIALS), shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator) < 0.3, special, values)

    def tensor(operand):
        shape = shapes.get(operand.kind, (1,))
        if operand.dtype.is_floating_point:
            return floats(shape).to(operand.dtype)
        small = torch.randint(-9, 10, shape, generator=generator)
        large = torch.randint(-(2**31), 2**31, shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.3, large, small).to(operand.dtype)

    return floats((M, N)), [tensor(operand) for operand in program.operands]


def assert_emitted_right(program, seed):
    accumulator, operands = tensors_of(program, seed)
    (exact,), (emitted,) = evaluate(program, accumulator, operands), dry_run(program, accumulator, operands)
    torch.testing.assert_close(emitted, exact, rtol=1e-12, atol=0, equal_nan=True)


@settings(450)
@hypothesis.given(program=programs(), seed=st.integers(0, 1000))
def test_random_programs_are_emitted_right(program, seed):
    assert EpilogueProgram.from_json(program.to_json()).digest == program.digest
    assert_emitted_right(program, seed)


@settings(8)
@hypothesis.given(program=programs(steps=st.just(200)), seed=st.integers(0, 1000))
def test_random_programs_of_200_operations_are_emitted_right(program, seed):
    assert_emitted_right(program, seed)


def test_random_programs_compile():
    """Whatever is put together, the compilers take it."""
    found = []

    @settings(12)
    @hypothesis.given(program=programs(steps=st.integers(6, 20)))
    def collect(program):
        found.append(program)

    collect()
    candidate = Candidate(QUACK, 64, 16, pingpong=True, swap_ab=True)
    specs = [KernelSpec(candidate, torch.bfloat16, Major.ROW, Major.COLUMN, p, "sm_90a", 132) for p in found]
    compiler = KernelCompiler(KernelStore(), workers=2)
    try:
        for spec, compiled in zip(specs, compiler.compile(specs)):
            assert isinstance(compiled, CompiledKernel), f"{compiled}\n{spec.program.readable()}"
    finally:
        compiler.close()


trees = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(UNARY), inner).map(lambda parts: parts[0].format(parts[1])),
        st.tuples(st.sampled_from(BINARY), inner, inner).map(lambda parts: parts[0].format(*parts[1:])),
    ),
    max_leaves=8,
)
SIZES = [128, 48, 64]
"""N of each product of a graph, by which its kernel is found."""


@pytest.fixture
def forced(h200, inductor_config, instant_kernels):
    with inductor_config.patch(nvgemm_fusion_force=True, nvgemm_fusion_candidates=1):
        yield


@pytest.mark.usefixtures("forced")
@settings(60)
@hypothesis.given(
    trees=st.lists(trees, min_size=3, max_size=3),
    m=st.sampled_from([24, 64, 16]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    wide=st.sampled_from([torch.float32, None, torch.float8_e4m3fn]),
    seed=st.integers(0, 1000),
)
def test_random_graphs_are_captured_right(kernel_calls, trees, m, dtype, wide, seed):
    """Three random expressions over the product of a GEMM each, with operands of several dtypes and layouts."""
    torch.manual_seed(seed)
    column_dtype = torch.float32 if wide == torch.float32 else dtype
    inputs = [torch.randn(m, 32).to(dtype)]
    for n in SIZES:
        inputs += operands(m, n, 32, dtype, column_dtype, [torch.int8, torch.int32][seed % 2])
    function = written(trees)
    kernel_calls.clear()
    torch._dynamo.reset()
    torch.compile(function, dynamic=False)(*inputs)
    exact = function(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    calls = {call.gemm.size[1]: call for call in kernel_calls}
    assert sorted(calls) == sorted(SIZES)
    for n, expected in zip(SIZES, exact):
        if any(view.buffer not in kernel_calls.buffers for view in calls[n].arguments()[:-1]):
            continue  # Inductor computes an operand in a kernel of its own, which cannot be run here
        for result in run_on_cpu(calls[n], kernel_calls.buffers):
            torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8, equal_nan=True)


def test_the_graphs_of_the_fuzz_run_are_ones_that_torch_runs():
    """What `bench.fuzz` does on a GPU, on the CPU as far as it goes: the graphs, and the comparison."""
    import random

    from nvgemm_fusion.bench.fuzz import compared
    from nvgemm_fusion.bench.random_graphs import tree

    source = random.Random(0)
    texts = [tree(source, 1 + number % 10) for number in range(40)]
    assert len(set(texts)) > 35
    inputs = [torch.randn(16, 32).bfloat16()]
    for _ in texts:
        inputs += operands(16, 24, 32, torch.bfloat16, torch.float32, torch.int8)
    exact = written(texts)(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    for result, right in zip(written(texts)(*inputs), exact, strict=True):
        assert result.shape == (16, 24)
        assert not compared(result, result, right)["wrong"]
    worse = right + 0.01 * torch.randn_like(right)
    assert compared(worse, right + 0.001 * torch.randn_like(right), right)["wrong"]
    assert compared(torch.full_like(right, float("nan")), right, right)["wrong"]
