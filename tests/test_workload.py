"""How the entrants of a contest become functions: what is compiled when, and who is out when something fails."""

from __future__ import annotations

import gc
import threading
import time
import types
import weakref

import pytest
import torch
from nvgemm_fusion.fusion.decision import Alternative, Backend, Status
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.scheduler_hooks import workload
from nvgemm_fusion.scheduler_hooks.contest import Contender
from nvgemm_fusion.scheduler_hooks.workload import Workload


@pytest.fixture
def events():
    """What happened, in order: ("compile", names), ("wait", names), ("run", names), ("gemm", choice)."""
    return []


@pytest.fixture
def made_up(events, monkeypatch):
    """A workload whose contest has the nodes a, b and c around a GEMM, each of which Inductor makes a kernel of: a
    before it, and after it b, or c where a region is fused; c does not compile. Inductor's pool of processes is there
    after a was asked for."""

    def node(name):
        return types.SimpleNamespace(get_name=lambda: name, get_nodes=lambda: [nodes[name]])

    def compile_kernel(of):
        names = "".join(each.get_name() for each in of)
        events.append(("compile", names))

        def result():
            events.append(("wait", names))
            if names == "c":
                raise RuntimeError("no such instruction")

        module = types.SimpleNamespace(get_args=lambda: (), call=lambda arguments: events.append(("run", names)))
        module.triton_ = types.SimpleNamespace(precompile=lambda: events.append(("load", names)))
        return None if names == "a" else types.SimpleNamespace(result=result), module

    nodes = {name: node(name) for name in "abc"}
    gemm = types.SimpleNamespace(scheduler=types.SimpleNamespace(compile_kernel=compile_kernel))
    contest = types.SimpleNamespace(
        node=gemm,
        nodes=nodes,
        separate=lambda region: ("a", "b" if region is None else "c"),
    )

    monkeypatch.setattr(workload, "grouped", lambda group: group)
    monkeypatch.setattr(Workload, "_stock_gemm", lambda self, choice: lambda: events.append(("gemm", choice)))
    monkeypatch.setattr(Workload, "_adopt", lambda self, arguments, nodes: arguments)
    monkeypatch.setattr(Workload, "_fused_triton", lambda self, entrant: lambda: lambda: None)
    return Workload(contest)


def stock(choice, region=None):
    return Contender(Alternative(Backend.ATEN, choice), region, choice)


def test_kernels_are_compiled_side_by_side_each_of_them_once(made_up, events):
    prepared = made_up.prepare([stock("mm"), stock("bmm")])
    first, second = made_up.runs(prepared)
    assert [name for what, name in events if what == "compile"] == ["a", "b"]
    assert [what for what, name in events if name == "a"] == ["compile", "load"]
    assert [what for what, name in events if name == "b"] == ["compile", "wait", "load"]
    events.clear()
    first()
    second()
    ran = [("run", "a"), ("gemm", "mm"), ("run", "b"), ("run", "a"), ("gemm", "bmm"), ("run", "b")]
    assert events == ran
    events.clear()
    for run in made_up.runs(prepared):
        run()
    assert events == ran


def test_nothing_is_timed_while_this_process_compiles(made_up, events, monkeypatch):
    """Whatever it compiles for: a contest that comes later has begun with it."""
    starts, compile_kernel = threading.Event(), made_up.contest.node.scheduler.compile_kernel

    def slowly(of):
        future, module = compile_kernel(of)
        load = module.triton_.precompile
        module.triton_.precompile = lambda: (starts.wait(60), time.sleep(0.1), load())
        return future, module

    other = Workload(made_up.contest)
    with monkeypatch.context() as patch:
        patch.setattr(made_up.contest.node.scheduler, "compile_kernel", slowly)
        other.prepare([stock("mm")])
    assert ("load", "a") not in events
    starts.set()
    assert made_up.runs([]) == [] and ("load", "a") in events


