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
from .workload import Prepared, Workload

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
    return [_with_result(entrant, results[number]) for number, entrant in enumerate(entrants)]


def _with_result(entrant: Contender, result: Timed) -> Contender:
    alternative = entrant.alternative
    if isinstance(result, Timing):
        return replace(entrant, alternative=replace(alternative, timing=result))
    if alternative.status is Status.FAILED:
        return entrant
    status = Status.PRUNED if result.reason is Reason.SLOWER else Status.FAILED
    if status is Status.FAILED and alternative.backend is not Backend.NVGEMM:
        logger.warning("%s of Inductor's cannot be timed: %s", alternative.candidate, result.explanation)
    return replace(entrant, alternative=replace(alternative, status=status, refusal=result))


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
    that may still turn out to be the fastest. Those that wait join them in the first place, if they may. Raises
    torch.OutOfMemoryError when there is no room for it, or for B."""
    budget_ms, fewest = config.nvgemm_fusion_benchmark_ms, FEWEST_PLACES
    stopwatch = Stopwatch(ROUNDS, budget_ms / FEWEST_PLACES)
    late = {number: entrant for number, entrant in enumerate(entrants) if entrant.waits}
    competing = [number for number in range(len(entrants)) if number not in late]
    prepared = dict(zip(competing, workload.prepare([entrants[number] for number in competing])))
    windows: list[dict[int, Timed]] = []

    def time(numbers: Sequence[int]) -> list[int]:
        runs = workload.runs([prepared[number] for number in numbers])
        windows.append(dict(zip(numbers, stopwatch.time(runs, REST * (len(windows) % 2)))))
        return _finalists(windows)

    for place, _ in enumerate(workload.places()):
        competing = time(competing)
        if place == 0 and late:
            leader = min(competing, key=lambda number: windows[0][number].us, default=None)
            windows[0].update(_pruned(late, None if leader is None else prepared[leader], workload, stopwatch))
            joining = [number for number in late if number not in windows[0]]
            if joining:
                prepared.update(zip(joining, workload.prepare([late[number] for number in joining])))
                competing = time([*competing, *joining])
                fewest += 1  # which the others have more
        if len(competing) < 2 or (stopwatch.spent_ms > budget_ms and len(windows) >= fewest):
            break
    return windows


def _pruned(
    late: Mapping[int, Contender], leader: Prepared | None, workload: Workload, stopwatch: Stopwatch
) -> dict[int, Refusal]:
    """Who of `late` need not be compiled, with the reason: the choice alone takes longer than `leader`, the fastest so
    far, for everything. In a window of their own: beside a part of an alternative, all others would look slow."""
    if leader is None:
        return {}
    choices = list(dict.fromkeys(entrant.choice for entrant in late.values()))
    whole, *parts = stopwatch.time(workload.runs([leader, *map(workload.gemm_alone, choices)]))
    slower = {
        choice: Refusal(Reason.SLOWER, f"its GEMM alone takes {part.us / whole.us:.3f} of another's time")
        for choice, part in zip(choices, parts)
        if isinstance(whole, Timing) and isinstance(part, Timing) and part.us > whole.us
    }
    return {number: slower[entrant.choice] for number, entrant in late.items() if entrant.choice in slower}


def _finalists(windows: Sequence[Mapping[int, Timed]]) -> list[int]:
    """Of those in the last window, who is not too far behind by now."""
    mean = mean_of(windows)
    us = {number: mean[number].us for number in windows[-1] if isinstance(mean[number], Timing)}
    return [number for number in us if us[number] <= FINALISTS * min(us.values())]
