"""Float32 products: candidates where torch allows TF32, and only there; kernels, results, and what is refused."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.fusion.decision import Status, Timing
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering import heuristics
from nvgemm_fusion.lowering.candidates import candidates
from nvgemm_fusion.lowering.compiler import CompiledKernel, KernelCompiler
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.occupancy import HOPPER
from nvgemm_fusion.lowering.providers import QUACK
from nvgemm_fusion.lowering.spaces import SPACES
from nvgemm_fusion.lowering.store import KernelStore
from nvgemm_fusion.lowering.targets import TARGETS
from nvgemm_fusion.lowering.verification import mismatch
from test_candidates import identity, problem_of, relu
from test_gpu import fused_by_force

F32, BF16 = torch.float32, torch.bfloat16
H200 = TARGETS["H200"]
SIZE = 64, 512, 512
"""(M, N, K), as small as TF32 is used."""


@pytest.fixture(autouse=True)
def precision():
    """`torch.set_float32_matmul_precision`; what was set before is set again after each test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def problem(m, n, k, **majors):
    return problem_of(m, n, k, F32, **majors)


def bias_relu(x, w, b, tile):
    return F.relu(F.linear(x, w, b))


def residual(x, w, b, tile):
    return F.linear(x, w) + tile


def silu_mul(x, w, b, tile):
    return F.silu(F.linear(x, w)) * tile


def half_beside(x, w, b, tile):
    y = F.linear(x, w, b)
    return y, F.gelu(y).bfloat16()


FUNCTIONS = [bias_relu, residual, silu_mul, half_beside]


def inputs_of(m, n, k, device="cpu"):
    w = torch.randn(n, k, device=device) / math.sqrt(k)
    return torch.randn(m, k, device=device), w, torch.randn(n, device=device), torch.randn(m, n, device=device)


# What is decided


def test_without_tf32_float32_is_refused_and_the_log_says_how_to_allow_it(h200, instant_kernels, decisions):
    torch.compile(bias_relu)(*inputs_of(*SIZE))
    (record,) = decisions()
    (refusal,) = record["refusals"]
    assert refusal["reason"] == "dtype" and "set_float32_matmul_precision('high')" in refusal["detail"]
    assert "nvgemm_" not in h200.code[-1]


@pytest.mark.parametrize("how", ["high", "medium", "allow_tf32"])
def test_what_allows_tf32(h200, instant_kernels, inductor_config, decisions, precision, how):
    if how == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        precision(how)
    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(bias_relu)(*inputs_of(*SIZE))
    (record,) = decisions()
    assert record["fused"] and record["problem"]["dtype"] == "float32" and "nvgemm_" in h200.code[-1]


def test_a_compiled_function_follows_the_setting(h200, instant_kernels, inductor_config, precision):
    compiled, inputs, counts = torch.compile(residual), inputs_of(*SIZE), []
    for setting in ("high", "highest", "high"):
        precision(setting)
        with inductor_config.patch(nvgemm_fusion_force=True):
            compiled(*inputs)
        counts.append("nvgemm_" in h200.code[-1] if len(h200.code) > len(counts) else None)
    assert counts == [True, False, None]  # the third time, what was compiled first


def test_inductors_caches_know_the_setting(precision):
    from torch._inductor.codecache import compiled_fx_graph_hash

    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    keys = []
    for setting in ("high", "highest"):
        precision(setting)
        keys.append(compiled_fx_graph_hash(graph, [], {}, [])[0])
    assert keys[0] != keys[1]


