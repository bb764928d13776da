"""The command, as a user calls it, and the demo on the virtual H200."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

COMMAND = Path(sys.executable).parent / "nvgemm-fusion"


def run(*arguments, **environment):
    command = [COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.fixture
def log_file(tmp_path, h200, instant_kernels, inductor_config):
    """A log of three decisions: a fusion, a product that a softmax reads, and one that gets no candidates."""
    path = tmp_path / "decisions.jsonl"
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (128, 32), (128,)))
    with inductor_config.patch(nvgemm_fusion_log=str(path), nvgemm_fusion_force=True):
        torch.compile(lambda x, w, b: F.relu(F.linear(x, w, b)))(x, w, b)
        torch.compile(lambda x, w, b: F.softmax(F.linear(x, w), -1))(x, w, b)
        torch.compile(lambda x, w: F.linear(x, w))(x.double(), w.double())
    return path


def test_help():
    result = run("--help")
    assert result.returncode == 0 and "log" in result.stdout and "demo" in result.stdout
    assert "Example" in run("log", "show", "--help").stdout


def findings_of(*options, **environment):
    result = run("doctor", "--json", *options, **environment)
    return result.returncode, {finding["name"]: finding for finding in json.loads(result.stdout)}


def test_the_doctor_finds_that_the_virtual_device_works():
    code, findings = findings_of("--virtual")
    assert code == 0, findings
    assert torch.__version__.startswith(findings["torch"]["found"]) and findings["compiler"]["state"] == "fine"
    assert {"triton", "quack-kernels", "GPU", "config", "select_algorithm", "cache folder", "the flag"} <= set(findings)
    assert findings["the flag"]["found"] == "off"
    table = run("doctor", "--virtual").stdout
    assert "fine" in table and "compiler" in table


def test_the_doctor_says_what_is_wrong_and_what_to_do(tmp_path):
    code, findings = findings_of(
        TORCH_DEVICE_BACKEND_AUTOLOAD="0", NVGEMM_FUSION_CACHE_DIR="/proc/nowhere", CUDA_VISIBLE_DEVICES=""
    )
    faults = {name: finding["fix"] for name, finding in findings.items() if finding["state"] == "fault"}
    assert code == 1
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in faults["config"] and "NVGEMM_FUSION_CACHE_DIR" in faults["cache folder"]
    assert "--virtual" in faults["GPU"] and all(faults.values())


def test_a_log_as_a_table_and_as_json(log_file):
    table = run("log", "show", log_file)
    assert table.returncode == 0, table.stderr
    assert "64 x 128 x 32" in table.stdout and "(modelled)" in table.stdout and "relu" in table.stdout
    assert [record["number"] for record in json.loads(run("log", "show", log_file, "--json").stdout)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--fused"], [1]),
        (["--unfused"], [2, 3]),
        (["--reason", "not pointwise"], [2]),
        (["--reason", "dtype"], [3]),
        (["--backend", "nvgemm"], [1]),
        (["--shape", "64x*x32"], [1, 2]),
        (["--shape", "64x127x32"], []),
        (["--speedup", "1.01"], [1]),
        (["--speedup", "1.01", "--reason", "dtype"], []),
        (["--limit", "1"], [1]),
    ],
    ids=str,
)
def test_filters(log_file, options, numbers):
    result = run("log", "show", log_file, "--json", *options)
    assert [record["number"] for record in json.loads(result.stdout)] == numbers


def test_a_filter_that_nothing_passes_says_so(log_file):
    result = run("log", "show", log_file, "--shape", "1x1x1")
    assert result.returncode == 0 and "no decision" in result.stdout


@pytest.mark.parametrize(
    "options", [["--reason", "sideways"], ["--backend", "cuBLAS"], ["--shape", "64x32"], ["--speedup", "fast"]], ids=str
)
def test_a_filter_that_cannot_be_is_wrong_use(log_file, options):
    result = run("log", "show", log_file, *options)
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_one_decision_in_full(log_file):
    shown = run("log", "explain", log_file, "1").stdout
    for expected in ("v1 = relu(v0)", "def epilogue(acc, operand_0)", "test_command.py", "slower", "quack-kernels"):
        assert expected in shown, expected
    assert "symbolic" not in run("log", "explain", log_file, "3").stdout
    missing = run("log", "explain", log_file, "4")
    assert missing.returncode == 2 and "fewer than 4" in missing.stderr


def test_what_changed_between_two_logs(log_file, tmp_path):
    same = run("log", "diff", log_file, log_file)
    assert same.returncode == 0 and same.stdout.strip() == "the same decisions"
    records = [json.loads(line) for line in log_file.read_text().splitlines()]
    other = tmp_path / "other.jsonl"
    records[0]["chosen"], records[0]["fused"] = 0, False
    records[0]["us_chosen"] *= 2
    records[1]["us_chosen"] /= 2
    other.write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    kinds = [change["kind"] for change in json.loads(run("log", "diff", log_file, other, "--json").stdout)]
    assert kinds == ["fusion lost", "slower", "faster", "gone"]
    assert "fusion won" in run("log", "diff", other, log_file).stdout


def test_a_log_as_a_page(log_file, tmp_path):
    page = tmp_path / "report.html"
    result = run("report", log_file, "-o", page)
    assert result.returncode == 0 and page.read_text().startswith("<!DOCTYPE html>")
    assert run("report", log_file, "-o", tmp_path / "no such folder" / "report.html").returncode == 2
    assert run("report", tmp_path / "nothing").returncode == 2


def test_a_long_log_is_read_quickly(log_file, tmp_path):
    """100,000 decisions: a filter in under 3 s and 500 MB."""
    long = tmp_path / "long.jsonl"
    template = log_file.read_bytes()
    long.write_bytes(template * (100_000 // template.count(b"\n") + 1))
    script = (
        "import resource, subprocess, sys, time\n"
        "started = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
    )
    command = [sys.executable, "-c", script, COMMAND, "log", "show", long, "--backend", "NVGEMM"]
    seconds, megabytes = min(
        tuple(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))
        for _ in range(3)
    )
    print(f"{long.stat().st_size / 1e6:.0f} MB in {seconds:.2f} s and {megabytes:.0f} MB")
    assert seconds < 3 and megabytes < 500


@pytest.mark.parametrize("content", [None, "", "not a log\n", '{"schema": 99}\n', b"\xff\xfe\x00"])
def test_what_is_no_log_is_said_in_one_line(tmp_path, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run("log", "show", path)
    assert result.returncode == 2
    assert str(path) in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_the_demo_on_the_virtual_device(monkeypatch, capsys):
    from nvgemm_fusion.bench import demo

    monkeypatch.setattr(demo, "HIDDEN", 1024)
    monkeypatch.setattr(demo, "INTERMEDIATE", 2048)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        demo.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "modelled" in printed and "256 x 2048 x 1024" in printed and "NVGEMM fused" in printed
    assert printed.count("right: ") >= 3 and "WRONG" not in printed


def test_the_gate_from_the_shell(tmp_path):
    suite, baseline = tmp_path / "suite.py", tmp_path / "baseline.json"
    lines = [
        "import torch",
        "def graphs():",
        "    x, w = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16()",
        "    yield 'scaled', lambda x, w: torch.relu(x @ w.t()) * 2, (x, w)",
    ]
    suite.write_text("\n".join(lines))
    missing = run("regress", "check", baseline, "--suite", suite)
    assert missing.returncode == 2 and "regress record" in missing.stderr and "Traceback" not in missing.stderr
    recorded = run("regress", "record", "-o", baseline, "--suite", suite, "--json")
    assert recorded.returncode == 0, recorded.stderr
    assert json.loads(recorded.stdout)["gemms"] == 1 and baseline.stat().st_mode & 0o777 == 0o666 & ~current_umask()
    checked = run("regress", "check", baseline, "--suite", suite, "--junit", tmp_path / "out.xml")
    assert checked.returncode == 0 and "0 failures" in checked.stdout and (tmp_path / "out.xml").exists()
    suite.write_text(suite.read_text().replace("torch.relu(x @ w.t()) * 2", "torch.softmax(x @ w.t(), -1)"))
    changed = run("regress", "check", baseline, "--suite", suite)
    assert changed.returncode == 1 and "FAILED: scaled" in changed.stdout
    explained = run(*changed.stdout.splitlines()[-1].partition("nvgemm-fusion ")[2].split())
    assert explained.returncode == 0 and "not pointwise" in explained.stdout


def current_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask
