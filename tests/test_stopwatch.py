"""The stopwatch's rules: who is dropped, when a window may end, and when it is measured again. The GPU is made up."""

from __future__ import annotations

import itertools
import time
import types

import pytest
import torch
from nvgemm_fusion.fusion.decision import Timing
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.scheduler_hooks import stopwatch
from nvgemm_fusion.scheduler_hooks.stopwatch import Stopwatch, clock_change, contending, is_separated


def test_what_is_far_behind_is_dropped():
    assert contending({0: [10.0, 11.0, 10.0], 1: [11.9, 12.0, 11.9], 2: [12.1, 12.1, 99.0]}, [0, 1, 2]) == [0, 1]


def test_a_leader_is_separated_by_more_than_the_spread():
    steady, close, far = [10.0, 10.1] * 5, [10.06, 10.16] * 5, [10.5, 10.6] * 5
    assert not is_separated({0: steady, 1: close, 2: far}, [0, 1, 2])
    assert is_separated({0: steady, 1: close, 2: far}, [0, 2])
    assert is_separated({0: steady}, [0])


def test_a_change_of_the_clocks_is_noticed_and_noise_is_not():
    slower = [1.0] * 10 + [1.1] * 10
    assert clock_change({0: [50 * x for x in slower], 1: [70 * x for x in slower]}) == pytest.approx(0.1, abs=1e-6)
    noise = [1.0, 1.1, 0.9, 1.05, 1.0] * 4
    assert clock_change({0: [50 * x for x in noise], 1: [70 * x for x in reversed(noise)]}) < stopwatch.CLOCK_CHANGE
    assert clock_change({0: [50 * x for x in slower], 1: [70.0] * 5}) == pytest.approx(0.1, abs=1e-6)  # 1 was dropped
    assert clock_change({0: [1.0, 2.0]}) == clock_change({}) == 0.0


class Event:
    def __init__(self, us=0.0):
        self.us = us

    def elapsed_time(self, end):
        return end.us / 1e3


@pytest.fixture
def gpu(monkeypatch):
    """A stopwatch whose "graphs" are functions that give the microseconds of their next replay. To enqueue one takes
    the host `Graph.enqueue_us`; `Graph.order` has the graphs as they were enqueued."""
    clock = {"host": 0.0, "begins": 0.0}

    class Graph:
        enqueue_us, order = 20.0, []

        def __init__(self, times):
            self.times, self.replays = iter(times), 0

    class Begin:
        def record(self):
            self.us = clock["begins"]

        def query(self):
            return self.us <= clock["host"]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Begin)
    sleep = lambda cycles: clock.update(begins=clock["host"] + cycles / stopwatch.CYCLES_PER_US)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def replay(self, graph):
        graph.replays += 1
        Graph.order.append(graph)
        clock["host"] += Graph.enqueue_us
        return Event(), Event(next(graph.times))

    monkeypatch.setattr(Stopwatch.__init__, "__defaults__", (25, 1e6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=4))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(stopwatch, "_side_stream", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(Stopwatch, "_capture", lambda self, run, pool: run())
    monkeypatch.setattr(Stopwatch, "_replay", replay)
    return Graph


def timed(graph, *times, **options):
    graphs = [graph(x) for x in times]
    runs = [lambda g=g: g for g in graphs] + [Refusal(Reason.COMPILE_ERROR)]
    return Stopwatch(**options).time(runs), [g.replays for g in graphs]


def test_a_window(gpu):
    (near, nearer, far, missing), replays = timed(
        gpu, itertools.repeat(50.0), itertools.cycle([49.0, 51.0]), itertools.repeat(80.0)
    )
    assert (near, nearer.us, far) == (Timing(50.0), 49.0, Timing(80.0)) and missing.reason is Reason.COMPILE_ERROR
    assert replays == [25, 25, stopwatch.FIRST_ROUNDS]


def test_a_window_ends_when_the_leader_is_separated(gpu):
    assert timed(gpu, itertools.repeat(50.0), itertools.repeat(55.0))[1] == [stopwatch.ENOUGH_ROUNDS] * 2


def test_a_window_ends_with_its_budget_but_not_before_the_first_rounds(gpu):
    assert timed(gpu, itertools.repeat(50.0), itertools.repeat(50.0), budget_ms=0)[1] == [stopwatch.FIRST_ROUNDS] * 2


def test_what_windows_take_is_spent_and_what_captures_take_is_not(gpu, monkeypatch):
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda seconds: None)
    monkeypatch.setattr(stopwatch, "time", clock)

    def taking(seconds, result):
        clock.now += seconds
        return result

    monkeypatch.setattr(Stopwatch, "_capture", lambda self, run, pool: taking(100.0, run()))
    monkeypatch.setattr(Stopwatch, "_round", lambda self, graphs: taking(0.5, [50.0] * len(graphs)))
    watch = Stopwatch(rounds=4)
    for windows in (1, 2):
        watch.time([lambda: gpu([])] * 3)
        assert watch.spent_ms == windows * 2000


