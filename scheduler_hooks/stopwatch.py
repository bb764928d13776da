"""The stopwatch: GPU time of several things side by side.

Each thing is captured as a CUDA graph and replayed on a cold L2 cache; the things take turns, round by round, in one
window, so that a change of the card's clocks meets all of them. The result is the median of the rounds. A wall
clock, a warm cache or one window for each would favour the wrong one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..fusion.decision import Timing
from ..fusion.reasons import Reason, Refusal

Run = Callable[[], None]

ROUNDS = 25
FIRST_ROUNDS = 5
HOPELESS = 1.3
"""After FIRST_ROUNDS, what takes this much longer than the fastest is not run again."""
BUDGET_S = 2.0
ENQUEUE_US = 40
"""How long the host may take to enqueue one replay. The GPU is kept waiting for that long at the start of a round:
where the host fell behind (compilers run beside us), its lateness would be timed."""
CYCLES_PER_US = 1800


class Stopwatch:
    """Times on the current CUDA device. Holds a buffer of twice the L2 cache while it lives."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self.rounds = rounds
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device="cuda")
        self._stream = torch.cuda.Stream()

    def time(self, runs: Sequence[Run | None]) -> list[Timing | Refusal]:
        """A timing for each of `runs`, or why it has none. A run that raises is refused (None as well)."""
        captured = [Refusal(Reason.NOT_MEASURED) if run is None else self._capture(run) for run in runs]
        alive = [i for i, graph in enumerate(captured) if isinstance(graph, torch.cuda.CUDAGraph)]
        samples: dict[int, list[float]] = {i: [] for i in alive}
        deadline = time.monotonic() + BUDGET_S
        for number in range(self.rounds):
            if number >= FIRST_ROUNDS and time.monotonic() > deadline:
                break
            # The order turns, because what runs before a kernel decides the clocks that it meets.
            shift = number % max(1, len(alive))
            torch.cuda._sleep(CYCLES_PER_US * ENQUEUE_US * len(alive))
            events = [(i, self._replay(captured[i])) for i in alive[shift:] + alive[:shift]]
            torch.cuda.synchronize()
            for i, (start, end) in events:
                samples[i].append(start.elapsed_time(end) * 1e3)
            if number + 1 == FIRST_ROUNDS:
                so_far = {i: Timing.of(samples[i]).us for i in alive}
                alive = [i for i in alive if so_far[i] <= HOPELESS * min(so_far.values())]
        return [Timing.of(samples[i]) if i in samples else captured[i] for i in range(len(runs))]

    def _capture(self, run: Run) -> torch.cuda.CUDAGraph | Refusal:
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # compiles, tunes, and allocates what a kernel keeps
                    run()
                torch.cuda.synchronize()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:  # a candidate may fail in any way; it is out, the compile goes on
            return Refusal(Reason.RUN_ERROR, f"{type(error).__name__}: {error}"[:500])
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        graph.replay()
        end.record()
        return start, end
