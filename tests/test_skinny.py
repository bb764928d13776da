"""Our own GEMM for products of at most 8 rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nvgemm_fusion.fusion.problem import Problem
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.lowering.candidates import candidates
from nvgemm_fusion.lowering.kernel import Candidate
from nvgemm_fusion.lowering.launcher import bind
from nvgemm_fusion.lowering.providers import OPERATORS, QUACK, SKINNY
from nvgemm_fusion.lowering.spaces import SKINNY_ROWS
from nvgemm_fusion.lowering.targets import TARGETS
from nvgemm_fusion.lowering.verification import mismatch
from test_compile import assert_machine_code, compiler, everything, identity, spec_of  # noqa: F401

KERNELS = [Candidate(SKINNY, 16, 8, swap_ab=True, split_k=4), Candidate(SKINNY, 32, 8, swap_ab=True, split_k=8)]
H200 = TARGETS["H200"]


def problem(m=1, n=4096, k=4096, dtype=torch.bfloat16, a_major=Major.ROW, b_major=Major.COLUMN, target=H200):
    return Problem(m, n, k, dtype, a_major, b_major, target.arch)


def two_stores(dtype):
    """relu(acc + tile) * row as `dtype`, and where it is positive; a column, a scalar and a number besides."""
    builder = ProgramBuilder()
    kinds = list(OperandKind)
    dtypes = dict.fromkeys(kinds, dtype) | {OperandKind.NUMBER: torch.float32, OperandKind.COLUMN: torch.float32}
    tile, row, column, scalar, number = (
        builder.operand(kind, Operand(kind, dtypes[kind], Major.ROW))
        for kind in (OperandKind.TILE, OperandKind.ROW, OperandKind.COLUMN, OperandKind.SCALAR, OperandKind.NUMBER)
    )
    value = builder.op("mul", builder.op("relu", builder.op("add", ACCUMULATOR, tile)), row)
    value = builder.op("add", builder.op("mul", value, scalar), builder.op("mul", column, number))
    positive = builder.op("gt", value, builder.constant(0.0))
    return builder.build([Store(value, dtype, Major.ROW), Store(positive, torch.bool, Major.COLUMN)])[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_every_op_and_operand_compiles(compiler, dtype, arch):  # noqa: F811
    programs = [identity(dtype), everything(dtype, Major.ROW), everything(dtype, Major.COLUMN), two_stores(dtype)]
    specs = [replace(spec_of(KERNELS[i % 2], dtype, program=p), arch=arch) for i, p in enumerate(programs)]
    for compiled in compiler.compile(specs):
        if arch == "sm_90a":
            assert_machine_code(compiled)
        else:
            assert arch.encode() in compiled.path.read_bytes()


@pytest.mark.parametrize("limit", [1, 2, 3, 5, None])
@pytest.mark.parametrize("m", [1, SKINNY_ROWS])
def test_few_rows_get_skinny_kernels_before_others(m, limit):
    for program in (identity(), two_stores(torch.bfloat16)):
        found = candidates(problem(m), H200, program, limit)
        providers = [candidate.provider for candidate in found]
        half = 3 if limit is None else -(-limit // 2)
        assert providers[:half] == [SKINNY] * half and SKINNY not in providers[half:]
        assert len(set(found)) == len(found) and (limit is None or len(found) == limit)
        assert set(providers[half:]) <= {QUACK, OPERATORS} and (limit in (1, 2, 3) or QUACK in providers)


@pytest.mark.parametrize(
    "change",
    [
        {"m": SKINNY_ROWS + 1},
        {"a_major": Major.COLUMN},
        {"b_major": Major.ROW},
        {"m": 512, "dtype": torch.float32},
        {"k": 4092},
    ],
    ids=["rows", "A", "B", "float32", "K"],
)
def test_others_get_none(change):
    found = candidates(problem(**change), H200, identity(change.get("dtype", torch.bfloat16)), None)
    assert found and all(candidate.provider != SKINNY for candidate in found)


def test_a_name_tells_kernels_apart():
    assert [str(kernel) for kernel in KERNELS] == [
        "skinny 16x8 cluster 1x1 swapped split 4",
        "skinny 32x8 cluster 1x1 swapped split 8",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_right_for_every_size(compiler, dtype):  # noqa: F811
    """Sizes around those of a block, a slab of K and the largest M, and of a model."""
    programs = [identity(dtype), identity(dtype, Major.COLUMN), two_stores(dtype)]
    found = candidates(problem(dtype=dtype), H200, programs[0], None)
    kernels = [candidate for candidate in found if candidate.provider == SKINNY]
    specs = [spec_of(kernel, dtype, program=program) for program in programs for kernel in kernels]
    sizes = [(m, n, k) for m in (1, 8) for n in (8, 40, 4104) for k in (8, 1592, 4096)]
    sizes += [(2, 40, 16), (7, 4104, 1600), (1, 28672, 8192), (5, 5120, 25600)]
    for compiled in compiler.compile(specs):
        launch, program = bind(compiled), compiled.spec.program
        for m, n, k in sizes:
            tensors = [torch.randn(m, k), torch.randn(n, k).mul_(k**-0.5)]
            tensors = [tensor.to("cuda", dtype) for tensor in tensors]
            tensors[1] = tensors[1].t()
            shapes = {OperandKind.TILE: (m, n), OperandKind.ROW: (n,), OperandKind.COLUMN: (m,)}
            shapes |= {OperandKind.SCALAR: (1,), OperandKind.NUMBER: ()}
            for operand in program.operands:
                where = "cpu" if operand.kind is OperandKind.NUMBER else "cuda"
                tensors.append(torch.randn(shapes[operand.kind]).to(where, operand.dtype))
            for store in program.stores:
                shape = (m, n) if store.major is Major.ROW else (n, m)
                filled = torch.full(shape, 1, device="cuda").to(store.dtype)
                tensors.append(filled if store.major is Major.ROW else filled.t())
            launch(*tensors)
            found = mismatch(program, tensors)
            assert found is None, f"{compiled.spec.candidate}, {(m, n, k)}: {found}"


@pytest.mark.gpu
def test_infinities_and_nans_stay_in_their_row_and_column(compiler):  # noqa: F811
    (compiled,) = compiler.compile([spec_of(KERNELS[0], program=identity())])
    a, b = (torch.randn(size, device="cuda").bfloat16() for size in ((3, 1000), (72, 1000)))
    a[1, 999], b[65, 3] = float("inf"), float("nan")
    result = torch.zeros(3, 72, device="cuda").bfloat16()
    bind(compiled)(a, b.t(), result)
    expected = torch.isfinite((a.double() @ b.double().t()))
    assert torch.equal(torch.isfinite(result), expected) and expected.sum() == 2 * 71