def test_a_gpu_rests_as_long_as_it_is_told(gpu, monkeypatch):
    rests = []
    monkeypatch.setattr(stopwatch, "time", types.SimpleNamespace(sleep=rests.append, monotonic=time.monotonic))
    watch = Stopwatch(rounds=stopwatch.FIRST_ROUNDS)
    for rest, after_each in ((2.0, 200e-6), (0.0, 0.0)):
        watch.time([lambda g=gpu(itertools.repeat(us)): g for us in (40.0, 60.0)], rest)
        assert rests == pytest.approx([after_each] * stopwatch.FIRST_ROUNDS)
        rests.clear()


def test_a_window_in_which_the_clocks_changed_is_measured_again(gpu):
    (first, second, _), replays = timed(
        gpu, *(itertools.chain([50.0] * 12, itertools.repeat(60.0)) for _ in range(2))
    )
    assert first.us == second.us == 60.0 and replays == [50, 50]


def test_where_nothing_can_run_there_is_nothing_to_wait_for(gpu, monkeypatch):
    monkeypatch.setattr(Stopwatch, "_round", lambda self, graphs: pytest.fail("a round of nothing"))
    refusal = Refusal(Reason.COMPILE_ERROR)
    assert Stopwatch().time([refusal, refusal]) == [refusal, refusal]


def test_a_round_that_the_gpu_began_before_the_host_had_enqueued_it_is_measured_again(gpu):
    gpu.enqueue_us = 100.0
    late = [50.0 + number for number in range(2)]  # 40, then 80 us are not enough
    (first, second, _), replays = timed(
        gpu, itertools.chain(late, itertools.repeat(30.0)), itertools.chain(late, itertools.repeat(33.0)), rounds=9
    )
    assert (first, second) == (Timing(30.0), Timing(33.0)) and replays == [11, 11]


def test_a_host_that_is_never_in_time_is_no_reason_to_wait_for_ever(gpu):
    gpu.enqueue_us = 1e6
    (first, *_), replays = timed(gpu, itertools.repeat(30.0), itertools.repeat(30.0), rounds=5)
    assert first == Timing(30.0) and replays == [5 + 4] * 2  # 40, 80, 160, 320


def test_what_runs_before_a_kernel_is_another_one_from_round_to_round(gpu):
    graphs = [gpu(itertools.repeat(50.0)) for _ in range(4)]
    watch, before = Stopwatch(rounds=5), {}
    for _ in range(4):  # windows, in which the order is not the same either
        watch.time([lambda g=g: g for g in graphs])
    for previous, graph in itertools.pairwise(gpu.order):
        before.setdefault(graph, []).append(previous)
    assert all(of.count(graph) < len(of) / 2 for of in before.values() for graph in graphs)
    rounds = {tuple(gpu.order[i : i + 4]) for i in range(0, len(gpu.order), 4)}
    assert len(gpu.order) == 80 and len(rounds) > 10


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_capture_that_fails_keeps_neither_generator_nor_allocator(monkeypatch, has_ended):
    calls = []

    def end(device, pool):
        if has_ended:
            raise RuntimeError("not recording")
        calls.append(("end", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    release = lambda device, pool: calls.append(("release", device, pool))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)

    class Generator:
        def clone_state(self):
            return "a state in which nothing is captured"

        def graphsafe_set_state(self, state):
            self.state = state

    generator = Generator()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    with stopwatch._undone_on_failure((0, 7)):
        pass
    assert not hasattr(generator, "state") and not calls
    with pytest.raises(RuntimeError, match="capture"), stopwatch._undone_on_failure((0, 7)):
        raise RuntimeError("no capture")
    assert generator.state == generator.clone_state()
    assert calls == ([] if has_ended else [("end", 1, (0, 7)), ("release", 1, (0, 7))])


@pytest.mark.gpu
def test_what_stopwatches_leave_behind_does_not_grow():
    a, out = torch.randn(1024, 1024, device="cuda"), torch.empty(1024, 1024, device="cuda")
    left = []
    for _ in range(4):  # cuBLAS keeps something for the first
        Stopwatch(rounds=5, budget_ms=50).time([lambda: torch.mm(a, a, out=out)])
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert left[1:] == left[:1] * 3


@pytest.mark.gpu
def test_torch_goes_on_after_a_capture_that_failed():
    ones = torch.ones(64, 64, device="cuda")
    for _ in range(2):  # and the stopwatch goes on with other windows
        watch = Stopwatch(rounds=10, budget_ms=50)
        for _ in range(2):
            fine, failed = watch.time([lambda: ones.mul(2), lambda: ones.sum().item()])
            assert isinstance(fine, Timing) and failed.reason is Reason.RUN_ERROR
            assert torch.randn(8, device="cuda").isfinite().all()
            torch.cuda.empty_cache()


def by_number(*timed):
    return dict(enumerate(timed))


def test_what_was_refused_in_one_window_is_refused():
    refusal, crash = Refusal(Reason.RUN_ERROR, "no"), Refusal(Reason.RUN_ERROR, "crash")
    first = by_number(Timing(4.0, 0.5), Timing(5.0), refusal)
    second = by_number(Timing(4.0, 0.5), crash, Timing(5.0))
    assert stopwatch.mean_of([first, second]) == by_number(Timing(4.0, 0.5), crash, refusal)
    assert stopwatch.mean_of([first]) == first
    assert stopwatch.mean_of([{0: refusal}, {0: refusal}]) == {0: refusal}


def test_what_meets_all_things_of_a_window_is_no_spread_of_each():
    first, second = by_number(Timing(100.0, 1.0), Timing(50.0)), by_number(Timing(121.0, 1.0), Timing(60.5))
    slower = stopwatch.mean_of([first, second])
    assert [timing.us for timing in slower.values()] == pytest.approx([110.0, 55.0])
    assert [timing.spread for timing in slower.values()] == pytest.approx([0.5**0.5, 0.0], abs=0.01)
    first, second = by_number(Timing(100.0), Timing(100.0)), by_number(Timing(100.0), Timing(104.0))
    places = stopwatch.mean_of([first, second])
    assert [timing.us for timing in places.values()] == pytest.approx([100.0, 102.0], rel=1e-3)
    assert [timing.spread for timing in places.values()] == pytest.approx([1.0, 1.0], rel=0.03)


def test_what_was_in_one_window_alone_has_the_pace_of_all():
    first = by_number(Timing(100.0, 1.0), Timing(50.0), Timing(200.0, 2.0))
    found = stopwatch.mean_of([first, by_number(Timing(121.0, 1.0), Timing(60.5))])
    assert list(found) == [0, 1, 2]
    assert (found[2].us, found[2].spread) == pytest.approx((220.0, 2.2))