@pytest.fixture
def weight(monkeypatch):
    """A workload whose B is the buffer "weight", of 300 x 200 in columns that lie apart, read from its second row on;
    `weight.room`: how many elements there is room for."""
    b = types.SimpleNamespace(get_size=lambda: [300, 200], get_stride=lambda: [1, 304])
    b.get_dtype, b.get_device = lambda: torch.bfloat16, lambda: torch.device("cpu")
    node = types.SimpleNamespace(get_name=lambda: "weight", get_layout=lambda: layout)
    layout = types.SimpleNamespace(size=[299, 200], stride=[1, 304], offset=1)
    problem, view = types.SimpleNamespace(k=300), types.SimpleNamespace(buffer="weight")
    contest = types.SimpleNamespace(gemm=types.SimpleNamespace(b=view, problem=problem))
    workload_of_weight = Workload(contest)
    workload_of_weight.node, workload_of_weight.room = node, 1 << 20

    def rand_strided(size, stride, dtype, device):
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride))
        if elements > workload_of_weight.room:
            raise torch.OutOfMemoryError
        return torch.randn(elements, dtype=dtype).as_strided(size, stride)

    monkeypatch.setattr(workload, "rand_strided", rand_strided)
    graph = types.SimpleNamespace(get_buffer=lambda name: b)
    monkeypatch.setattr(workload, "V", types.SimpleNamespace(graph=graph))
    return workload_of_weight


EXTENT = 300 + 199 * 304


def test_b_lies_in_places_of_its_own_within_memory_for_two(weight):
    starts, ends = [], []
    for _ in weight.places():
        b = weight._buffer("weight")
        assert (b.shape, b.stride()) == ((300, 200), (1, 304)) and 0.03 < b.float().std() < 0.1
        assert b.untyped_storage().nbytes() == 2 * EXTENT * 2
        view = weight._view(weight.node)
        assert view.shape == (299, 200) and torch.equal(view, b[1:]) and view.data_ptr() == b[1:].data_ptr()
        starts.append(b.storage_offset() * 2)
        ends.append(starts[-1] + EXTENT * 2)
    assert len(set(starts)) == workload.PLACES and starts[0] == 0 and ends[-1] <= 2 * EXTENT * 2
    assert starts[-1] > EXTENT * 2 - workload.PLACES * 512 and not any(start % 512 for start in starts)


def test_a_kernel_is_loaded_once_for_all_places(weight, monkeypatch):
    loaded, launched = [], []
    monkeypatch.setattr(workload, "bind", lambda kernel: loaded.append(kernel) or (lambda b: launched.append(b)))
    view = types.SimpleNamespace(buffer="weight", size=(2, 3), strides=(1, 304), offset=7)
    kernel = object()
    entrant = types.SimpleNamespace(compiled=kernel, call=types.SimpleNamespace(arguments=lambda: [view]))
    make = weight._kernel(entrant)
    for _ in weight.places():
        make()()
        assert launched[-1].storage_offset() == weight._buffer("weight").storage_offset() + 7
    assert loaded == [kernel] and len(launched) == workload.PLACES


def test_without_room_for_another_place_there_is_one(weight):
    weight.room = EXTENT
    (_,) = weight.places()
    assert weight._buffer("weight").untyped_storage().nbytes() == EXTENT * 2
    weight.room = EXTENT - 1
    with pytest.raises(torch.OutOfMemoryError):
        next(weight.places())


def test_what_was_prepared_is_not_compiled_again(made_up, events):
    made_up.prepare([stock("mm")])
    assert [name for what, name in events if what == "compile"] == ["a", "b"]
    made_up.runs(made_up.prepare([stock("mm"), stock("bmm"), stock("mm", region="ab")]))
    assert [what for what in events if what[0] == "compile"] == [("compile", name) for name in "abc"]


def test_who_fails_is_out_and_the_others_go_on(made_up, events):
    refused = Refusal(Reason.COMPILE_ERROR, "no room")
    out = Contender(Alternative(Backend.NVGEMM, "quack", status=Status.FAILED, refusal=refused), None, None)
    found = made_up.runs(made_up.prepare([out, stock("mm", region="ab"), stock("bmm")]))
    assert found[0] is refused
    assert isinstance(found[1], Refusal) and "RuntimeError: no such instruction" in found[1].detail
    assert callable(found[2]) and ("run", "c") not in events


def test_nothing_keeps_a_workload_when_its_runs_are_gone(made_up):
    gc.disable()
    try:
        other = Workload(made_up.contest)
        runs, gone = other.runs(other.prepare([stock("mm")])), weakref.ref(other)
        other.release()
        del other, runs
        assert gone() is None
    finally:
        gc.enable()
