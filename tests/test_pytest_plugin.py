"""The pytest plugin, as another project's tests use it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TESTS = """
import torch, torch.nn.functional as F
from nvgemm_fusion.bench.pytest_plugin import assert_fused, assert_snapshot

def compiled(function):
    x, w, b = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16(), torch.randn(128).bfloat16()
    with torch.no_grad():
        return torch.compile(function)(x, w, b)

def test_fused(fusion_log):
    assert len(fusion_log) == 0
    compiled(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    assert len(fusion_log) == 1 and fusion_log[0]["fused"]
    assert_fused(fusion_log)
    assert_fused(fusion_log, gemm="buf0", ops=["gelu"])
    assert_fused(fusion_log, gemm="64x128x*", ops=["gelu", "addmm"])

def test_snapshot(fusion_log):
    compiled(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    assert_snapshot(fusion_log, "golden/gelu.txt")

def test_another_operator(fusion_log):
    compiled(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    assert_fused(fusion_log, ops=["relu"])

def test_not_fused(fusion_log):
    compiled(lambda x, w, b: F.softmax(F.linear(x, w), -1))
    assert_fused(fusion_log)

def test_nothing_compiled(fusion_log):
    assert_fused(fusion_log)
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "test_model.py").write_text(TESTS)

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def test_assertions_hold_or_say_what_was_decided(project):
    result = project("-k", "not snapshot")
    assert "1 passed" in result.stdout and "3 failed" in result.stdout, result.stdout
    for said in (
        "a GEMM was to be fused with relu, and was not",
        "64x128x32 bfloat16: fused with addmm, gelu, t",
        "64x128x32 bfloat16: not fused (not pointwise",
        "no GEMM was compiled",
    ):
        assert said in result.stdout, said


def test_a_snapshot_is_missing_then_written_then_compared(project, tmp_path):
    assert "run pytest --update-fusion-snapshots" in project("-k", "test_snapshot").stdout
    assert project("-k", "test_snapshot", "--update-fusion-snapshots").returncode == 0
    golden = tmp_path / "golden" / "gelu.txt"
    assert "erf" in golden.read_text() and "64x128x32" in golden.read_text()
    assert project("-k", "test_snapshot").returncode == 0
    golden.write_text(golden.read_text().replace("erf", "tanh"))
    assert project("-k", "test_snapshot").returncode == 1


def test_it_costs_nothing_where_it_is_not_used(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_light():\n    assert 'torch' not in sys.modules and 'quack' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:hypothesispytest"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "1 passed" in result.stdout, result.stdout