def test_a_kept_decision_is_not_used_without_tf32(
    tmp_path, h200, instant_kernels, inductor_config, decisions, monkeypatch, precision
):
    from nvgemm_fusion.scheduler_hooks import alternatives
    from nvgemm_fusion.scheduler_hooks import tuning as hooks

    def as_if_measured(contest, entrant):
        us = 10.0 if entrant.alternative.backend.value == "NVGEMM" and entrant.alternative.fused else 20.0
        return replace(
            entrant, alternative=replace(entrant.alternative, timing=Timing(us, 0.1), status=Status.MEASURED)
        )

    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hooks, "shared_compiler", alternatives.shared_compiler)
    monkeypatch.setattr(alternatives, "_with_modelled_time", as_if_measured)
    used = []
    for setting in ("high", "high", "highest"):
        precision(setting)
        torch._dynamo.reset()
        with inductor_config.patch(nvgemm_fusion_cache=True):
            torch.compile(silu_mul)(*inputs_of(*SIZE))
        used.append((decisions()[-1]["from_cache"], "nvgemm_" in h200.code[-1]))
    assert used == [(False, True), (True, True), (False, False)]


@pytest.mark.parametrize("size", [(15, 512, 512), (64, 504, 512), (64, 512, 504)], ids=str)
def test_what_torch_computes_in_float32_stays_so(h200, instant_kernels, decisions, precision, size):
    precision("high")
    torch.compile(residual)(*inputs_of(*size))
    (record,) = decisions()
    assert record["refusals"][0]["reason"] == "dtype" and "small" in record["refusals"][0]["detail"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_generated_code_gives_what_the_graph_gives(checked_graphs, decisions, precision, function):
    precision("high")
    torch.compile(function)(*inputs_of(*SIZE))
    assert len(checked_graphs) == 1 and checked_graphs[0] and decisions()[0]["fused"]


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda a, b: F.relu(a @ b), ((64, 512), (512, 512)), "layout"),
        (lambda a, b: F.relu(a.t() @ b.t()), ((512, 64), (512, 512)), "layout"),
        (lambda a, b: F.relu(a @ b.t()), ((64, 514), (512, 514)), "alignment"),
        (lambda a, b: F.relu(a[:, 2:] @ b.t()), ((64, 514), (512, 512)), "alignment"),
    ],
)
def test_layouts_that_tf32_does_not_read(h200, instant_kernels, decisions, precision, function, shapes, reason):
    precision("high")
    torch.compile(function)(*(torch.randn(*shape) for shape in shapes))
    (record,) = decisions()
    assert [refusal["reason"] for refusal in record["refusals"]] == [reason] and "nvgemm_" not in h200.code[-1]


# Candidates


@pytest.mark.parametrize("program", [identity(), relu()], ids=["plain", "relu"])
@pytest.mark.parametrize("size", [(16, 14336, 4096), (256, 4096, 4096), (4096, 4096, 14336)], ids=str)
def test_candidates_are_quacks_and_of_tiles_that_tf32_has(size, program):
    for limit in (5, None):
        found = candidates(problem(*size), H200, program, limit)
        assert len(found) == (limit or len(set(found)))
        assert all(c.provider == QUACK and SPACES["sm_90a"].has(c, F32) for c in found)


@pytest.mark.parametrize("a_major", Major)
@pytest.mark.parametrize("b_major", Major)
def test_both_operands_are_contiguous_along_k(a_major, b_major):
    found = candidates(problem(512, 512, 512, a_major=a_major, b_major=b_major), H200, relu(), 5)
    if (a_major, b_major) == (Major.ROW, Major.COLUMN):
        assert isinstance(found, list)
    else:
        assert isinstance(found, Refusal) and found.reason is Reason.LAYOUT and "column-major" in found.detail


def test_what_aborts_the_compiler_is_not_in_the_space():
    """All others were compiled, 348 of them, which takes minutes."""
    space = SPACES["sm_90a"]
    found = candidates(problem(4096, 4096, 4096), H200, relu(), None)
    assert len(found) == 348 and not [c for c in found if c.tile_n in (48, 80, 112, 208)]
    assert [space.has(Candidate(QUACK, 192, 128, pingpong=p), d) for p in (False, True) for d in (F32, BF16)] == [
        False, True, True, True
    ]


def test_other_architectures_have_none():
    found = candidates(replace(problem(512, 512, 512), target="sm_100a"), TARGETS["B200"], relu(), 5)
    assert isinstance(found, Refusal) and found.reason is Reason.DTYPE


