"""How the entrants of a contest become functions: what is compiled when, and who is out when something fails."""

from __future__ import annotations

import concurrent.futures
import gc
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
    """What happened, in order: ("compile", names), ("wait", names), ("run", names), ("gemm", choice), ("place", B)."""
    return []


@pytest.fixture
def made_up(events, monkeypatch, tmp_path):
    """A workload whose contest has the nodes a, b and c around a GEMM, each of which Inductor makes a kernel of: a
    before it, and after it b, or c where a region is fused; c does not compile. Inductor's pool of processes starts
    after a was asked for, and compiles it, if there is one at all: `made_up.pool.is_there`."""

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
        module.__file__ = tmp_path / names
        module.__file__.write_text(names)
        module.triton_ = types.SimpleNamespace(precompile=lambda: events.append(("load", names)))
        return None if names == "a" else types.SimpleNamespace(result=result), module

    nodes = {name: node(name) for name in "abc"}
    gemm = types.SimpleNamespace(scheduler=types.SimpleNamespace(compile_kernel=compile_kernel))
    contest = types.SimpleNamespace(
        node=gemm,
        nodes=nodes,
        separate=lambda region: ("a", "b" if region is None else "c"),
        gemm=types.SimpleNamespace(b=types.SimpleNamespace(buffer="weight")),
    )

    class Pool:
        is_there = True

        @classmethod
        def wait_pool_ready(cls, limit_s):
            events.append(("starts", "a"))
            if not cls.is_there:
                raise concurrent.futures.TimeoutError

        @classmethod
        def use_process_pool(cls):
            return cls.is_there

        def triton(self, name, source):
            events.append(("pool", source))
            return types.SimpleNamespace(result=lambda: events.append(("wait", source)))

    monkeypatch.setattr(workload, "AsyncCompile", Pool)
    monkeypatch.setattr(workload, "grouped", lambda group: group)
    monkeypatch.setattr(Workload, "_stock_gemm", lambda self, choice: lambda: events.append(("gemm", choice)))
    monkeypatch.setattr(Workload, "_adopt", lambda self, arguments, nodes: arguments)
    monkeypatch.setattr(Workload, "_buffer", lambda self, name: events.append(("place", name)))
    monkeypatch.setattr(Workload, "_fused_triton", lambda self, entrant: lambda: lambda: None)
    made_up = Workload(contest)
    made_up.pool = Pool
    return made_up


def stock(choice, region=None):
    return Contender(Alternative(Backend.ATEN, choice), region, choice)


@pytest.mark.parametrize("pool", [True, False])
def test_kernels_are_compiled_side_by_side_each_of_them_once(made_up, events, pool):
    made_up.pool.is_there = pool
    places = made_up.places([stock("mm"), stock("bmm")])
    first, second = next(places)
    assert [name for what, name in events if what == "compile"] == ["a", "b"]
    compiled = ["pool", "wait"] if pool else []
    assert [what for what, name in events if name == "a"] == ["compile", "starts", *compiled, "load"]
    assert [what for what, name in events if name == "b"] == ["compile", "wait", "load"]
    events.clear()
    first()
    second()
    ran = [("run", "a"), ("gemm", "mm"), ("run", "b"), ("run", "a"), ("gemm", "bmm"), ("run", "b")]
    assert events == ran
    events.clear()
    for run in next(places):
        run()
    assert events == [("place", "weight"), *ran] and list(places) == []


def test_without_room_for_another_place_there_is_one(made_up, monkeypatch):
    def no_room(self, name):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Workload, "_buffer", no_room)
    ((run,),) = made_up.places([stock("mm")])
    run()


def test_what_was_prepared_is_not_compiled_again(made_up, events):
    made_up.prepare([stock("mm")])
    assert [name for what, name in events if what == "compile"] == ["a", "b"]
    next(made_up.places([stock("mm"), stock("bmm"), stock("mm", region="ab")]))
    assert [what for what in events if what[0] == "compile"] == [("compile", name) for name in "abc"]


def test_who_fails_is_out_and_the_others_go_on(made_up, events):
    refused = Refusal(Reason.COMPILE_ERROR, "no room")
    out = Contender(Alternative(Backend.NVGEMM, "quack", status=Status.FAILED, refusal=refused), None, None)
    found = next(made_up.places([out, stock("mm", region="ab"), stock("bmm")]))
    assert found[0] is refused
    assert isinstance(found[1], Refusal) and "RuntimeError: no such instruction" in found[1].detail
    assert callable(found[2]) and ("run", "c") not in events


def test_nothing_keeps_a_workload_when_its_runs_are_gone(made_up):
    gc.disable()
    try:
        other = Workload(made_up.contest)
        places, gone = other.places([stock("mm")]), weakref.ref(other)
        runs = next(places)
        del other, runs, places
        assert gone() is None
    finally:
        gc.enable()
