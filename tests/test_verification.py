"""A kernel's result against the reference: what is found, what is not mistaken for a fault, and what happens then."""

from __future__ import annotations

import json
import logging

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering import launcher as launchers
from nvgemm_fusion.lowering.compiler import KernelCompiler
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.store import KernelStore
from nvgemm_fusion.lowering.verification import compute, mismatch, verified

M, N, K = 300, 200, 64


def program_of(dtype=torch.bfloat16):
    """exp((acc + row) * column) + tile * scalar, and the product itself."""
    builder = ProgramBuilder()
    row, column, tile, scalar = (
        builder.operand(kind, Operand(kind, torch.bfloat16))
        for kind in (OperandKind.ROW, OperandKind.COLUMN, OperandKind.TILE, OperandKind.SCALAR)
    )
    value = builder.op("exp", builder.op("mul", builder.op("add", ACCUMULATOR, row), column))
    value = builder.op("add", value, builder.op("mul", tile, scalar))
    return builder.build([Store(value, dtype), Store(ACCUMULATOR, torch.float32, Major.COLUMN)])[0]


PROGRAM = program_of()


def tensors_of(m=M, n=N, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (m, K), (K, n), (n,), (m,), (m, n), (1,)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    inputs[0] *= K**-0.5
    return [*inputs, torch.empty(m, n, dtype=dtype), torch.empty(n, m, dtype=torch.float32).t()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(M, N), (1, 8), (2, 8), (8, 1), (33, 65), (1024, 16)], ids=str)
def test_a_right_result_is_right(dtype, size):
    tensors = tensors_of(*size, dtype)
    compute(program_of(dtype), tensors)
    assert mismatch(program_of(dtype), tensors) is None


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int8, torch.int32], ids=str
)
def test_operands_of_any_dtype_are_looked_at(dtype):
    builder = ProgramBuilder()
    tile = builder.operand("tile", Operand(OperandKind.TILE, dtype))
    value = builder.op("mul", ACCUMULATOR, builder.convert(tile, torch.float32))
    program, _ = builder.build([Store(value, torch.bfloat16)])
    tensors = [*tensors_of()[:2], torch.randint(0, 2, (M, N)).to(dtype), torch.empty(M, N, dtype=torch.bfloat16)]
    compute(program, tensors)
    assert mismatch(program, tensors) is None
    tensors[2] = tensors[2].flip(0)
    assert mismatch(program, tensors) is not None


@hypothesis.given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_rounding_is_not_a_fault(seed):
    tensors = tensors_of(64, 72, seed=seed)
    compute(PROGRAM, tensors)
    tensors[-2] *= 1 + (torch.rand(64, 72) - 0.5).bfloat16() * 2**-6  # one rounding step to either side
    assert mismatch(PROGRAM, tensors) is None


def swapped(tensors):
    """Row and column changed places, as far as both are long."""
    small = min(M, N)
    row, column = tensors[2].clone(), tensors[3].clone()
    tensors[2][:small], tensors[3][:small] = column[:small], row[:small]


FAULTS = {
    "row and column swapped": swapped,
    "the row of the next column": lambda tensors: tensors[2].copy_(tensors[2].roll(1)),
    "another tile operand": lambda tensors: tensors[4].copy_(tensors[4].flip(0)),
    "another scalar": lambda tensors: tensors[5].mul_(2),
    "a product without its last column of K": lambda tensors: tensors[1][-8:].zero_(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_input_is_found(fault):
    tensors = tensors_of()
    wrong = [tensor.clone() for tensor in tensors]
    FAULTS[fault](wrong)
    compute(PROGRAM, [*wrong[:-2], *tensors[-2:]])
    found = mismatch(PROGRAM, tensors)
    assert found is not None and "instead of" in found


@pytest.mark.parametrize(
    "place", [(slice(None), slice(-1, None)), (slice(-1, None), slice(None)), (slice(0, 128), slice(0, 64))], ids=str
)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_tile_or_an_edge_that_was_not_written_is_found(place, number, value):
    tensors = tensors_of()
    compute(PROGRAM, tensors)
    tensors[-2 + number][place] = value
    found = mismatch(PROGRAM, tensors)
    assert found is not None and found.startswith(f"store {number} differs")


def test_infinities_and_nan_that_belong_there_are_no_fault():
    tensors = tensors_of()
    tensors[4][::3] = float("inf")
    tensors[2][::5] = float("nan")
    tensors[3][::7] = 1000.0  # exp overflows
    compute(PROGRAM, tensors)
    assert mismatch(PROGRAM, tensors) is None


@pytest.mark.parametrize("every_call", [False, True])
def test_after_a_mismatch_torch_computes(every_call):
    told, launched = [], []

    def launch(*tensors):
        launched.append(1)
        compute(PROGRAM, tensors)
        if len(launched) >= (3 if every_call else 1):
            tensors[-2][:, 100:].zero_()

    run = verified(launch, PROGRAM, every_call, told.append)
    for _ in range(5):
        tensors = tensors_of()
        run(*tensors)
        assert mismatch(PROGRAM, tensors) is None
    assert len(told) == 1 and "(300, 64) bfloat16 strides (64, 1)" in told[0]
    assert len(launched) == (3 if every_call else 1)


def test_only_the_first_result_is_looked_at_unless_asked_for():
    results = iter([True, False])

    def launch(*tensors):
        compute(PROGRAM, tensors)
        if not next(results):
            tensors[-2].zero_()

    told = []
    run = verified(launch, PROGRAM, False, told.append)
    run(*tensors_of())
    run(*tensors_of())
    assert not told


def spec():
    return KernelSpec(Candidate("quack", 64, 64), torch.bfloat16, Major.ROW, Major.ROW, PROGRAM, "sm_90a", 132)


def test_a_kernel_that_is_wrong_is_never_compiled_or_used_again(tmp_path, monkeypatch, caplog):
    store = KernelStore(tmp_path)
    staged = store.temporary()
    staged.write_bytes(b"object")
    store.put(spec(), staged, {})
    compiler = KernelCompiler(store, workers=1)
    monkeypatch.setattr(launchers, "shared_compiler", lambda: compiler)
    monkeypatch.setattr(launchers, "bind", lambda compiled: lambda *tensors: [t.zero_() for t in tensors[-2:]])
    launchers.load_kernel.cache_clear()
    description = json.dumps(spec().to_json())
    for verify in ("first", "off"):  # the second time it is found on disk
        launch = launchers.load_kernel(description, verify)
        for _ in range(2):
            tensors = tensors_of()
            with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
                launch(*tensors)
            assert mismatch(PROGRAM, tensors) is None
    launchers.load_kernel.cache_clear()
    assert caplog.text.count("wrong result: quack 64x64") >= 1 and "torch computes" in caplog.text
    refusal = compiler.compile([spec()])[0]
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.WRONG_RESULT and "instead of" in refusal.detail
    assert not list(tmp_path.glob("kernels/*.so"))
    store.clear()
    assert store.find(spec()) is None


@pytest.mark.parametrize(
    ("value", "written"), [("off", ""), ("first", ", 'first'"), ("always", ", 'always'"), ("else", ", 'first'")]
)
def test_the_setting_reaches_the_generated_code(h200, instant_kernels, inductor_config, value, written):
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16()
    with inductor_config.patch(nvgemm_fusion_force=True, nvgemm_fusion_verify=value):
        torch.compile(lambda x, w: F.relu(F.linear(x, w)))(x, w)
    (line,) = [line for line in h200.code[-1].splitlines() if "load_kernel(" in line]
    assert line.endswith(f'}}"{written})'), line


