"""A contest on the GPU: who is timed where and how often, and who says what when something fails."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import types

import pytest
import torch
from nvgemm_fusion.fusion.decision import Alternative, Backend, Status, Timing
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering.store import KernelStore
from nvgemm_fusion.scheduler_hooks import measurement
from nvgemm_fusion.scheduler_hooks.contest import Contender
from nvgemm_fusion.scheduler_hooks.workload import PLACES
from torch._dynamo.utils import compilation_time_metrics


@pytest.fixture
def timed_by_name(monkeypatch, tmp_path):
    """`measurement.timed` of entrants by name: a Timing is what the stopwatch says of it in the first place of B (each
    further one is slower by a fifth), a list of them what it says in each place, a RUN_ERROR what it refuses, any other
    Refusal what the workload does. `alone`: the same for the templates whose entrants wait. Its attribute `windows` has
    who was timed together; each of them takes 40 ms. In every other one the GPU rests between rounds, but for that of
    templates alone. `events` has when each kernel of ours was compiled, and when tried. What Inductor's benchmarks have
    left in torch's allocator is gone before the workload allocates anything."""
    outcomes, windows, events, emptied = {}, [], [], []

    class Workload:
        is_released = False

        def release(self):
            self.is_released = True

        def places(self):
            for self.number in range(PLACES):
                yield

        def prepare(self, entrants):
            assert emptied
            names = [entrant.alternative.candidate for entrant in entrants]
            events.extend(f"{name} is compiled" for name in names if name.startswith("triton"))
            return names

        def gemm_alone(self, choice):
            return f"{choice} alone"

        def runs(self, names):
            windows.append(names)
            return [self.run(outcomes[name]) for name in names]

        def run(self, outcome):
            if isinstance(outcome, list):
                outcome = outcome[self.number]
            if isinstance(outcome, Timing):
                return lambda: outcome.scaled(1.2**self.number)
            return (lambda: outcome) if outcome.reason is Reason.RUN_ERROR else outcome

    class MadeUp:
        def __init__(self, rounds, budget_ms):
            assert (rounds, budget_ms) == (10, 75)
            self.spent_ms, self.rests = 0, itertools.cycle([0.0, measurement.REST])

        def time(self, runs, rest=None):
            assert rest is None or rest == next(self.rests)
            self.spent_ms += 40
            return [run if isinstance(run, Refusal) else run() for run in runs]

    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(measurement, "Stopwatch", MadeUp)

    trial = types.SimpleNamespace(run=lambda kernel, layouts, store: events.append(f"{kernel} is tried"))
    monkeypatch.setattr(measurement, "shared_trial", lambda device: trial)

    def entrant(name):
        if name == "aten":
            return Contender(Alternative(Backend.ATEN, name), None, None)
        if name.startswith("triton"):  # with a region fused: "triton_1" and "triton_1_more" are the same template
            return Contender(Alternative(Backend.TRITON, name), None, name[:8], waits=True)
        events.append(f"{name} is compiled")
        call = types.SimpleNamespace(arguments=list)
        return Contender(Alternative(Backend.NVGEMM, name), None, None, call, compiled=name)

    def timed(alone=(), **given):
        outcomes.update(given, **{f"{template} alone": outcome for template, outcome in dict(alone).items()})
        workload = Workload()
        found = measurement.timed(workload, torch.device("cuda", 0), map(entrant, given))
        assert workload.is_released
        return found

    timed.windows, timed.events = windows, events
    return timed


def test_each_entrant_says_why_it_has_no_time(timed_by_name):
    wrong, crash = Refusal(Reason.WRONG_RESULT, "store 0 differs"), Refusal(Reason.RUN_ERROR, "RuntimeError: no")
    first, second, third = timed_by_name(fast=Timing(5.0), wrong=wrong, crash=crash)
    assert first.alternative.timing == Timing(5.0) and first.alternative.status is Status.MEASURED
    assert (second.alternative.refusal, second.alternative.status) == (wrong, Status.FAILED)
    assert (third.alternative.refusal, third.alternative.status) == (crash, Status.FAILED)


def test_a_kernel_is_tried_while_others_are_compiled(timed_by_name):
    timed_by_name(aten=Timing(5.0), fast=Timing(4.0), slow=Timing(6.0))
    assert timed_by_name.events == ["fast is compiled", "fast is tried", "slow is compiled", "slow is tried"]


def test_torch_knows_how_long_it_took(timed_by_name):
    compilation_time_metrics.clear()
    timed_by_name(fast=Timing(4.0))
    assert set(compilation_time_metrics) == {"nvgemm_fusion.trials", "nvgemm_fusion.windows"}


