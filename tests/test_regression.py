"""The regression gate: what it records, what closes it, and what it does with files that are wrong."""

from __future__ import annotations

import json
import re
import textwrap
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from nvgemm_fusion.bench import baseline as baselines
from nvgemm_fusion.bench import regression, regression_report
from nvgemm_fusion.bench.baseline import Baseline, GemmDecision, Ratio, WhyNot
from nvgemm_fusion.bench.regress_command import app
from nvgemm_fusion.bench.regression import Kind
from nvgemm_fusion.bench.regression_run import SuiteRun
from nvgemm_fusion.fusion import log
from typer.testing import CliRunner

HEADER = """
import torch
import torch.nn.functional as F
X, W, B, T = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (128, 32), (128,), (64, 128)))
def graphs():
"""
SILU_MUL = "yield 'silu_mul', lambda x, w, t: F.silu(F.linear(x, w)) * t, (X, W, T)"
GATED = "yield 'gated', lambda x, w, t: torch.sigmoid(F.linear(x, w)) * t, (X, W, T)"
RELU = "yield 'relu', lambda x, w: F.relu(F.linear(x, w)), (X, W)"


@pytest.fixture
def write_suite(tmp_path):
    """A function that writes a suite of these lines and gives its path."""

    def write(*lines):
        path = tmp_path / "suite.py"
        path.write_text(HEADER + textwrap.indent("\n".join(lines), "    "))
        return path

    return write


@pytest.fixture
def baseline(tmp_path):
    return tmp_path / "baseline.json"


@pytest.fixture
def recorded(instant_kernels, write_suite, baseline):
    """A suite of one graph with one fused GEMM, and its baseline."""
    path = write_suite(SILU_MUL)
    assert not regression.record(baseline, path).faults
    return path


@pytest.fixture
def gated(instant_kernels, write_suite, baseline):
    """The same with a sigmoid, which is an op of its own in every torch, as a silu is not."""
    path = write_suite(GATED)
    assert not regression.record(baseline, path).faults
    return path


def messages(report, kind=Kind.FAILURE):
    return [f"{case.graph} {case.gemm}: {finding.message}" for case, finding in report.of_kind(kind)]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# What is recorded


@pytest.mark.usefixtures("instant_kernels")
def test_our_suite_has_every_kind_of_graph_and_all_results_are_right(baseline):
    result = regression.record(baseline)
    assert not result.faults
    graphs = result.decisions.graphs
    assert {name.split()[-1] for name in graphs} == {"bf16", "f16"} and len(graphs) == 18
    assert {gemm.problem.dtype for gemms in graphs.values() for gemm in gemms} == {"bfloat16", "float16"}
    fused = {name for name, gemms in graphs.items() if any(gemm.fused for gemm in gemms)}
    assert {"bias_relu bf16", "bias_gelu f16", "silu_mul bf16", "residual batched bf16", "mlp f16"} <= fused
    assert len(graphs["chain bf16"][0].region.program) > 20
    (needed,) = graphs["product_needed bf16"]
    assert needed.fused and sum(line.startswith("store ") for line in needed.region.program) == 2
    (normed,) = graphs["normed_residual f16"]
    assert normed.region.operators[-1] == "add", "timed with the norm that reads it"
    not_compared = graphs.keys() - result.compared
    assert {name.split()[0] for name in not_compared} == {"normed_residual"}, "Triton is not run"
    assert regression.read(baseline) == result.decisions


def test_a_baseline_says_all_that_is_compared(recorded, baseline):
    data = json.loads(baseline.read_text())
    assert data["schema"] == 1 and data["times"] == "modelled" and data["target"] == "H200"
    assert data["versions"]["torch"] == torch.__version__ and "quack-kernels" in data["versions"]
    (gemm,) = data["graphs"]["silu_mul"]
    assert (gemm["problem"]["m"], gemm["problem"]["n"], gemm["problem"]["k"]) == (64, 128, 32)
    assert gemm["region"]["operators"] == ["silu", "mul"] and gemm["region"]["program"][-1].startswith("store")
    assert gemm["fused"] and gemm["fused_operators"] == ["silu", "mul"] and gemm["ratio"] is None
    assert len(baseline.read_text().splitlines()) > 30, "a person can read it"


