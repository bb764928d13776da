"""The first run of a kernel in a process of its own: whatever it does there, nothing happens here."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering import cublaslt, library, trial, trial_worker
from nvgemm_fusion.lowering.compiler import CompiledKernel
from nvgemm_fusion.lowering.kernel import KernelSpec
from nvgemm_fusion.lowering.store import KernelStore
from nvgemm_fusion.lowering.trial import Trial
from nvgemm_fusion.lowering.trial_worker import GuardedTensor

CPU, BF16 = torch.device("cpu"), torch.bfloat16
M, N, K = 40, 72, 24
LAYOUTS = (((M, K), (K, 1), 8), ((K, N), (1, K), 0), ((N,), (1,), 0), ((M, N), (N, 1), 0))
BROKEN = {  # how, and what is found
    "hangs": (Reason.RUN_ERROR, "did not end within"),
    "crashes": (Reason.RUN_ERROR, ""),
    "writes before": (Reason.WRONG_RESULT, "it writes beside argument 3"),
    "writes behind": (Reason.WRONG_RESULT, "it writes beside argument 3"),
    "raises": (Reason.RUN_ERROR, "ValueError: no such shape"),
    "has no room": (Reason.NOT_MEASURED, "3 TiB"),
    "is wrong": (Reason.WRONG_RESULT, "instead of"),
}
HARMFUL = list(BROKEN)[:4]


@pytest.fixture(scope="module")
def kernel():
    """The one kernel with an epilogue that runs on a CPU, too."""
    builder = ProgramBuilder()
    bias = builder.operand("bias", Operand(OperandKind.ROW, BF16))
    program, _ = builder.build([Store(builder.op("relu", builder.op("add", ACCUMULATOR, bias)), BF16)])
    spec = KernelSpec(cublaslt.CANDIDATE, BF16, Major.ROW, Major.COLUMN, program, "sm_90a", 132)
    return CompiledKernel(spec, None, 0.0)


@pytest.fixture
def store(tmp_path):
    return KernelStore(tmp_path)


@pytest.fixture
def broken_trial(monkeypatch):
    """A function that gives a trial whose kernels are broken: `how` as in `broken_trial_worker`."""
    trials = []

    def start(how, device=CPU):
        monkeypatch.setenv("BROKEN", how)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        trials.append(Trial(device, "broken_trial_worker"))
        return trials[-1]

    yield start
    for started in trials:
        started.close()


@pytest.fixture
def real_trial():
    started = Trial(CPU)
    yield started
    started.close()


def test_a_right_kernel_passes_once_for_its_layouts(kernel, store, real_trial, monkeypatch):
    assert real_trial.run(kernel, LAYOUTS, store) is None
    worker, asked = real_trial._worker, []
    monkeypatch.setattr(worker, "ask", lambda request, limit_s: asked.append(request["layouts"]) or {"ok": True})
    others = (*LAYOUTS[:3], ((M, N), (N + 8, 1), 0))
    assert [real_trial.run(kernel, layouts, store) for layouts in (LAYOUTS, others, others)] == [None] * 3
    assert asked == [others]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_kernel_is_found(how, kernel, store, broken_trial, monkeypatch):
    if how == "hangs":
        monkeypatch.setattr(trial, "TIME_LIMIT_S", 0.5)
    reason, detail = BROKEN[how]
    tried = broken_trial(how)
    found = tried.run(kernel, LAYOUTS, store)
    assert isinstance(found, Refusal) and found.reason is reason and detail in found.detail
    assert store.find(kernel.spec) == (found if how in HARMFUL else None)
    # And the next kernel runs, in another process where this one's is lost.
    monkeypatch.setenv("BROKEN", "not")
    if how not in HARMFUL:
        assert tried._worker.alive
        tried.close()
    assert tried.run(kernel, LAYOUTS, store) is None


def test_without_another_process_kernels_are_tried_in_this_one(kernel, store, broken_trial, monkeypatch, caplog):
    alone = broken_trial("does not start")
    assert alone.run(kernel, LAYOUTS, store) is None
    assert "run first in this process: its process ended with status 3" in caplog.text
    monkeypatch.setattr(trial_worker, "bind", lambda kernel: lambda *tensors: tensors[-1].zero_())
    found = alone.run(replace(kernel, seconds=1.0), (*LAYOUTS[:3], ((M, N), (1, M), 0)), store)
    assert found.reason is Reason.WRONG_RESULT and store.find(kernel.spec) is None
    assert caplog.text.count("run first in this process") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a device that cannot be used")
def test_a_gpu_that_cannot_be_used_costs_nobody_a_ban(kernel, store):
    found = Trial(torch.device("cuda", 0)).run(kernel, LAYOUTS, store)
    assert found.reason is Reason.NOT_MEASURED and store.find(kernel.spec) is None


@pytest.mark.parametrize("limit", ["IDLE_S", "UNUSED_S"])
def test_an_idle_process_is_ended(limit, kernel, store, real_trial, monkeypatch):
    monkeypatch.setattr(trial, limit, 0.05)
    real_trial.prepare()
    if limit == "IDLE_S":
        assert real_trial.run(kernel, LAYOUTS, store) is None
    first = real_trial._worker
    time.sleep(0.5)
    assert not first.alive
    monkeypatch.undo()
    assert real_trial.run(kernel, (*LAYOUTS[:3], ((M, N), (1, M), 0)), store) is None
    assert real_trial._worker is not first and real_trial._worker.alive


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn, torch.bool, torch.int32], ids=str)
def test_a_guarded_tensor_tells_what_is_written_beside_it(dtype):
    layout = (5, 3), (8, 2), 4
    tensor = GuardedTensor(*layout, dtype, CPU).tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((5, 3), (8, 2), dtype)
    for place, is_intact in ((4, True), (4 + 4 * 8 + 2 * 2, True), (-1, False), (4 + 4 * 8 + 2 * 2 + 1, False)):
        guarded = GuardedTensor(*layout, dtype, CPU)
        first = guarded.tensor.storage_offset() - 4
        raw = guarded.tensor.view(torch.uint8) if dtype.itemsize == 1 else guarded.tensor
        raw.as_strided((1,), (1,), first + place).zero_()
        assert guarded.is_intact() == is_intact


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
def test_what_a_first_trial_would_wait_for_is_there_before(device):
    """The process itself goes on whatever happens in there, so nobody else would notice."""
    library.loader.cache_clear()
    trial_worker._warm_up(device)
    assert library.loader.cache_info().currsize == 1


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["hangs", "crashes", "writes behind", "is wrong"])
def test_a_candidate_that_does_harm_is_out_and_the_compile_goes_on(
    how, tmp_path, broken_trial, inductor_config, decisions, monkeypatch
):
    from nvgemm_fusion.scheduler_hooks import alternatives, measurement

    monkeypatch.setattr(trial, "TIME_LIMIT_S", 5.0)
    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path))
    broken = broken_trial(how, torch.device("cuda", 0))
    for module in (alternatives, measurement):
        monkeypatch.setattr(module, "shared_trial", lambda device: broken)
    x, w, b = (torch.randn(*size, device="cuda").to(BF16) for size in ((256, 512), (1024, 512), (1024,)))
    with torch.no_grad(), inductor_config.patch(nvgemm_fusion_candidates=1):
        result = torch.compile(lambda: F.silu(F.linear(x, w, b)))()
    exact = F.silu(F.linear(x.double(), w.double(), b.double()))
    assert ((result.double() - exact).norm() / exact.norm()).item() < 1e-2
    (record,) = decisions()
    ours = [a for a in record["alternatives"] if a["backend"] == "NVGEMM"]
    assert ours and {(a["status"], a["reason"]) for a in ours} == {("failed", BROKEN[how][0].value)}
    assert record["alternatives"][record["chosen"]]["backend"] != "NVGEMM"
    banned = len(list((tmp_path / "kernels").glob("*.banned.json")))
    assert banned == (len(ours) if how in HARMFUL else 0)
