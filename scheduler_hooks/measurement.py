"""Measurement: what the stopwatch says of the entrants of a contest, in one place of B after the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch._dynamo.utils import dynamo_timed
from torch._inductor import config

from ..fusion.decision import Backend, Status, Timing
from ..fusion.reasons import Reason, Refusal
from ..lowering.compiler import shared_compiler
from ..lowering.store import KernelStore
from ..lowering.trial import shared_trial
from .contest import Contender
from .stopwatch import Stopwatch, Timed, mean_of
from .workload import Workload

logger = logging.getLogger("nvgemm_fusion")

ROUNDS = 10
"""Of the stopwatch, in each place of B: as many as it needs to notice a change of the clocks."""
FINALISTS = 1.05
"""B's further places are for those within this much of the fastest so far: a place moves most kernels by less."""
FEWEST_PLACES = 2
"""Of B, unless one entrant is far ahead. Further ones are tried while the budget lasts: they matter where a GEMM has
few rows, and such a one takes little time."""
REST = 2.0
"""How long the GPU rests after each round of every other window, in multiples of the round. A large GEMM that follows
another one meets lower clocks than one that comes alone, and who leads there may be behind here: both count alike."""
TURN_LIMIT_S, TRIAL_TURN_LIMIT_S = 60.0, 5.0
"""After this, a process that waits for its turn on a GPU goes on, with the windows of a contest, which take a second or
two, or with the trial of a kernel: that is short, and who times something meanwhile notices little."""


def timed(workload: Workload, device: torch.device, entrants: Iterable[Contender]) -> list[Contender] | Refusal:
    """The entrants with the stopwatch's times on `device`; one that does not run, or not right, says why. Refused when
    there is no room to time anything. entrants: as they are compiled; those that are, are tried meanwhile.

    How long that took, torch's account of compile times knows (`torch._dynamo.utils.compile_times`)."""
    store = shared_compiler(config.compile_threads).store
    with torch.cuda.device(device):
        torch.cuda.empty_cache()  # of what Inductor's own benchmarks have left, little fits what is allocated now
    with dynamo_timed("nvgemm_fusion.trials"):
        entrants = [_tried(entrant, device, store) for entrant in entrants]
    with dynamo_timed("nvgemm_fusion.windows"), _turn(device, store, TURN_LIMIT_S), torch.cuda.device(device):
        try:
            results = mean_of(_windows(workload, entrants))
        except torch.OutOfMemoryError:
            return Refusal(Reason.NOT_MEASURED, "no room on the GPU to time anything")
        finally:
            workload.release()
            torch.cuda.empty_cache()  # gives back the room that was needed
    found = []
    for entrant, result in zip(entrants, results.values()):
        alternative = entrant.alternative
        if isinstance(result, Timing):
            alternative = replace(alternative, timing=result)
        elif alternative.status is not Status.FAILED:
            alternative = replace(alternative, status=Status.FAILED, refusal=result)
            if alternative.backend is not Backend.NVGEMM:
                logger.warning("%s of Inductor's cannot be timed: %s", alternative.candidate, result.explanation)
        found.append(replace(entrant, alternative=alternative))
    return found


def _turn(device: torch.device, store: KernelStore, limit_s: float) -> AbstractContextManager[None]:
    """Of the processes that share a GPU, those that tune take turns: each would time the other's kernels, too."""
    if config.nvgemm_fusion_force:
        return contextlib.nullcontext()
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    return store.lock(f"gpu-{identity}", limit_s)


def _tried(entrant: Contender, device: torch.device, store: KernelStore) -> Contender:
    """The entrant, out of the contest when it has a kernel whose first run fails."""
    if entrant.compiled is None:
        return entrant
    layouts = [(view.size, view.strides, view.offset) for view in entrant.call.arguments()]
    with _turn(device, store, TRIAL_TURN_LIMIT_S):
        found = shared_trial(device).run(entrant.compiled, layouts, store)
    return entrant if found is None else entrant.with_kernel(found)


def _windows(workload: Workload, entrants: Sequence[Contender]) -> list[dict[int, Timed]]:
    """What the stopwatch says of `entrants`, by their numbers: of all in the first place of B, in the others of those
    that may still turn out to be the fastest. Raises torch.OutOfMemoryError when there is no room for it, or for B."""
    budget_ms = config.nvgemm_fusion_benchmark_ms
    stopwatch = Stopwatch(ROUNDS, budget_ms / FEWEST_PLACES)
    prepared = workload.prepare(entrants)
    windows: list[dict[int, Timed]] = []
    competing: Sequence[int] = range(len(entrants))
    for number, _ in enumerate(workload.places()):
        runs = workload.runs([prepared[i] for i in competing])
        windows.append(dict(zip(competing, stopwatch.time(runs, REST * (number % 2)))))
        competing = _finalists(windows)
        if len(competing) < 2 or (stopwatch.spent_ms > budget_ms and len(windows) >= FEWEST_PLACES):
            break
    return windows


def _finalists(windows: Sequence[Mapping[int, Timed]]) -> list[int]:
    """Of those in the last window, who is not too far behind by now."""
    mean = mean_of(windows)
    us = {number: mean[number].us for number in windows[-1] if isinstance(mean[number], Timing)}
    return [number for number in us if us[number] <= FINALISTS * min(us.values())]