def test_only_who_may_be_the_fastest_is_timed_in_further_places(timed_by_name):
    broken = Refusal(Reason.WRONG_RESULT)
    falls_behind = [Timing(5.1), Timing(6.0), Timing(6.0)]
    entrants = timed_by_name(slow=Timing(6.0), near=Timing(5.2), late=falls_behind, broken=broken, fast=Timing(5.0))
    everyone, finalists = ["slow", "near", "late", "broken", "fast"], ["near", "fast"]
    assert timed_by_name.windows == [everyone, ["near", "late", "fast"], finalists, finalists]  # in 160 ms of 150
    us = {entrant.alternative.candidate: entrant.alternative.timing for entrant in entrants}
    assert us["slow"].us / us["fast"].us == pytest.approx(1.2) and us["near"].us / us["fast"].us == pytest.approx(1.04)


def test_a_template_with_a_region_is_compiled_where_it_may_be_the_fastest(timed_by_name):
    found = timed_by_name(
        alone={"triton_1": Timing(4.9), "triton_2": Timing(5.1)},
        triton_1=Timing(5.2),
        aten=Timing(6.0),
        triton_2=Timing(1.0),  # nobody will know
        triton_1_more=Timing(4.96),
        fast=Timing(5.0),
    )
    admitted, everyone = ["fast", "triton_1", "triton_1_more"], ["aten", "fast"]
    assert timed_by_name.windows[:4] == [everyone, ["fast", "triton_1 alone", "triton_2 alone"], admitted, admitted]
    assert timed_by_name.events[-2:] == [f"{name} is compiled" for name in admitted[1:]]
    assert "triton_2 is compiled" not in timed_by_name.events
    first, aten, second, more, fast = (entrant.alternative for entrant in found)
    assert second.timing is None and (second.status, second.refusal.reason) == (Status.PRUNED, Reason.SLOWER)
    assert "1.020" in second.refusal.detail and aten.timing.us / fast.timing.us == pytest.approx(1.2)
    assert [of.timing.us / fast.timing.us for of in (first, more)] == pytest.approx([1.04, 0.992])


def test_what_joins_late_is_timed_as_often_as_is_least(timed_by_name):
    timed_by_name(alone={"triton_1": Timing(4.9)}, triton_1=Timing(5.2), fast=Timing(5.0))
    assert sum("triton_1" in window for window in timed_by_name.windows) == 2  # in 160 ms of 150, with the one alone


@pytest.mark.parametrize(
    "alone, others",
    [
        (Refusal(Reason.RUN_ERROR), {"fast": Timing(5.0)}),
        (Timing(9.0), {"fast": Refusal(Reason.RUN_ERROR)}),
    ],
    ids=["its GEMM does not run alone", "nobody has a time"],
)
def test_a_template_is_pruned_by_times_alone(timed_by_name, alone, others):
    (triton, _) = timed_by_name(alone={"triton_1": alone}, triton_1=Timing(5.2), **others)
    assert triton.alternative.status is Status.MEASURED


def test_a_template_that_does_not_compile_says_so(timed_by_name, caplog):
    broken = Refusal(Reason.RUN_ERROR, "RuntimeError: out of registers")
    (triton, fast) = timed_by_name(alone={"triton_1": Timing(4.9)}, triton_1=broken, fast=Timing(5.0))
    assert (triton.alternative.status, triton.alternative.refusal) == (Status.FAILED, broken)
    assert fast.alternative.timing is not None and "triton_1 of Inductor's cannot be timed" in caplog.text


def test_a_contest_with_nobody_near_the_fastest_is_over(timed_by_name):
    timed_by_name(slow=Timing(5.3), fast=Timing(5.0))
    assert timed_by_name.windows == [["slow", "fast"]]


def test_it_is_said_which_of_inductors_kernels_cannot_be_timed(timed_by_name, caplog):
    timed_by_name(fast=Timing(5.0), quack=Refusal(Reason.RUN_ERROR, "AttributeError: no"))
    assert not [record for record in caplog.records if record.name != "torch.__trace"]  # which times the contest
    timed_by_name(aten=Refusal(Reason.RUN_ERROR, "AttributeError: no"), fast=Timing(5.0))
    assert "aten of Inductor's cannot be timed" in caplog.text and "AttributeError" in caplog.text


def test_processes_that_share_a_gpu_take_turns(timed_by_name, monkeypatch):
    monkeypatch.setattr(measurement, "TURN_LIMIT_S", 0.3)
    monkeypatch.setattr(measurement, "TRIAL_TURN_LIMIT_S", 0.2)
    started = time.monotonic()
    with KernelStore().lock("gpu-GPU-1", 10.0):  # as another process holds it
        waiting = threading.Thread(target=lambda: timed_by_name(fast=Timing(5.0)))
        waiting.start()
        waiting.join()
    assert 0.5 <= time.monotonic() - started < 10


def test_without_room_on_the_gpu_stock_is_left_alone(timed_by_name, monkeypatch):
    def no_room(rounds, budget_ms):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measurement, "Stopwatch", no_room)
    refusal = timed_by_name(fast=Timing(5.0))
    assert refusal.reason is Reason.NOT_MEASURED and "no room" in refusal.detail