def test_tf32_takes_twice_as_long_as_bfloat16():
    candidate = Candidate(QUACK, 128, 256, 2, 1)
    size = 8192, 8192, 8192
    ratio = HOPPER.us(problem(*size), candidate, relu()) / HOPPER.us(problem_of(*size), candidate, relu())
    assert 1.9 < ratio < 2.1


@pytest.mark.parametrize("swap_ab", [False, True])
def test_the_vendors_model_knows_tf32(swap_ab):
    half, tf32 = (heuristics.estimates(p(4096, 4096, 4096), H200, swap_ab)[0].us for p in (problem_of, problem))
    assert 1.2 * half < tf32 < 3 * half


# Kernels


def everything(dtype):
    """silu(acc + row) * tile + column, and the product itself."""
    builder = ProgramBuilder()
    row, tile, column = (
        builder.operand(kind, Operand(kind, F32)) for kind in (OperandKind.ROW, OperandKind.TILE, OperandKind.COLUMN)
    )
    value = builder.op("add", ACCUMULATOR, row)
    value = builder.op("mul", builder.op("mul", value, builder.op("sigmoid", value)), tile)
    return builder.build([Store(builder.op("add", value, column), dtype), Store(ACCUMULATOR, F32)])[0]


def spec_of(candidate, program, a_major=Major.ROW, b_major=Major.COLUMN):
    return KernelSpec(candidate, F32, a_major, b_major, program, "sm_90a", 132)


@pytest.fixture(scope="module")
def compiler():
    compiler = KernelCompiler(KernelStore(), workers=min(8, os.cpu_count() or 1))
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(QUACK, 64, 16, pingpong=True, swap_ab=True),
        Candidate(QUACK, 128, 160, pingpong=True),
        Candidate(QUACK, 128, 224, 2, 1),
        Candidate(QUACK, 192, 224, 1, 2),
        Candidate(QUACK, 320, 96, swap_ab=True),
    ],
    ids=str,
)
def test_kernels_compile(compiler, candidate):
    assert SPACES["sm_90a"].has(candidate, F32)
    for compiled in compiler.compile([spec_of(candidate, everything(dtype)) for dtype in (F32, BF16)]):
        assert isinstance(compiled, CompiledKernel), str(compiled)
        assert b"sm_90a" in compiled.path.read_bytes()


def test_a_kernel_that_would_wait_for_itself_is_refused(compiler):
    """One that has a single stage for A and B beside what the epilogue needs: see `shared_memory`."""
    candidate = Candidate(QUACK, 128, 256, 2, 1)
    refusal, small = compiler.compile([spec_of(candidate, everything(F32)), spec_of(candidate, relu())])
    assert isinstance(refusal, Refusal) and "no room for two stages of A and B" in refusal.detail
    assert isinstance(small, CompiledKernel)


@pytest.mark.parametrize("majors", [(Major.COLUMN, Major.COLUMN), (Major.ROW, Major.ROW)], ids=str)
def test_the_compiler_has_no_kernel_for_other_majors(compiler, majors):
    refusal = compiler.compile([spec_of(Candidate(QUACK, 128, 128), relu(), *majors)])[0]
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.COMPILE_ERROR


def test_a_worker_compiles_one_epilogue_for_several_dtypes(compiler):
    """The library keeps one class for an epilogue, whatever the dtype of A and B."""
    specs = [replace(spec_of(Candidate(QUACK, 64, 96), everything(F32)), dtype=dtype) for dtype in (BF16, F32) * 2]
    assert all(isinstance(compiled, CompiledKernel) for compiled in compiler.compile(specs))


# Verification


def rounded(tensor):
    """To 11 bits of mantissa, the first of which TF32 does not store."""
    mantissa, exponent = torch.frexp(tensor.double())
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11).float()


def result_of(a, b, bias, name):
    """What a kernel stores that computes op(acc + bias), and the program and tensors to verify it with."""
    builder = ProgramBuilder()
    row = builder.operand("row", Operand(OperandKind.ROW, F32))
    program, _ = builder.build([Store(builder.op(name, builder.op("add", ACCUMULATOR, row)), F32)])
    function = {"exp": torch.exp, "relu": torch.relu}[name]
    return program, [a, b, bias, function(rounded(a) @ rounded(b) + bias)]


