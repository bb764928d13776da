"""A contest on the GPU: who is timed where and how often, and who says what when something fails."""

from __future__ import annotations

import contextlib
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
    Refusal what the workload does. Its attribute `windows` has who was timed together; each of them takes 40 ms. In
    every other one the GPU rests between rounds. `events` has when each kernel of ours was compiled, and when tried.
    What Inductor's benchmarks have left in torch's allocator is gone before the workload allocates anything."""
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
            return [entrant.alternative.candidate for entrant in entrants]

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
            self.spent_ms = 0

        def time(self, runs, rest):
            assert rest == (measurement.REST if self.spent_ms % 80 else 0.0)
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
        events.append(f"{name} is compiled")
        call = types.SimpleNamespace(arguments=list)
        return Contender(Alternative(Backend.NVGEMM, name), None, None, call, compiled=name)

    def timed(**given):
        outcomes.update(given)
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
