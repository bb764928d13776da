"""Targets beyond Hopper, for the virtual device: their candidates, and machine code for each architecture."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.fusion.program import Major
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering.candidates import candidates
from nvgemm_fusion.lowering.compiler import CompiledKernel, KernelCompiler
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.occupancy import HOPPER, model_of
from nvgemm_fusion.lowering.providers import QUACK, _lane_by_lane
from nvgemm_fusion.lowering.spaces import SPACES
from nvgemm_fusion.lowering.store import KernelStore
from nvgemm_fusion.lowering.targets import TARGETS, Target, current_target
from test_candidates import identity, problem_of, relu
from test_compile import everything

WITH_KERNELS = [target for target in TARGETS.values() if target.arch in SPACES]
BLACKWELL = [TARGETS["B200"], TARGETS["RTX 5090"]]
SIZES = [(1, 14336, 4096), (16, 4096, 4096), (256, 14336, 4096), (4096, 4096, 14336), (3, 8, 64)]


@pytest.fixture(scope="module")
def compiler():
    compiler = KernelCompiler(KernelStore(), workers=2)
    yield compiler
    compiler.close()


def assert_machine_code(compiled, arch):
    assert isinstance(compiled, CompiledKernel), str(compiled)
    content = compiled.path.read_bytes()
    assert content.count(b"\x7fELF") == 2 and arch.encode() in content  # a cubin inside a host object


def test_the_targets_are_there():
    assert set(TARGETS) == {"H100", "H200", "B200", "RTX 5090", "A100"}
    assert {target.name for target in TARGETS.values() if target.measured} == {"H100", "H200"}


@pytest.mark.parametrize("target", WITH_KERNELS, ids=lambda target: target.name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_short_list_of_legal_candidates(target, size):
    problem = problem_of(*size, target=target.arch)
    found = candidates(problem, target, relu(), 5)
    assert 0 < len(found) <= 5 and len(found) == len(set(found))
    tiled = [candidate for candidate in found if candidate.provider == QUACK]
    assert tiled and all(SPACES[target.arch].is_legal(candidate) for candidate in tiled)
    assert set(found) <= set(candidates(problem, target, relu(), None))


@pytest.mark.parametrize("target", WITH_KERNELS, ids=lambda target: target.name)
def test_small_products_get_small_tiles_and_large_ones_large_tiles(target):
    small, large = (
        candidates(problem_of(m, 4096, 4096, target=target.arch), target, relu(), 1)[0] for m in (1, 8192)
    )
    assert min(small.tile_m, small.tile_n) <= 32 < 128 <= max(large.tile_m, large.tile_n)


@pytest.mark.parametrize("target", BLACKWELL, ids=lambda target: target.name)
def test_without_kernels_of_the_vendor_a_plain_product_gets_the_librarys(target):
    found = candidates(problem_of(512, 512, 512, target=target.arch), target, identity(), 6)
    assert len(found) == 6 and {candidate.provider for candidate in found} == {QUACK}


def test_an_a100_is_refused_because_the_library_has_no_gemm_for_it():
    refusal = candidates(problem_of(512, 512, 512, target="sm_80"), TARGETS["A100"], relu(), 5)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.TARGET and "QuACK" in refusal.detail


def test_the_library_still_has_no_gemm_for_sm80():
    """When this fails, SM80 can have a space."""
    from quack.gemm_sm80 import GemmSm80

    with pytest.raises(NotImplementedError):
        GemmSm80.__call__.__wrapped__(None, *[None] * 8)


def test_hoppers_model_is_the_fitted_one_and_another_gpu_is_as_fast_as_its_datasheet():
    assert model_of(TARGETS["H100"]) is model_of(TARGETS["H200"]) is HOPPER
    times = {
        target.name: min(
            model_of(target).us(problem, candidate, relu())
            for problem in [problem_of(4096, 4096, 4096, target=target.arch)]
            for candidate in candidates(problem, target, relu(), 5)
        )
        for target in (TARGETS["H200"], *BLACKWELL)
    }
    assert times["B200"] < times["H200"] < times["RTX 5090"]


@pytest.mark.parametrize(
    ("name", "capability", "known"),
    [
        ("NVIDIA H200", (9, 0), "H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100"),
        ("NVIDIA GH200 480GB", (9, 0), "H200"),
        ("NVIDIA B200", (10, 0), None),
        ("NVIDIA GeForce RTX 5090", (12, 0), None),
        ("NVIDIA A100-SXM4-80GB", (8, 0), None),
    ],
)
def test_a_real_gpu_is_a_target_only_where_kernels_were_run(monkeypatch, name, capability, known):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    found = current_target()
    if known is None:
        assert isinstance(found, Refusal) and found.reason is Reason.TARGET and name in found.detail
    else:
        assert isinstance(found, Target) and found.name == known


@pytest.mark.parametrize(
    ("arch", "candidate", "dtype", "major"),
    [
        ("sm_100a", Candidate(QUACK, 128, 32), torch.bfloat16, Major.ROW),
        ("sm_100a", Candidate(QUACK, 128, 64, 2, 1), torch.float16, Major.COLUMN),
        ("sm_100a", Candidate(QUACK, 64, 16, 2, 2, swap_ab=True), torch.bfloat16, Major.ROW),
        ("sm_120a", Candidate(QUACK, 64, 64), torch.bfloat16, Major.COLUMN),
        ("sm_120a", Candidate(QUACK, 64, 32), torch.bfloat16, Major.ROW),
        ("sm_120a", Candidate(QUACK, 128, 32, pingpong=True, swap_ab=True), torch.float16, Major.ROW),
    ],
    ids=str,
)
def test_every_op_and_operand_compiles(compiler, arch, candidate, dtype, major):
    assert SPACES[arch].is_legal(candidate)
    spec = KernelSpec(candidate, dtype, Major.ROW, Major.COLUMN, everything(dtype, major, candidate), arch, 148)
    assert_machine_code(compiler.compile([spec])[0], arch)


def test_one_process_compiles_for_several_architectures(tmp_path):
    compiler = KernelCompiler(KernelStore(tmp_path), workers=1)
    try:
        for arch in ("sm_90a", "sm_120a", "sm_100a", "sm_90a"):
            candidate = Candidate(QUACK, 128, 64) if arch == "sm_90a" else Candidate(QUACK, 128, 32)
            spec = KernelSpec(candidate, torch.bfloat16, Major.ROW, Major.COLUMN, relu(), arch, 132)
            assert_machine_code(compiler.compile([spec])[0], arch)
    finally:
        compiler.close()


def test_two_lanes_are_two_elements():
    lanes = _lane_by_lane(lambda acc, operand_0, operand_1: {"D": acc * operand_0 + operand_1})
    assert lanes((2, 3), operand_0=(10, 100), operand_1=5) == {"D": (25, 305)}
    assert lanes(2, operand_0=10, operand_1=5) == {"D": 25}


@pytest.mark.parametrize("name", TARGETS)
def test_the_virtual_device_decides_for_each(name, inductor_config, decisions, instant_kernels):
    from nvgemm_fusion.scheduler_hooks.virtual_device import virtual_device

    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (128, 32), (128,)))
    with virtual_device(name) as device, torch.no_grad():
        torch.compile(lambda x, w, b: F.relu(F.linear(x, w, b)))(x, w, b)
    (record,) = decisions()
    if name == "A100":
        assert [refusal["reason"] for refusal in record["refusals"]] == ["target"] and "nvgemm_" not in device.code[0]
    else:
        assert record["target"] == name and record["fused"] and "nvgemm_" in device.code[0]
        assert {a["status"] for a in record["alternatives"]} == {"modelled"}