def test_nothing_is_recorded_when_a_result_is_wrong(instant_kernels, write_suite, baseline, monkeypatch):
    plant_wrong_sigmoid(monkeypatch)
    result = run("record", "-o", baseline, "--suite", write_suite(GATED))
    assert result.exit_code == 1 and "FAILED: gated" in result.output and not baseline.exists()


# What keeps the gate open


def test_the_same_again_is_no_failure(recorded, baseline):
    result = run("check", baseline, "--suite", recorded)
    assert result.exit_code == 0, result.output
    assert "1 graph, 1 GEMM (1 fused): 0 failures" in result.output and "modelled" in result.output
    assert "compiling" not in result.output, "no bar where there is no terminal"


def test_the_log_of_a_check_names_the_graphs(recorded, baseline, tmp_path):
    regression.check(baseline, recorded)
    (record,) = log.read(tmp_path / "baseline.check.jsonl")
    assert record["graph"] == "silu_mul" and record["fused"]
    regression.check(baseline, recorded, tmp_path / "other.jsonl")
    assert len(list(log.read(tmp_path / "other.jsonl"))) == 1


@pytest.mark.usefixtures("instant_kernels")
def test_a_new_fusion_is_reported_and_no_failure(write_suite, baseline):
    regression.record(baseline, write_suite("yield 'g', lambda x, w: torch.lgamma(F.linear(x, w)), (X, W)"))
    report = regression.check(baseline, write_suite("yield 'g', lambda x, w: torch.relu(F.linear(x, w)), (X, W)"))
    assert not report.failed
    assert [message.split(": ", 1)[1][:20] for message in messages(report, Kind.IMPROVEMENT)] == [
        "the region grew by r",
        "fused now (modelled)",
    ]


def test_a_new_graph_is_reported_and_a_missing_one_is_a_failure(recorded, baseline, write_suite):
    report = regression.check(baseline, write_suite(SILU_MUL, RELU))
    assert not report.failed and any("new graph" in message for message in messages(report, Kind.NOTE))
    report = regression.check(baseline, write_suite(RELU))
    assert messages(report) == ["silu_mul : the graph is missing from the suite"]


# What closes it


def test_a_shorter_region_is_a_failure_that_says_what_was_lost(recorded, baseline, write_suite):
    shorter = write_suite("yield 'silu_mul', lambda x, w, t: F.silu(F.linear(x, w)), (X, W, T)")
    report = regression.check(baseline, shorter)
    (message,) = messages(report)
    assert message.startswith("silu_mul GEMM 1 (64 x 128 x 32): the region lost mul")
    assert "nothing is fused" not in message


def test_an_operation_that_left_the_table_is_a_failure(gated, baseline, monkeypatch):
    from nvgemm_fusion.fusion.ops import OPS

    monkeypatch.delitem(OPS, "sigmoid")
    (message,) = messages(regression.check(baseline, gated))
    assert "the region lost sigmoid, mul, and nothing is fused any more" in message
    assert "unsupported op" in message and "sigmoid" in message


def plant_wrong_sigmoid(monkeypatch):
    from nvgemm_fusion.lowering.emit import EXPRESSIONS

    right = EXPRESSIONS["sigmoid"]
    monkeypatch.setitem(EXPRESSIONS, "sigmoid", f"({right}) * Float32(1.001)")


def test_a_wrongly_emitted_operation_is_a_failure(gated, baseline, monkeypatch):
    plant_wrong_sigmoid(monkeypatch)
    found = messages(regression.check(baseline, gated))
    wrong = re.compile(r"the emitted epilogue \w{16} \(.*sigmoid.*\) is wrong")
    assert found and all(map(wrong.search, found))


@pytest.mark.usefixtures("instant_kernels")
def stub_stopwatch(monkeypatch, us_fused, us_others, spread=0.2):
    """Every alternative "takes" what is said here, as if a GPU had been there to time it."""
    from dataclasses import replace

    from nvgemm_fusion.fusion.decision import Backend, Status, Timing
    from nvgemm_fusion.scheduler_hooks import alternatives

    def timed(contest, entrant):
        fused = entrant.alternative.backend is Backend.NVGEMM and entrant.region is not None
        timing = Timing(us_fused if fused else us_others, spread)
        return replace(entrant, alternative=replace(entrant.alternative, timing=timing, status=Status.MEASURED))

    monkeypatch.setattr(alternatives, "_with_modelled_time", timed)