@pytest.mark.parametrize("name", ["relu", "exp"])
@pytest.mark.parametrize("scale", [1.0, 28672**-0.5, 1e-30], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_right_kernel_passes(name, scale, seed):
    """Also where the product is large and an exponential makes much of the little that rounding A and B has changed."""
    generator = torch.Generator().manual_seed(seed)
    a, b, bias = (torch.randn(*shape, generator=generator) for shape in ((70, 28672), (28672, 90), (90,)))
    program, tensors = result_of(a * scale, b, bias, name)
    assert mismatch(program, tensors) is None


@pytest.mark.parametrize("scale", [1.0, 28672**-0.5], ids=str)
@pytest.mark.parametrize("name", ["relu", "exp"])
def test_a_wrong_kernel_is_found(name, scale):
    a, b, bias = torch.randn(70, 28672) * scale, torch.randn(28672, 90), torch.randn(90)
    shifted, short = bias.roll(1) if scale != 1.0 else bias + 30.0, a.clone()
    short[:, -32:] = 0  # the last step along K is left out
    for wrong in ((a, b, shifted), (short, b, bias)):
        program, tensors = result_of(*wrong, name)
        assert mismatch(program, [a, b, bias, tensors[-1]]) is not None


def test_special_values_pass():
    a, b, bias = torch.randn(70, 64), torch.randn(64, 90), torch.randn(90)
    a[3, 5], a[7, 9], b[11, 2] = math.inf, math.nan, -math.inf
    a[9, 1] = torch.finfo(F32).max  # rounds to an infinity
    program, tensors = result_of(a, b, bias, "relu")
    assert mismatch(program, tensors) is None


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(512, 1024, 512), (1000, 1000, 1000), (4096, 2048, 4096)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_fused_is_as_exact_as_unfused(function, size, inductor_config, decisions, precision):
    """Of sizes for which torch's own kernels use TF32, too; some smaller ones they compute in float32."""
    precision("high")
    fused_by_force(function, inputs_of(*size, device="cuda"), inductor_config, decisions)


@pytest.mark.gpu
def test_without_tf32_nothing_of_ours_runs(inductor_config, decisions):
    inputs = inputs_of(512, 1024, 512, device="cuda")
    with inductor_config.patch(nvgemm_fusion_force=True), torch.no_grad():
        result = torch.compile(bias_relu)(*inputs)
    assert [r["reason"] for record in decisions() for r in record["refusals"]] == ["dtype"]
    exact = bias_relu(*(tensor.double() for tensor in inputs))
    assert ((result.double() - exact).norm() / exact.norm()).item() < 1e-6


@pytest.mark.gpu
def test_every_tile_and_schedule_is_right(compiler):
    from nvgemm_fusion.lowering.launcher import bind

    program = everything(F32)
    found = candidates(problem(4096, 4096, 4096), H200, program, None)
    kinds = {(c.tile_m, c.tile_n, c.pingpong, c.swap_ab): c for c in found}  # each with one of its clusters
    kernels = compiler.compile([spec_of(candidate, program) for candidate in kinds.values()])
    wrong = [str(refusal) for refusal in kernels if isinstance(refusal, Refusal)]
    for m, n, k in ((512, 1024, 512), (1000, 1000, 1000), (17, 264, 72)):
        a, w, row, tile = inputs_of(m, n, k, device="cuda")
        column = torch.randn(m, device="cuda")
        for compiled in kernels:
            if isinstance(compiled, CompiledKernel):
                tensors = [a, w.t(), row, tile, column, *(torch.empty(m, n, device="cuda") for _ in program.stores)]
                bind(compiled)(*tensors)
                found = mismatch(program, tensors)
                wrong += [] if found is None else [f"{compiled.spec.candidate} at {m, n, k}: {found}"]
    assert not wrong
