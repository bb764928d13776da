"""Bias and activation inside cuBLASLt: when it takes part in a contest, and that it computes what is meant."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.bench.generated_code import graph_inputs, run_on_cpu
from nvgemm_fusion.fusion.decision import Status, Timing
from nvgemm_fusion.fusion.program import EpilogueProgram, Major
from nvgemm_fusion.lowering import cublaslt
from nvgemm_fusion.lowering.kernel import KernelSpec
from nvgemm_fusion.lowering.launcher import load_kernel
from nvgemm_fusion.scheduler_hooks import alternatives, tuning

BF16 = torch.bfloat16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


X, W, BIAS, TILE = randn(64, 32), randn(128, 32), randn(128), randn(64, 128)
GRAPHS = {
    "gelu": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "relu": lambda x, w, b: F.relu(F.linear(x, w, b)),
    "exact gelu": lambda x, w, b: F.gelu(F.linear(x, w, b)),
    "silu": lambda x, w, b: F.silu(F.linear(x, w, b)),
    "scaled": lambda x, w, b: F.relu(F.linear(x, w, b)) * 2,
    "wide": lambda x, w, b: F.relu(F.linear(x, w, b)).float(),
    "no bias": lambda x, w, b: F.relu(F.linear(x, w)),
    "residual": lambda x, w, b: F.relu(F.linear(x, w) + TILE),
    "transposed": lambda x, w, b: F.relu(F.linear(x, w, b).t().contiguous()),
    "two stores": lambda x, w, b: (lambda y: (y, F.relu(y)))(F.linear(x, w, b)),
    "alpha": lambda x, w, b: F.relu(torch.addmm(b, x, w.t(), alpha=2)),
}


def largest_program(record):
    return EpilogueProgram.from_json(next(iter(record["programs"].values()))["ssa"])


@pytest.mark.usefixtures("h200", "instant_kernels")
@pytest.mark.parametrize("name", GRAPHS)
def test_what_it_computes_is_told_from_what_it_does_not(decisions, name):
    torch.compile(GRAPHS[name])(X, W, BIAS)
    (record,) = decisions()
    assert cublaslt.activation(largest_program(record)) == (name if name in ("gelu", "relu") else None)
    assert "addmm_activation" not in {a["candidate"] for a in record["alternatives"]}  # the device is virtual


@pytest.mark.usefixtures("h200", "instant_kernels")
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_the_launcher(decisions, name, dtype):
    x, w, b = (tensor.to(dtype) for tensor in (X, W, BIAS))
    torch.compile(GRAPHS[name])(x, w, b)
    program = largest_program(decisions()[0])
    spec = KernelSpec(cublaslt.CANDIDATE, dtype, Major.ROW, Major.COLUMN, program, "sm_90a", 132)
    out, exact = torch.empty(64, 128, dtype=dtype), GRAPHS[name](x.double(), w.double(), b.double())
    for launch in (cublaslt.launcher(spec), load_kernel(json.dumps(spec.to_json()))):
        out.fill_(float("nan"))
        launch(x, w.t(), b, out)
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_where_it_is_fastest_it_is_called_and_kept(
    tmp_path, h200, instant_kernels, inductor_config, decisions, monkeypatch
):
    """As on a GPU, with times made up."""
    stock = alternatives._modelled_stock

    def as_if_measured(contest, entrant):
        us = 5.0 if entrant.alternative.candidate == "addmm_activation" else 10.0
        return replace(
            entrant, alternative=replace(entrant.alternative, timing=Timing(us, 0.1), status=Status.MEASURED)
        )

    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "shared_compiler", alternatives.shared_compiler)
    monkeypatch.setattr(alternatives, "_modelled_stock", lambda c: stock(c) + alternatives.activation_contenders(c))
    monkeypatch.setattr(alternatives, "_with_modelled_time", as_if_measured)
    for from_cache in (False, True):
        torch._dynamo.reset()
        with inductor_config.patch(nvgemm_fusion_cache=True):
            torch.compile(GRAPHS["gelu"])(X, W, BIAS)
        record = decisions()[-1]
        chosen = record["alternatives"][record["chosen"]]
        assert (chosen["backend"], chosen["candidate"]) == ("ATEN", "addmm_activation")
        assert record["from_cache"] == from_cache and record["fused"] and chosen["fused"]
        assert [line for line in h200.code[-1].splitlines() if line.endswith("# cublaslt")]
        (result,) = run_on_cpu(h200.code[-1], graph_inputs(GRAPHS["gelu"], (X, W, BIAS)))
        exact = GRAPHS["gelu"](*(tensor.double() for tensor in (X, W, BIAS)))
        torch.testing.assert_close(result, exact, rtol=1e-9, atol=1e-9)