def test_a_slower_choice_is_a_failure(gated, baseline, monkeypatch):
    stub_stopwatch(monkeypatch, us_fused=80.0, us_others=100.0)
    regression.record(baseline, gated)
    assert json.loads(baseline.read_text())["graphs"]["gated"][0]["ratio"]["value"] == 0.8
    for slower_clock in (1.0, 1.3):  # both times of a ratio come from one run, so a slower machine is no failure
        stub_stopwatch(monkeypatch, us_fused=81.0 * slower_clock, us_others=100.0 * slower_clock)
        assert not regression.check(baseline, gated).failed
    stub_stopwatch(monkeypatch, us_fused=90.0, us_others=100.0)
    (message,) = messages(regression.check(baseline, gated))
    assert "slower: the chosen kernel takes 0.900 of the best unfused one's time, 0.800 in the baseline" in message
    stub_stopwatch(monkeypatch, us_fused=110.0, us_others=100.0)
    found = messages(regression.check(baseline, gated))
    assert any("not fused any more" in message for message in found) and any("slower: " in message for message in found)


def test_a_kernel_that_gets_the_wrong_tensor_is_a_failure(write_suite, baseline, monkeypatch):
    """With M == N nothing but the numbers tells a row from a column."""
    from nvgemm_fusion.scheduler_hooks.kernel_call import KernelCall

    path = write_suite(
        "X, W, C, R = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (64, 32), (64, 1), (64,)))",
        "yield 'scaled', lambda x, w, c, r: F.linear(x, w) * c - r, (X, W, C, R)",
    )
    assert regression.record(baseline, path).compared == {"scaled"}
    right = KernelCall.arguments

    def swapped(call):
        a, b, column, row, output = right(call)
        return [a, b, row, column, output]

    monkeypatch.setattr(KernelCall, "arguments", swapped)
    (message,) = messages(regression.check(baseline, path))
    assert message.startswith("scaled : the result is wrong: relative error")


def test_a_graph_that_does_not_compile_any_more_is_a_failure(recorded, baseline, monkeypatch):
    from nvgemm_fusion.bench import regression_run

    def broken(*_):
        raise RuntimeError("planted\nwith more lines")

    monkeypatch.setattr(regression_run, "virtual_device", broken)
    found = messages(regression.check(baseline, recorded))
    assert found[0] == "silu_mul : it fails when compiled: RuntimeError: planted with more lines"
    assert "not decided any more" in found[1]


def test_another_reason_is_a_failure(instant_kernels, write_suite, baseline):
    regression.record(baseline, write_suite("yield 'g', lambda x, w: torch.lgamma(F.linear(x, w)), (X, W)"))
    report = regression.check(baseline, write_suite("yield 'g', lambda x, w: F.linear(x, w).sum(0), (X, W)"))
    (message,) = messages(report)
    assert "not fused for another reason: it was unsupported op" in message and "it is" in message


# The comparison by itself: decisions as a GPU would have measured them


def decision(**changes):
    measured = GemmDecision(
        problem=baselines.Problem(256, 512, 128, "bfloat16", "row", "column", "float32", "sm_90a"),
        region=baselines.Region(("silu", "mul"), "0123456789abcdef", ("o0: tile bfloat16", "v0 = sigmoid(acc)")),
        fused=True,
        fused_operators=("silu", "mul"),
        reasons=(),
        ratio=Ratio(0.80, 0.005),
    )
    return msgspec.structs.replace(measured, **changes)


def state(*gemms, times="measured", target="H200", torch="2.13.0"):
    return Baseline(1, {"torch": torch}, target, times, {"g": gemms})


def findings(before, now):
    cases = regression.compare(before, SuiteRun(now, {}, frozenset()))
    return [(finding.kind.value, finding.message) for case in cases for finding in case.findings]


UNFUSED = {"fused": False, "fused_operators": (), "reasons": (WhyNot("slower", "1.05 of the chosen one's time"),)}


@pytest.mark.parametrize(
    ("spread", "ratio", "expected"),
    [
        (0.001, 0.815, None),
        (0.001, 0.825, "failure"),
        (0.010, 0.825, None),
        (0.010, 0.835, "failure"),
        (0.001, 0.775, "improvement"),
        (0.010, 0.775, None),
    ],
)
def test_the_spread_of_the_baseline_says_what_is_slower(spread, ratio, expected):
    before, now = state(decision(ratio=Ratio(0.8, spread))), state(decision(ratio=Ratio(ratio, 0.2)))
    found = findings(before, now)
    assert [kind for kind, _ in found] == ([expected] if expected else [])
    if expected == "failure":
        tolerance = max(0.02, 3 * spread)
        assert found[0][1] == (
            f"slower: the chosen kernel takes {ratio:.3f} of the best unfused one's time, 0.800 in the baseline "
            f"(tolerance {tolerance:.3f})"
        )


def test_a_tie_that_went_the_other_way_is_no_failure_and_a_lost_lead_is():
    tie = findings(state(decision(ratio=Ratio(0.99, 0.002))), state(decision(ratio=Ratio(1.0, 0.0), **UNFUSED)))
    assert [kind for kind, _ in tie] == ["note"] and "not fused any more" in tie[0][1]
    lost = findings(state(decision(ratio=Ratio(0.80, 0.002))), state(decision(ratio=Ratio(1.0, 0.0), **UNFUSED)))
    assert [kind for kind, _ in lost] == ["failure", "failure"]
    assert "slower: 1.05 of the chosen one's time" in lost[0][1] and lost[1][1].startswith("slower: ")
    no_kernel = {**UNFUSED, "reasons": (WhyNot("compile error", "planted"),), "ratio": Ratio(0.99, 0.0)}
    assert findings(state(decision(ratio=Ratio(0.99, 0.002))), state(decision(**no_kernel)))[0][0] == "failure"


def test_which_time_reason_it_is_is_noise():
    close = {**UNFUSED, "reasons": (WhyNot("not separated", "0.99 of the chosen one's time"),)}
    assert findings(state(decision(**UNFUSED)), state(decision(**close))) == []
    other = {**UNFUSED, "reasons": (WhyNot("mutation", "op1"),)}
    assert findings(state(decision(**UNFUSED)), state(decision(**other)))[0][0] == "failure"


def test_a_kernel_that_computes_less_is_a_failure():
    (kind, message), *_ = findings(
        state(decision(ratio=None), times="modelled"),
        state(decision(ratio=None, fused_operators=("silu",)), times="modelled"),
    )
    assert (kind, message) == ("failure", "the chosen kernel (modelled) does not compute mul any more")


def test_another_program_is_a_failure_unless_torch_is_another_one():
    other = decision(region=baselines.Region(("silu", "mul"), "f" * 16, ("o0: tile bfloat16", "v0 = tanh(acc)")))
    ((kind, message),) = findings(state(decision()), state(other))
    assert kind == "failure" and "`v0 = sigmoid(acc)` became `v0 = tanh(acc)`" in message
    ((kind, _),) = findings(state(decision()), state(other, torch="2.15.0+cu130"))
    assert kind == "note"


@pytest.mark.parametrize("now", [{"times": "modelled"}, {"target": "H100"}])
def test_what_cannot_be_compared_is_skipped_and_said(now):
    changed = decision(ratio=Ratio(1.5, 0.0), **UNFUSED)
    before, after = state(decision()), state(changed, **now)
    assert findings(before, after) == []
    assert any("are not compared" in note for note in regression._notes(before, after))
    shorter = decision(region=baselines.Region(("silu",), "f" * 16, ()))
    ((kind, message),) = findings(before, state(shorter, **now))
    assert kind == "failure" and message.startswith("the region lost mul"), "a region needs no GPU"


def test_gemms_are_matched_by_problem_and_what_is_left_with_what_is_left():
    small = baselines.Problem(16, 512, 128, "bfloat16", "row", "column", "float32", "sm_90a")
    wide = baselines.Problem(256, 1024, 128, "bfloat16", "row", "column", "float32", "sm_90a")
    before = state(decision(), decision(problem=small))
    assert findings(before, state(decision(problem=small), decision())) == [], "the order may change"
    ((kind, message),) = findings(before, state(decision(), decision(problem=wide)))
    assert kind == "failure" and "the problem was 16 x 512 x 128" in message and "is 256 x 1024 x 128" in message
    ((kind, message),) = findings(before, state(decision(problem=small)))
    assert kind == "failure" and "not decided any more" in message
    ((kind, message),) = findings(before, state(decision(), decision(problem=small), decision(problem=wide)))
    assert kind == "note" and "new GEMM" in message


