"""What the benchmarks compute around their measurements, and what is claimed of the results on file."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from nvgemm_fusion.bench import (
    candidates,
    compile_time,
    conditions,
    e2e,
    fit,
    gpus,
    launch,
    operations_page,
    plots,
    side_by_side,
    suite,
)
from nvgemm_fusion.bench.layers import LAYERS, M_SIZES, Gemm, program
from nvgemm_fusion.fusion.decision import Timing
from nvgemm_fusion.fusion.program import OperandKind
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.fusion.reference import evaluate
from nvgemm_fusion.lowering.candidates import _rated
from nvgemm_fusion.lowering.occupancy import HOPPER
from nvgemm_fusion.lowering.spaces import SPACES


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.model} {layer.name}")
def test_the_epilogue_of_a_layer_is_what_the_layer_computes(layer):
    m, n, k = 6, 8, 16
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(s, k, dtype=torch.float64, generator=generator) for s in (m, *[n] * layer.weights))
    epilogue = program(layer.epilogue)
    sizes = {OperandKind.TILE: (m, n), OperandKind.ROW: (n,)}
    operands = [torch.randn(sizes[o.kind], dtype=torch.float64, generator=generator) for o in epilogue.operands]
    if layer.weights == 2:  # the tile is the product of the other GEMM
        operands = [x @ weights[1].t()]
    expected = layer.function(x, *weights, *(operands if layer.weights == 1 else ()))
    torch.testing.assert_close(evaluate(epilogue, x @ weights[0].t(), operands)[0], expected)
    assert layer.gemms[-1] == Gemm(layer.n, layer.k, layer.epilogue) and len(layer.gemms) == layer.weights


def row(us, again, **changes):
    return {"model": "a", "layer": "b", "m": 1, "us": us, "again": again, "error_ratio": 1.0, **changes}


def test_regret_is_against_alternatives_and_peers():
    chosen = {"backend": "NVGEMM", "candidate": "x", "fused": 1, "epilogue": True}
    times = {("NVGEMM", "x", 1): 10.0, ("NVGEMM", "y", 1): 9.5, ("ATEN", "mm", 0): 12.0}
    us = {"ours": 10.0, "eager": 11.0, "ATEN,TRITON": 12.0}
    found = suite.with_regret(row(us, [times]), [chosen])
    assert found["regret"] == pytest.approx(10 / 9.5, abs=1e-4) and found["best_peer"] == "eager"
    assert (found["speedup_best_peer"], found["speedup_stock"]) == (1.1, 1.2)
    again = {"us_again": 10.0, "fastest_again": "NVGEMM y", "us_fastest_again": 9.5}
    others = {"NVGEMM x + 1": 10.0, "NVGEMM y + 1": 9.5, "ATEN mm": 12.0}
    assert found["choice"] == [{**chosen, **again, "alternatives_again": others}]
    peer_wins = suite.with_regret(row({**us, "eager": 9.0}, [times]), [chosen])
    assert peer_wins["regret"] == pytest.approx(10 / 9, abs=1e-4)
    # A Triton template goes by another number in another process: the fastest of its kind stands for it.
    template = {"backend": "TRITON", "candidate": "triton_mm_3", "fused": 1, "epilogue": False}
    again = {("TRITON", "triton_mm_7", 1): 10.0, ("TRITON", "triton_mm_8", 1): 11.0, ("TRITON", "triton_mm_7", 0): 8.0}
    assert suite.with_regret(row(us, [again]), [template])["regret"] == 1.25
    # Pruned when the contest was held again: it takes what it took, where all others take a tenth longer.
    pruned = {**template, "us": 9.9, "alternatives": {"TRITON triton_mm_3 + 1": [9.9, 0.1], "ATEN mm": [10.0, 0.1]}}
    (choice,) = suite.with_regret(row(us, [{("ATEN", "mm", 0): 11.0, ("NVGEMM", "x", 0): 9.0}]), [pruned])["choice"]
    assert choice["us_again"] == pytest.approx(1.1 * 9.9) and choice["us_fastest_again"] == 9.0
    left_alone = {"backend": "", "candidate": "", "us": None, "fused": 0, "epilogue": False, "alternatives": {}}
    assert suite.with_regret(row(us, [{("ATEN", "mm", 0): 11.0}]), [left_alone])["choice"][0]["us_again"] == 11.0
    assert suite.with_regret(row(us, []), [])["regret"] == 1.0
    both = suite.summary([found, peer_wins])
    assert both["rows"] == both["rows_fused"] == 2 and both["worst_regret"] == peer_wins["regret"]
    assert both["speedup_best_peer"] == pytest.approx(math.sqrt(1.1 * 0.9), abs=1e-4)


def test_the_suite_on_file_is_what_its_summary_says(tmp_path):
    results = json.loads(suite.RESULTS.read_text(encoding="utf-8"))
    assert results["about"]["summary"] == suite.summary(results["rows"])
    assert {(layer.model, layer.name) for layer in LAYERS} == {(r["model"], r["layer"]) for r in results["rows"]}
    assert {r["m"] for r in results["rows"]} <= set(M_SIZES) == set(suite.M_ORDER)
    copy = tmp_path / "suite.json"
    copy.write_text(json.dumps(results))
    plots.main([str(copy)])
    assert {path.name for path in tmp_path.glob("*.png")} == {"suite-speedup.png", "suite-roofline.png"}


def test_a_quick_suite_has_every_epilogue_of_the_smallest_model_that_has_it():
    names = {(layer.model, layer.name) for layer in suite.QUICK_LAYERS}
    assert names == {("GPT-2 XL", "up"), *(("Llama 3.1 8B", name) for name in ("qkv", "o", "gate_up"))}


def test_the_best_five_candidates_are_near_the_best_of_all():
    records = json.loads(candidates.RESULTS.read_text(encoding="utf-8"))["records"]
    assert len(records) == len(candidates.tasks()) >= 60
    shortfalls = [candidates.shortfall(record) for record in records]
    assert math.exp(sum(map(math.log, shortfalls)) / len(shortfalls)) < 1.008 and max(shortfalls) < 1.05
    every = candidates.every_candidate(Gemm(4096, 4096, "none").problem(4096), "none")
    assert {candidate.tile_m for candidate in every} == set(SPACES["sm_90a"].tiles_m)


def test_the_vendors_recommendations_are_as_far_behind_as_the_readme_says():
    behind = []
    for record in json.loads(candidates.RESULTS.read_text(encoding="utf-8"))["records"]:
        problem, space, epilogue = candidates.problem_of(record), SPACES["sm_90a"], program(record["epilogue"])
        first_five = itertools.islice(_rated(problem, candidates.TARGET, space, epilogue), 5)
        times = [record["us"][str(candidate)] for candidate in first_five]
        behind += [min(times) / min(record["us"].values())] if times else []
    assert len(behind) == 77 and math.exp(sum(map(math.log, behind)) / len(behind)) == pytest.approx(1.23, abs=0.005)


def test_no_operation_on_file_is_wrong():
    results = json.loads(operations_page.RESULTS.read_text(encoding="utf-8"))
    assert not [name for name, of in results["ops"].items() if any(r["beyond"] or r["mismatches"] for r in of.values())]


def test_a_launch_on_file_costs_no_more_than_inductors():
    assert json.loads(launch.RESULTS.read_text(encoding="utf-8"))["ratio"] <= 1.0


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    found = list(gpus.over_gpus(os.getenv, ["CUDA_VISIBLE_DEVICES"] * 6))
    assert len(found) == 6 and set(found) <= {"5", "7"}
    # Two processes, each of which may have more than one item or none.
    allowed = os.sched_getaffinity(0)
    parts = {frozenset(cores) for cores in gpus.over_gpus(os.sched_getaffinity, [0] * 6)}
    assert set.union(*map(set, parts)) <= allowed and all(len(part) <= max(1, len(allowed) // 2) for part in parts)


@pytest.mark.parametrize("first", [0.0, "no number"])
def test_a_run_that_is_given_up_or_fails_does_not_go_on(first, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    started = time.monotonic()
    done = gpus.over_gpus(time.sleep, [first, *[0.5] * 400])
    with contextlib.nullcontext() if first == 0.0 else pytest.raises(TypeError):
        next(done)
    done.close()
    assert time.monotonic() - started < 100


def test_the_suite_comes_to_its_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from nvgemm_fusion.bench import gpus, suite\n"
        "def processes(item):\n"
        "    return os.getpid(), suite._other_process().submit(os.getpid).result()\n"
        "if __name__ == '__main__':\n"
        "    torch.cuda.device_count = lambda: 1\n"
        "    print(*{number for both in gpus.over_gpus(processes, [1, 2]) for number in both})\n"
    )
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert len(run.stdout.split()) == 2, run.stderr


def test_the_constants_are_where_the_fit_leaves_them():
    measured = fit.cases()
    least = fit.loss(HOPPER, measured)
    assert fit.loss(replace(HOPPER, reread=0.0), measured) > least < fit.loss(replace(HOPPER, hidden=0.0), measured)
    few = measured[::8]
    found = fit.fit(HOPPER, few, 6, random.Random(0))
    assert fit.loss(found, few) <= fit.loss(HOPPER, few)
    assert all(0.0 < getattr(found, name) <= largest for name, largest in fit.FITTED.items())


def test_compile_times_are_taken_in_turn_and_compared_by_their_medians(monkeypatch, tmp_path):
    turns = []

    def in_a_process(graph, setting, state, folder, bytecode):
        assert os.path.isdir(folder) and os.path.isdir(bytecode)
        turns.append((setting, state))
        late = 100.0 if turns.count((setting, state)) == 1 else 0.0  # the first time of each, which a median ignores
        seconds = {"cold": 10.0, "warm": 2.0, "changed": 4.0}[state] * {"off": 1.0, "on": 1.25}[setting] + late
        return {"seconds": seconds, "parts": {"backend_compile": seconds / 2}}

    monkeypatch.setattr(compile_time, "_in_a_process", in_a_process)
    row = compile_time.measure(("graph", 3, str(tmp_path)))
    assert [setting for setting, state in turns if state == "cold"] == ["on", "off", "off", "on", "on", "off"]
    assert turns[2:6] == [("off", "warm"), ("on", "warm"), ("on", "warm"), ("off", "warm")]
    assert row["graph"] == "graph" and all(row[state]["ratio"] == 1.25 for state in compile_time.STATES)
    assert (row["warm"]["off"], row["warm"]["on"], len(row["warm"]["seconds"]["on"])) == (2.0, 2.5, 15)
    assert row["warm"]["parts"] == {"off": {"backend_compile": 1.0}, "on": {"backend_compile": 1.25}}


def test_a_graph_that_cannot_be_measured_costs_no_other(monkeypatch, tmp_path, capsys):
    def in_a_process(graph, setting, state, folder, bytecode):
        if (graph, setting, state) == (compile_time.GRAPHS[2], "off", "warm"):
            raise subprocess.CalledProcessError(1, "python")
        return {"seconds": 1.0, "parts": {}}

    monkeypatch.setattr(compile_time, "_in_a_process", in_a_process)
    monkeypatch.setattr(compile_time, "over_gpus", lambda function, items: map(function, items))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(SystemExit, match="1"):
        compile_time.main([str(tmp_path / "times.json"), "--rounds", "1"])
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert [row["graph"] for row in rows] == list(compile_time.GRAPHS[:2])
    assert f"{compile_time.GRAPHS[2]}: warm with the flag off failed" in capsys.readouterr().out


def test_the_tensors_of_a_layer_lie_in_several_places(monkeypatch):
    class MadeUp:
        def __init__(self, rounds, budget_ms):
            assert rounds == side_by_side.ROUNDS

        def time(self, runs):
            return [Timing(runs[0]()), *(Refusal(Reason.RUN_ERROR) for _ in runs[1:])]

    monkeypatch.setattr(side_by_side, "Stopwatch", MadeUp)
    places, inputs = [], (torch.ones(2, 3).t(), torch.ones(4))

    def form(*tensors):
        assert [t.stride() for t in tensors] == [t.stride() for t in inputs]
        places.append({t.data_ptr() for t in tensors})
        return float(len(places))

    times = side_by_side.timed({"form": form, "broken": form}, inputs)
    assert list(times) == ["form"]
    count = side_by_side.PLACES
    assert times["form"].us == pytest.approx(math.factorial(count) ** (1 / count))  # of 1 to the last, at one pace
    assert len(set.union(*places)) == 2 * len(places) == 2 * side_by_side.PLACES
    places.clear()
    monkeypatch.setattr(side_by_side, "BUDGET_MS", 0)
    side_by_side.timed({"form": form}, inputs)
    assert len(places) == side_by_side.FEWEST_PLACES


def test_b_lies_in_places_of_each_kind(monkeypatch):
    gemm, memory = Gemm(512, 256, "none"), []

    def random_b(gemm, elements):
        memory.append(torch.empty(elements))
        return memory[-1]

    monkeypatch.setattr(conditions, "random_b", random_b)
    monkeypatch.setattr(conditions, "_memory_with_holes", lambda: memory.append("holes"))

    def starts_of(found):
        assert len({b.data_ptr() for b in found}) == len(found) == conditions.PLACES
        assert all(b.shape == (256, 512) and b.stride() == (1, 256) for b in found)
        return [b.storage_offset() * b.itemsize for b in found]

    assert not any(starts_of(list(conditions.copies(gemm)))) and len(memory) == conditions.PLACES
    memory.clear()
    assert not any(starts_of(list(conditions.scattered_copies(gemm)))) and memory[0] == "holes"  # and then the copies
    for alignment in (512, 4096):
        memory.clear()
        starts = starts_of(list(conditions.overlapping(gemm, alignment)))
        assert len(memory) == 1 and len(memory[0]) == 2 * 256 * 512 and not any(start % alignment for start in starts)
        assert 0 <= 256 * 512 * 4 - starts[-1] < (conditions.PLACES - 1) * alignment


def test_a_row_has_every_kernel_that_runs_under_each_condition(monkeypatch):
    class MadeUp:
        def __init__(self, rounds, budget_ms):
            pass

        def time(self, runs, rest):
            return [run if isinstance(run, Refusal) else Timing(run() + rest) for run in runs]

    broken = Refusal(Reason.COMPILE_ERROR)
    monkeypatch.setattr(conditions, "Stopwatch", MadeUp)
    monkeypatch.setattr(conditions, "_ranked", lambda task: ["broken", "fine"])
    monkeypatch.setattr(conditions, "kernels", lambda task, found: [lambda b: 2.0 * b, broken, lambda b: 3.0 * b])
    places = range(conditions.PLACES)
    two = {"busy": (lambda gemm: iter(places), 0.0), "rested": (lambda gemm: iter(places), 0.5)}
    monkeypatch.setattr(conditions, "CONDITIONS", two)
    row = conditions.measure((Gemm(512, 256, "none"), 16))
    assert row["us"] == {
        name: [[factor * b + rest for b in places] for rest in (0.0, 0.5)]
        for name, factor in (("torch.mm", 2.0), ("fine", 3.0))
    }
    assert (row["m"], row["n"], row["k"]) == (16, 512, 256)


def test_what_end_to_end_says_of_a_choice():
    def alternative(backend, us):
        return {"backend": backend, "candidate": backend.lower(), "us": us}

    alternatives = [alternative("ATEN", 12.0), alternative("TRITON", None), alternative("NVGEMM", 10.0)]
    record = {"gemm": "buf2", "problem": {"m": 1, "n": 2, "k": 3}, "alternatives": alternatives, "fused": True}
    assert e2e._chosen({**record, "chosen": 2}) == "1x2x3: NVGEMM nvgemm fused, 10.0 us, the best of torch's 12.0"
    assert e2e._chosen({**record, "chosen": None}) == "buf2: stock"
