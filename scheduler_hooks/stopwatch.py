"""The stopwatch: GPU time of several things side by side.

Each thing is captured as a CUDA graph and replayed on a cold L2 cache; the things take turns, round by round, in one
window, so that a change of the card's clocks meets all of them. The result is the median of the rounds. A wall
clock, a warm cache or one window for each would favour the wrong one. The cache is made cold by reading: had it been
written, 60 MB of an H200's would go to memory while a kernel reads from there, 7 to 9 us that no kernel has a part in.

A window ends when all rounds are done, when its budget is spent, or as soon as the leader is separated from the others
by more than the spread. What is far behind the leader is dropped on the way. Where the clocks changed so much inside a
window that its first and its second half tell different times, it is measured once more.

The host has no part in a time: the GPU begins a round when all of it is enqueued.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from ..fusion.decision import Timing
from ..fusion.reasons import Reason, Refusal, described

Run = Callable[[], None]
Timed = Timing | Refusal
Key = TypeVar("Key")
Samples = dict[int, list[float]]
"""Microseconds of each round, by the number of the run. A run that was dropped has fewer rounds than the others."""

FIRST_ROUNDS = 5
HOPELESS = 1.2
"""After FIRST_ROUNDS, what takes this much longer than the fastest is not run again."""
ENOUGH_ROUNDS = 10
"""From here on, a leader that is separated ends the window."""
CLOCK_CHANGE = 0.04
"""By how much the two halves of a window may differ."""
LEAD_US, LONGEST_LEAD_US = 40, 640
"""How long the host gets to enqueue one replay, while the GPU waits at the start of a round: so much at first, twice as
much whenever it was not enough (a slow host, compilers beside us). At the longest, its lateness is timed."""
CYCLES_PER_US = 1800


class Stopwatch:
    """Times on the current CUDA device. Holds a buffer of twice the L2 cache while it lives.

    rounds: at most this many. budget_ms: a window of more than FIRST_ROUNDS ends after this time. `spent_ms`: what all
    windows have taken so far, without the captures before them. Raises torch.OutOfMemoryError when there is no room for
    the buffer.
    """

    def __init__(self, rounds: int, budget_ms: float) -> None:
        self.rounds, self.budget_ms, self.spent_ms = rounds, budget_ms, 0.0
        self._lead_us, self._random = LEAD_US, random.Random(0)
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.zeros(2 * cache_bytes // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")
        self._stream = _side_stream(torch.cuda.current_device())

    def time(self, runs: Sequence[Run | Refusal], rest: float = 0.0) -> list[Timed]:
        """A timing for each of `runs`, or why it has none. A run that raises is refused; what is refused stays so.
        rest: how long the GPU rests after each round, in multiples of the round: one that works without a pause lowers
        its clocks, and not every kernel suffers alike."""
        # One pool for all: what a replay leaves behind, nobody reads. Not for the next window, too: a pool whose graphs
        # are gone takes no others.
        pool = torch.cuda.graph_pool_handle()
        captured = [run if isinstance(run, Refusal) else self._capture(run, pool) for run in runs]
        graphs = {i: graph for i, graph in enumerate(captured) if isinstance(graph, torch.cuda.CUDAGraph)}
        samples = self._window(graphs, rest)
        if clock_change(samples) > CLOCK_CHANGE:
            samples = self._window(graphs, rest)
        timings = [Timing.of(samples[i]) if i in samples else captured[i] for i in range(len(runs))]
        del graphs, captured
        torch.cuda.empty_cache()  # gives the pool back
        return timings

    def _window(self, graphs: Mapping[int, torch.cuda.CUDAGraph], rest: float) -> Samples:
        alive, samples = list(graphs), {i: [] for i in graphs}
        started = time.monotonic()
        for number in range(self.rounds if graphs else 0):
            if number >= FIRST_ROUNDS:
                alive = contending(samples, alive)
                is_late = 1e3 * (time.monotonic() - started) > self.budget_ms
                if is_late or (number >= ENOUGH_ROUNDS and is_separated(samples, alive)):
                    break
            # Another order in each round, because what runs before a kernel decides the clocks that it meets.
            order = self._random.sample(alive, len(alive))
            times = self._round([graphs[i] for i in order])
            for i, us in zip(order, times):
                samples[i].append(us)
            time.sleep(rest * sum(times) / 1e6)
        self.spent_ms += 1e3 * (time.monotonic() - started)
        return samples

    def _round(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """The microseconds of one replay of each. Where the GPU begins before all are enqueued, it may have to wait
        for the host in between, and the round does not count."""
        while True:
            begins = torch.cuda.Event()
            torch.cuda._sleep(CYCLES_PER_US * self._lead_us * len(graphs))
            begins.record()
            events = [self._replay(graph) for graph in graphs]
            is_in_time = not begins.query()
            torch.cuda.synchronize()
            if is_in_time or self._lead_us >= LONGEST_LEAD_US:
                return [start.elapsed_time(end) * 1e3 for start, end in events]
            self._lead_us *= 2

    def _capture(self, run: Run, pool: tuple[int, int]) -> torch.cuda.CUDAGraph | Refusal:
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # compiles, tunes, and allocates what a kernel keeps
                    run()
                torch.cuda.synchronize()
                with _undone_on_failure(pool):
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        run()
                    finally:
                        graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:  # a candidate may fail in any way; it is out, the compile goes on
            return Refusal(Reason.RUN_ERROR, described(error))
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.sum(self._flush, dim=0, out=self._sum)
        start.record()
        graph.replay()
        end.record()
        return start, end


@functools.lru_cache(maxsize=None)
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device. torch keeps a workspace for cuBLAS, of 32 MiB, for each stream that has
    run a product: with one for each stopwatch, tuning would take a gigabyte and never give it back."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _undone_on_failure(pool: tuple[int, int]) -> Iterator[None]:
    """A capture that fails leaves torch's generator and its allocator as if it went on. Whoever draws random numbers
    then gets an error (Inductor, for one, when it times a kernel of its own), and so does whoever empties the cache."""
    try:
        yield
    except Exception:
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # of a clone, nothing is being captured
        with contextlib.suppress(RuntimeError, AttributeError):  # the capture has ended, with whatever was wrong in it
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


def mean_of(windows: Sequence[Mapping[Key, Timed]]) -> dict[Key, Timed]:
    """Of things in several windows: the mean of each, over those in which it was. What was refused in one is refused.

    First all windows are brought to one pace, that of what ran in all of them: where everything is slower in one, as
    after a change of the clocks, that is no spread of each.
    """
    found: dict[Key, list[Timed]] = {}
    for window, factor in zip(windows, _factors(windows)):
        for key, timed in window.items():
            found.setdefault(key, []).append(timed.scaled(factor) if isinstance(timed, Timing) else timed)
    return {key: _joined(of) for key, of in found.items()}


def _joined(found: Sequence[Timed]) -> Timed:
    refusal = next((timed for timed in found if isinstance(timed, Refusal)), None)
    return Timing.mean(found) if refusal is None else refusal


def _factors(windows: Sequence[Mapping[Key, Timed]]) -> list[float]:
    """What brings each window to the pace of all."""
    in_all = [key for key in windows[0] if all(isinstance(window.get(key), Timing) for window in windows)]
    if not in_all:
        return [1.0] * len(windows)
    paces = [statistics.fmean(math.log(window[key].us) for key in in_all) for window in windows]
    return [math.exp(statistics.fmean(paces) - pace) for pace in paces]


def contending(samples: Samples, alive: Sequence[int]) -> list[int]:
    """Those of `alive` that are not hopelessly behind the fastest."""
    us = {i: statistics.median(samples[i]) for i in alive}
    return [i for i in alive if us[i] <= HOPELESS * min(us.values())]


def is_separated(samples: Samples, alive: Sequence[int]) -> bool:
    """Whether the fastest is ahead of all others by more than the larger spread on either side."""
    leader, *others = sorted((Timing.of(samples[i]) for i in alive), key=lambda timing: timing.us)
    return all(leader.us + 2 * max(leader.spread, other.spread) < other.us for other in others)


def clock_change(samples: Samples) -> float:
    """By how much the second half of a window was slower or faster than the first: 0.04 for 4 %.

    Of what ran in every round, taken together, because a change of the clocks meets all of them alike.
    """
    rounds = max(map(len, samples.values()), default=0)
    if rounds < 2 * FIRST_ROUNDS:
        return 0.0
    steady = [times for times in samples.values() if len(times) == rounds]
    middle = [statistics.median(times) for times in steady]
    pace = [
        statistics.fmean(math.log(times[r] / us) for times, us in zip(steady, middle)) for r in range(rounds)
    ]
    halves = statistics.median(pace[: rounds // 2]), statistics.median(pace[rounds // 2 :])
    return abs(math.expm1(halves[1] - halves[0]))