def test_a_measured_record_gives_a_ratio_with_its_spread(recorded, baseline, tmp_path):
    regression.check(baseline, recorded)
    (record,) = log.read(tmp_path / "baseline.check.jsonl")
    for alternative in record["alternatives"]:
        alternative.update(status="measured", us=100.0, spread=2.0)
    record["alternatives"][record["chosen"]].update(us=80.0, spread=0.8)
    before = GemmDecision.of(record)
    assert before.ratio == Ratio(0.8, pytest.approx(0.8 * (0.01**2 + 0.02**2) ** 0.5, abs=1e-4))
    record["alternatives"][record["chosen"]].update(us=95.0)
    assert findings(state(before), state(GemmDecision.of(record)))[0][1].startswith("slower: ")


# Reports


@pytest.fixture
def failing(recorded, baseline, write_suite, tmp_path):
    """A check with a failure, an improvement and a note, of names that mean something in XML and Markdown."""
    data = json.loads(baseline.read_text())
    data["graphs"]["<a> | `b` & c"] = data["graphs"]["silu_mul"]
    data["graphs"]["silu_mul"][0].update(fused=False, fused_operators=[])
    baseline.write_text(json.dumps(data))
    return run(
        *("check", baseline, "--suite", write_suite(SILU_MUL, RELU), "--json"),
        *("--junit", tmp_path / "out.xml", "--markdown", tmp_path / "out.md"),
    )


def test_json_has_every_finding_and_the_number_of_its_decision(failing, tmp_path):
    report = json.loads(failing.stdout)
    assert failing.exit_code == 1 and report["failed"] and report["times"] == "modelled"
    found = {(case["graph"], finding["kind"]) for case in report["cases"] for finding in case["findings"]}
    assert found == {("<a> | `b` & c", "failure"), ("silu_mul", "improvement"), ("relu", "note")}
    (gemm,) = [case for case in report["cases"] if case["graph"] == "silu_mul" and case["gemm"]]
    assert list(log.read(report["log"]))[gemm["decision"] - 1]["graph"] == "silu_mul"


def test_junit_has_a_case_for_each_graph_and_gemm(failing, tmp_path):
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    cases = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    assert set(cases) == {
        ("silu_mul", "graph"),
        ("silu_mul", "GEMM 1 (64 x 128 x 32)"),
        ("<a> | `b` & c", "graph"),
        ("relu", "graph"),
    }
    (failed,) = [key for key, case in cases.items() if case.find("failure") is not None]
    assert failed == ("<a> | `b` & c", "graph")
    assert "missing" in cases[failed].find("failure").get("message")
    assert root.find("testsuite").get("tests") == "4" and root.find("testsuite").get("failures") == "1"


def test_markdown_has_a_table_that_names_cannot_break(failing, tmp_path):
    lines = (tmp_path / "out.md").read_text().splitlines()
    assert lines[0] == "### nvgemm-fusion regress: failed"
    rows = [line for line in lines if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert any(row.startswith("| FAILED | \\<a\\> \\| \\`b\\` & c |") for row in rows)
    assert any("no → yes" in row for row in rows)


def test_text_names_the_decision_that_failed(gated, baseline, monkeypatch):
    from nvgemm_fusion.fusion.ops import OPS

    monkeypatch.delitem(OPS, "sigmoid")
    lines = list(regression_report.to_text(regression.check(baseline, gated)))
    assert lines[-3].startswith("FAILED: gated, GEMM 1 (64 x 128 x 32): the region lost")
    assert lines[-2].startswith("1 graph, 1 GEMM (0 fused): 1 failure, 0 improvements")
    assert re.search(r"nvgemm-fusion log explain \S+baseline.check.jsonl 1$", lines[-1])


@pytest.mark.gpu
def test_on_a_gpu_times_are_measured_and_the_same_again_is_no_failure(write_suite, baseline):
    path = write_suite(
        "x, w, b = torch.randn(4096, 4096), torch.randn(8192, 4096) / 64, torch.randn(8192)",
        "yield 'gelu', lambda x, w, b: F.gelu(F.linear(x, w, b)), (x.bfloat16(), w.bfloat16(), b.bfloat16())",
    )
    for _ in range(5):  # beside other tests on the same GPU, times may vary too much to decide anything
        recorded = regression.record(baseline, path)
        ((gemm,),) = recorded.decisions.graphs.values()
        if gemm.ratio is not None:
            break
    assert not recorded.faults and recorded.compared == {"gelu"} and recorded.decisions.times == "measured"
    assert 0 < gemm.ratio.value <= 1
    report = regression.check(baseline, path)
    assert not report.failed, messages(report)
