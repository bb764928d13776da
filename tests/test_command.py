"""The command, as a user calls it, and the demo on the virtual H200."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

COMMAND = Path(sys.executable).parent / "nvgemm-fusion"


def run(*arguments):
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.fixture
def log_file(tmp_path, h200, instant_kernels, inductor_config):
    path = tmp_path / "decisions.jsonl"
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (128, 32), (128,)))
    with inductor_config.patch(nvgemm_fusion_log=str(path), nvgemm_fusion_force=True):
        torch.compile(lambda x, w, b: F.relu(F.linear(x, w, b)))(x, w, b)
    return path


def test_help():
    result = run("--help")
    assert result.returncode == 0 and "log" in result.stdout and "demo" in result.stdout
    assert "Example" in run("log", "show", "--help").stdout


def test_a_log_as_a_table_and_as_json(log_file):
    table = run("log", "show", log_file)
    assert table.returncode == 0, table.stderr
    assert "64 x 128 x 32" in table.stdout and "(modelled)" in table.stdout and "relu" in table.stdout
    assert json.loads(run("log", "show", log_file, "--json").stdout)[0]["fused"] is True


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
