"""Baselines and suites that are none: one line that says what is wrong, exit code 2, no traceback."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from nvgemm_fusion.bench import regression_suite
from nvgemm_fusion.bench.baseline import WrongUse
from test_regression import RELU, baseline, decision, recorded, run, state, write_suite  # noqa: F401

GEMM = msgspec.to_builtins(decision())


def baseline_with(**changes):
    return json.dumps({**msgspec.to_builtins(state(decision())), **changes})


def graph_with(**changes):
    return baseline_with(graphs={"g": [{**GEMM, **changes}]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "regress record"),
        ("", "no baseline"),
        ("not JSON", "no baseline"),
        (b"\xff\xfe\x00", "no baseline"),
        ("[" * 100_000, "no baseline"),
        ('{"schema": 1, "graphs": ' + '{"g": ' * 100_000, "no baseline"),
        ('{"schema": 1, "graphs": {}, "unknown": ' + "[" * 100_000, "no baseline"),
        ('{"schema": 2, "anything": true}', "update nvgemm-fusion"),
        (baseline_with(schema=0), "record it again"),
        (baseline_with(schema=10**400), "update nvgemm-fusion"),
        (baseline_with(schema="1"), "$.schema"),
        (baseline_with(graphs=[]), "$.graphs"),
        (baseline_with(graphs={"\x1b[2J": []}), "$.graphs"),
        (baseline_with(times="guessed"), "$.times"),
        (baseline_with(versions={"torch": 2}), "$.versions"),
        (graph_with(fused="yes"), ".fused"),
        (graph_with(fused=1), ".fused"),
        (graph_with(problem={**GEMM["problem"], "m": 0}), ".problem.m"),
        (graph_with(problem={**GEMM["problem"], "k": 10**300}), ".problem.k"),
        (graph_with(problem={**GEMM["problem"], "n": 1.5}), ".problem.n"),
        (graph_with(ratio={"value": 1e300, "spread": 0}), ".ratio.value"),
        (graph_with(ratio={"value": -1, "spread": 0}), ".ratio.value"),
        (graph_with(ratio={"value": float("nan"), "spread": 0}), "no baseline"),
        (graph_with(reasons=[["slower", ""]]), ".reasons"),
        (graph_with(region={**GEMM["region"], "operators": ["a" * 10_000]}), ".region.operators"),
        (graph_with(region={**GEMM["region"], "program": ["\u202ereversed"]}), ".region.program"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_is_no_baseline_is_wrong_use(baseline, content, said):
    if content is not None:
        baseline.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run("check", baseline)
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "baseline.json" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and len(result.stderr) < 1500


def test_a_baseline_must_be_a_file(tmp_path):
    assert run("check", tmp_path).exit_code == 2
    assert run("check", "/dev/zero").exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no suite"),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("def graphs(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit"),
        ("x = 1", "no generator `graphs`"),
        ("graphs = 5", "no generator `graphs`"),
        ("def graphs(): return 5", "fails in graphs(): TypeError"),
        ("def graphs():\n    yield from ()", "yields no graph"),
        ("def graphs():\n    yield 1 / 0", "ZeroDivisionError"),
        ("def graphs():\n    yield None", "must yield (name, callable, inputs), not NoneType"),
        ("def graphs():\n    yield 'a', 'b'", "must yield (name, callable, inputs)"),
        ("def graphs():\n    yield 5, print, ()", "a name must be"),
        ("def graphs():\n    yield 'a\\nb', print, ()", "a name must be"),
        ("def graphs():\n    yield 'a', 5, ()", "something to call"),
        ("def graphs():\n    yield 'a', print, (1,)", "a tuple of tensors on the CPU"),
        ("def graphs():\n    yield 'a', print, None", "a tuple of tensors on the CPU"),
        ("def graphs():\n    yield 'a', lambda: 1 / 0, ()", "does not run as it stands: ZeroDivisionError"),
        ("def graphs():\n    yield 'a', lambda: 1, ()", "not one GEMM was decided"),
        ("def graphs():\n    yield 'a', len, ()\n    yield 'a', len, ()", ""),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_file_that_is_no_suite_is_wrong_use(tmp_path, baseline, content, said):
    path = tmp_path / "suite.py"
    if content is not None:
        path.write_text(content)
    result = run("record", "-o", baseline, "--suite", path)
    assert result.exit_code == 2, result.output
    assert said in result.stderr and len(result.stderr.splitlines()) == 1 and not baseline.exists()


def test_two_graphs_of_one_name_are_wrong_use(write_suite):
    with pytest.raises(WrongUse, match="two graphs 'relu'"):
        list(regression_suite.load(write_suite(RELU, RELU)))


def test_places_that_cannot_be_written_are_wrong_use(recorded, baseline, tmp_path):
    nowhere = tmp_path / "nowhere" / "file"
    assert run("record", "-o", nowhere, "--suite", recorded).exit_code == 2
    for option in ("--log", "--junit", "--markdown"):
        result = run("check", baseline, "--suite", recorded, option, nowhere)
        assert result.exit_code == 2 and str(nowhere) in result.stderr
    before = baseline.read_bytes()
    assert run("check", baseline, "--suite", recorded, "--log", baseline).exit_code == 2
    assert baseline.read_bytes() == before


def test_a_suite_gets_the_same_inputs_each_time_whatever_stands_before_it(tmp_path):
    path = tmp_path / "suite.py"
    one = "    yield 'b', torch.relu, (torch.randn(3),)\n"
    seen = []
    for lines in (one, "    yield 'a', torch.relu, (torch.randn(50),)\n" + one):
        path.write_text("import torch\ndef graphs():\n" + lines)
        seen.append(list(regression_suite.load(path))[-1].inputs[0])
    assert torch.equal(*seen)


def test_a_suite_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_suite.py").write_text("from torch import relu")
    path = tmp_path / "suite.py"
    path.write_text(
        "import torch\n"
        "def graphs():\n"
        "    from beside_the_suite import relu\n"
        "    yield 'a', relu, (torch.ones(1),)"
    )
    assert [graph.name for graph in regression_suite.load(path)] == ["a"]


