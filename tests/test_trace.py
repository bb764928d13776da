"""A decision in torch's structured trace, as tlparse shows it, in TORCH_LOGS and in the counters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

SCRIPT = """
import torch, torch.nn.functional as F
from nvgemm_fusion.scheduler_hooks.virtual_device import virtual_device
options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN", "nvgemm_epilogue_fusion": True,
           "nvgemm_fusion_force": True, "nvgemm_fusion_candidates": 1, "shape_padding": False}
x, w, b = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16(), torch.randn(128).bfloat16()
with virtual_device("H200"), torch.no_grad():
    torch.compile(lambda x, w, b: F.relu(F.linear(x, w, b)), options=options)(x, w, b)
"""


def run(tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_torch_logs_print_the_readable_form(tmp_path):
    result = run(tmp_path, TORCH_LOGS="+nvgemm_fusion")
    assert result.returncode == 0, result.stderr
    assert "64x128x32: NVGEMM quack" in result.stderr and "us ATEN " in result.stderr


def test_tlparse_shows_the_record(tmp_path):
    result = run(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    assert result.returncode == 0, result.stderr
    (trace,) = (tmp_path / "trace").iterdir()
    tlparse = Path(sys.executable).parent / "tlparse"
    subprocess.run([tlparse, trace, "-o", tmp_path / "report", "--no-browser"], check=True, timeout=120)
    (shown,) = (tmp_path / "report").glob("**/nvgemm_fusion_decision*.json")
    assert '"backend": "NVGEMM"' in shown.read_text() or '"backend":"NVGEMM"' in shown.read_text()
    assert shown.name in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.usefixtures("h200", "instant_kernels")
def test_decisions_are_counted(inductor_config):
    counters.clear()
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16()
    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(lambda x, w: (F.relu(F.linear(x, w)), F.softmax(F.linear(x, w * 2), -1)))(x, w)
    torch.compile(lambda x, w: F.linear(x, w))(x.double(), w.double())
    counted = {name: count for name, count in counters["inductor"].items() if name.startswith("nvgemm_fusion_")}
    assert counted.pop("nvgemm_fusion_refused_not_pointwise") >= 1  # both of softmax's reductions read the product
    assert counted == {
        "nvgemm_fusion_fused": 1,
        "nvgemm_fusion_unfused": 1,
        "nvgemm_fusion_left_alone": 1,
        "nvgemm_fusion_refused_dtype": 1,
    }
