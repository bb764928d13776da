"""The rule that picks an alternative, and the record that is kept of it."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from nvgemm_fusion.fusion import log
from nvgemm_fusion.fusion.decision import UNSTEADY, Alternative, Backend, Decision, Status, Timing, choose
from nvgemm_fusion.fusion.problem import Problem
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal


def aten(us, spread=0.1):
    return Alternative(Backend.ATEN, "mm", separate=("op1",), timing=Timing(us, spread))


def ours(us, spread=0.1, fused=("op1",)):
    return Alternative(Backend.NVGEMM, f"kernel {us}", fused=fused, epilogue="abc", timing=Timing(us, spread))


def failed(reason=Reason.COMPILE_ERROR):
    return Alternative(Backend.NVGEMM, "broken", epilogue="abc", status=Status.FAILED, refusal=Refusal(reason))


def test_the_fastest_wins():
    explained, chosen = choose([aten(10), ours(8), ours(9)])
    assert chosen == 1
    assert [None if a.refusal is None else a.refusal.reason for a in explained] == [Reason.SLOWER, None, Reason.SLOWER]


def test_a_tie_goes_to_stock():
    explained, chosen = choose([aten(10, spread=0.5), ours(9.6, spread=0.2)])
    assert chosen == 0
    assert explained[1].refusal.reason is Reason.NOT_SEPARATED


def test_force_takes_the_most_fused():
    assert choose([aten(10), ours(50, fused=("op1",)), ours(90, fused=("op1", "op2"))], force=True)[1] == 2
    assert choose([aten(10), failed()], force=True)[1] == 0


def test_without_a_time_of_stocks_stock_stays():
    broken = Alternative(Backend.ATEN, "mm", status=Status.FAILED, refusal=Refusal(Reason.RUN_ERROR))
    assert choose([broken, ours(10)])[1] is None
    assert choose([broken, ours(10)], force=True)[1] == 1
    fused = Alternative(Backend.TRITON, "triton_mm_1", fused=("op1",), timing=Timing(20.0))
    assert choose([broken, fused, ours(10)])[1] is None and choose([aten(30), fused, ours(10)])[1] == 2


def test_unsteady_times_decide_nothing():
    explained, chosen = choose([aten(100, spread=1), ours(50, spread=6)])
    assert chosen == 0 and "12%: is something else running" in explained[1].refusal.detail
    assert choose([aten(100, spread=1), ours(50, spread=4)])[1] == 1


def test_what_failed_is_out():
    assert choose([aten(10), failed()])[1] == 0
    assert choose([failed()])[1] is None
    assert choose([])[1] is None


@given(st.lists(st.tuples(st.booleans(), st.floats(1, 1000), st.floats(0, 0.1)), min_size=1, max_size=12))
def test_never_slower_than_the_best_by_more_than_the_spread(rows):
    alternatives = [(ours if own else aten)(us, us * part) for own, us, part in rows]
    assume(all(a.timing.spread / a.timing.us <= UNSTEADY for a in alternatives))  # a tenth of 41 is more, by a bit
    explained, chosen = choose(alternatives)
    if all(own for own, _, _ in rows):
        assert chosen is None
        return
    best = min(a.timing.us for a in alternatives)
    widest = max(a.timing.spread for a in alternatives)
    assert explained[chosen].timing.us <= best + widest
    assert explained[chosen].refusal is None
    assert all(a.refusal is not None for i, a in enumerate(explained) if i != chosen)


def test_timing_is_the_median_and_half_the_interquartile_range():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.us == 3.0 and timing.spread < 60
    assert Timing.of([5.0]) == Timing(5.0, 0.0)
    with pytest.raises(ValueError):
        Timing.of([])


def test_a_mean_is_known_as_well_as_its_timings_and_their_number_allow():
    assert Timing.mean([Timing(4.0, 0.25), Timing(6.0, 0.5)]) == Timing(5.0, pytest.approx(1.0))
    assert Timing.mean([Timing(5.0, 0.25), Timing(5.25, 0.5)]) == Timing(5.125, 0.375 / 2**0.5)
    assert Timing.mean([Timing(5.0, 0.25)]) == Timing(5.0, 0.25)
    of_four = Timing.mean([Timing(us) for us in (4.0, 6.0, 4.0, 6.0)])  # of more places, the mean is known better
    assert (of_four.us, of_four.spread) == pytest.approx((5.0, (1 / 3) ** 0.5))
    assert Timing.mean([Timing(5.0, 0.25)] * 4) == Timing(5.0, 0.125)
    with pytest.raises(ValueError):
        Timing.mean([])


def test_a_shared_gpu_stays_unsteady_however_many_windows_there_are():
    slow, fast = (Timing.mean([Timing(us, 0.12 * us)] * 8) for us in (100.0, 50.0))
    assert choose([aten(slow.us, slow.spread), ours(fast.us, fast.spread)])[1] == 0


def decision(alternatives=(), chosen=None, refusals=()):
    program, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
    problem = Problem(16, 32, 64, torch.bfloat16, Major.ROW, Major.COLUMN, "sm_90a")
    return Decision("graph0", "buf0", problem, (program,), tuple(alternatives), chosen, refusals)


def test_the_record_round_trips(tmp_path):
    explained, chosen = choose([aten(10), ours(8), failed()])
    path = tmp_path / "log.jsonl"
    log.write(decision(explained, chosen), str(path))
    log.write(decision(refusals=(Refusal(Reason.SYMBOLIC_SHAPE, "s0"),)), str(path))
    first, second = log.read(path)
    assert first["fused"] and first["speedup"] == 1.25
    assert first["us_chosen"] == 8 and first["us_best_unfused"] == 10
    assert first["alternatives"][2]["reason"] == "compile error"
    assert first["problem"] | {"target": None} == {
        "m": 16,
        "n": 32,
        "k": 64,
        "dtype": "bfloat16",
        "a_major": "row",
        "b_major": "column",
        "accumulator": "float32",
        "target": None,
    }
    assert second["chosen"] is None and second["refusals"] == [{"reason": "symbolic shape", "detail": "s0"}]


def test_a_half_written_line_is_skipped(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    log.write(decision(), str(path))
    whole = path.read_text()
    path.write_text(whole + '{"schema": 99}\n[1]\n' + whole + whole[:30])
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        assert len(list(log.read(path))) == 2
    assert len(caplog.records) == 1 and "skipped 3 lines" in caplog.text and "line 2: schema 99" in caplog.text


def test_an_unwritable_log_costs_one_warning(tmp_path, caplog):
    path = str(tmp_path / "no such folder" / "log.jsonl")
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        log.write(decision(), path)
        log.write(decision(), path)
    assert len(caplog.records) == 1 and "cannot write" in caplog.text


def test_several_writers_do_not_mix_lines(tmp_path):
    import threading

    path = tmp_path / "log.jsonl"
    explained, chosen = choose([aten(10), *(ours(8 + i) for i in range(50))])
    threads = [
        threading.Thread(target=lambda: [log.write(decision(explained, chosen), str(path)) for _ in range(20)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 160


def test_every_reason_says_something_to_a_person():
    for reason in Reason:
        assert reason.sentence and reason.value == reason.value.lower()
        assert math.isclose(len(str(Refusal(reason))), len(f"{reason.value}: {reason.sentence}"))
