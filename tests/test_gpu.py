"""On a real Hopper GPU: fused by force, every result is compared with float64 and with the unfused one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.bench.numerics import tensors
from nvgemm_fusion.fusion import log

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda").to(dtype)


def relative_error(result, exact):
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def fused_by_force(function, inputs, config, decisions):
    """Computes it with every legal region fused. Checks all results against float64, and that something was fused."""
    exact = tensors(function(*(x.double() for x in inputs)))
    torch._dynamo.reset()
    with config.patch(nvgemm_epilogue_fusion=False, max_autotune_gemm_backends="ATEN"), torch.no_grad():
        unfused = tensors(torch.compile(function)(*inputs))
    torch._dynamo.reset()
    with config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
        compiled = torch.compile(function)
        compiled(*inputs)
        results = tensors(compiled(*inputs))
    assert any(record["fused"] for record in decisions()), [
        (a["candidate"], a["reason"], a["detail"]) for record in decisions() for a in record["alternatives"]
    ]
    for ours, stock, right in zip(results, unfused, exact, strict=True):
        assert ours.dtype == stock.dtype and ours.shape == stock.shape and ours.stride() == stock.stride()
        assert relative_error(ours, right) <= 1.1 * relative_error(stock, right) + 1e-12


def not_measured(record):
    """The alternatives without a time, but for templates with something fused that are slower with nothing fused."""
    return [
        (a["backend"], a["status"], a["detail"])
        for a in record["alternatives"]
        if a["status"] != "measured"
        and not (a["status"] == "pruned" and a["backend"] == "TRITON" and a["fused"] and a["reason"] == "slower")
    ]


SIZES = [(512, 1024, 512), (16, 2048, 1024), (1000, 1000, 1000), (17, 264, 72), (1, 512, 256)]
"""(M, N, K): tiles that fit, decode, no multiple of any tile, odd M, a single row."""


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "bias_relu",
        "bias_gelu_tanh",
        "bias_gelu_erf",
        "residual",
        "silu_mul",
        "sigmoid_scale",
        "clamp_chain",
        "long_chain",
    ],
)
def test_graphs(name, size, dtype, inductor_config, decisions):
    m, n, k = size
    x, w, b = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) / math.sqrt(k), randn(n, dtype=dtype)
    tile, scale = randn(m, n, dtype=dtype), randn(1, dtype=dtype)
    function, inputs = {
        "bias_relu": (lambda x, w, b: F.relu(F.linear(x, w, b)), (x, w, b)),
        "bias_gelu_tanh": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), (x, w, b)),
        "bias_gelu_erf": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (x, w, b)),
        "residual": (lambda x, w, r: F.linear(x, w) + r, (x, w, tile)),
        "silu_mul": (lambda x, w, u: F.silu(F.linear(x, w)) * u, (x, w, tile)),
        "sigmoid_scale": (lambda x, w, s: torch.sigmoid(F.linear(x, w)) * s, (x, w, scale)),
        "clamp_chain": (lambda x, w, r: (F.linear(x, w).clamp(-1, 1).abs() + r).exp().sqrt(), (x, w, tile)),
        "long_chain": (lambda x, w, r: (((F.linear(x, w) / 2 + r).tanh() - r) * r).sigmoid().sqrt() + r, (x, w, tile)),
    }[name]
    fused_by_force(function, inputs, inductor_config, decisions)


@pytest.mark.parametrize("axis", ["row", "column", "both"])
def test_square_product_tells_rows_from_columns(axis, inductor_config, decisions):
    x, w, row, column = randn(1024, 512), randn(1024, 512) / 20, randn(1024), randn(1024, 1)
    function = {
        "row": lambda x, w, r, c: F.relu(F.linear(x, w) * r),
        "column": lambda x, w, r, c: F.relu(F.linear(x, w) * c),
        "both": lambda x, w, r, c: F.relu(F.linear(x, w) * c * r + r - c),
    }[axis]
    fused_by_force(function, (x, w, row, column), inductor_config, decisions)


@pytest.mark.parametrize("a_major", ["row", "column"])
@pytest.mark.parametrize("b_major", ["row", "column"])
def test_layouts(a_major, b_major, inductor_config, decisions):
    a = randn(512, 1024) if a_major == "row" else randn(1024, 512).t()
    b = randn(1024, 768) if b_major == "row" else randn(768, 1024).t()
    fused_by_force(lambda a, b, r: F.relu(a @ b / 32) + r, (a, b, randn(512, 768)), inductor_config, decisions)


@pytest.mark.parametrize("bias", ["row", "column", "full", "scalar"])
@pytest.mark.parametrize("scalars", [(1, 1), (2.0, 0.5), (1, 0)], ids=str)
def test_addmm(bias, scalars, inductor_config, decisions):
    alpha, beta = scalars
    shape = {"row": (768,), "column": (512, 1), "full": (512, 768), "scalar": (1, 1)}[bias]
    inputs = randn(*shape), randn(512, 256), randn(256, 768) / 16
    fused_by_force(
        lambda c, a, b: torch.tanh(torch.addmm(c, a, b, alpha=alpha, beta=beta)), inputs, inductor_config, decisions
    )


def test_views_of_three_dimensions(inductor_config, decisions):
    x, w, b, r = randn(4, 96, 512), randn(1024, 512) / 20, randn(1024), randn(4, 96, 1024)
    fused_by_force(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (x, w, b, r), inductor_config, decisions)


def test_residual_is_the_input(inductor_config, decisions):
    x, w = randn(512, 1024), randn(1024, 1024) / 32
    fused_by_force(lambda x, w: x + F.linear(x, w), (x, w), inductor_config, decisions)


@pytest.mark.parametrize("size", [(512, 1024, 512), (17, 264, 72)], ids=str)
@pytest.mark.parametrize("name", ["product_and_relu", "two_results", "four_results", "other_dtype", "transposed"])
def test_several_stores(name, size, inductor_config, decisions):
    m, n, k = size
    inputs = randn(m, k), randn(n, k) / math.sqrt(k), randn(m, n), randn(n)
    function = {
        "product_and_relu": lambda x, w, t, r: (lambda y: (y, F.relu(y)))(F.linear(x, w, r)),
        "two_results": lambda x, w, t, r: (lambda y: (torch.tanh(y), y * t))(F.linear(x, w)),
        "four_results": lambda x, w, t, r: (lambda y: (y, y.relu(), y.exp(), y + r))(F.linear(x, w)),
        "other_dtype": lambda x, w, t, r: (lambda y: (F.relu(y), y.float() * 2))(F.linear(x, w)),
        "transposed": lambda x, w, t, r: (lambda a: (a.t(), torch.exp(a.t()).t()))(torch.tanh(F.linear(x, w))),
    }[name]
    fused_by_force(function, inputs, inductor_config, decisions)
    epilogues = [(record, record["alternatives"][record["chosen"]]["epilogue"]) for record in decisions()]
    programs = [record["programs"][digest]["readable"] for record, digest in epilogues if digest]
    assert any(program.count("store ") > 1 for program in programs)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64], ids=str)
def test_a_number_on_the_cpu(dtype, inductor_config, decisions):
    x, w, r = randn(512, 1024), randn(768, 1024) / 32, randn(512, 768)
    with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
        compiled = torch.compile(lambda x, w, r, s: F.relu(F.linear(x, w)) * s + r, dynamic=False)
        for value in (0.1, 3.0, -2.5):
            result = compiled(x, w, r, torch.tensor(value, dtype=dtype))
            exact = F.relu(F.linear(x.double(), w.double())) * torch.tensor(value, dtype=dtype).double() + r.double()
            assert relative_error(result, exact) < 1e-2
        result = compiled(x, w, r, torch.tensor(float("inf"), dtype=dtype))
        assert torch.equal(result.isnan(), F.linear(x, w).relu() == 0) and not result.isfinite().any()
    assert [record["fused"] for record in decisions()] == [True]


NARROW = {
    "mask": lambda y, t, r: (F.relu(y), y > 0),
    "mask_alone": lambda y, t, r: (y * t) <= r,
    "int8": lambda y, t, r: (y * 40).round().clamp(-127, 127).to(torch.int8),
    "uint8": lambda y, t, r: (y, (y.sigmoid() * 255).round().to(torch.uint8)),
    "int32": lambda y, t, r: (y * 1000).to(torch.int32) * 65537,
    "float8": lambda y, t, r: (F.silu(y) * 60).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda y, t, r: ((y * t).to(torch.float8_e5m2), y != r),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_results(name, transposed, inductor_config, decisions):
    inputs = randn(272, 512), randn(528, 512) / 20, randn(272, 528), randn(528)

    def function(x, w, t, r):
        results = tensors(NARROW[name](F.linear(x, w), t, r))
        return [result.t().contiguous().t() for result in results] if transposed else results

    fused_by_force(function, inputs, inductor_config, decisions)


def test_special_values_of_a_float8_are_inductors(inductor_config, decisions):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 447.0, 449.0, 1e5], device="cuda")
    x, w = torch.zeros(256, 128, device="cuda", dtype=BF16), torch.zeros(512, 128, device="cuda", dtype=BF16)
    row = values.repeat(64).to(BF16)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        results = []
        for settings in ({"nvgemm_epilogue_fusion": False}, {"nvgemm_fusion_force": True}):
            torch._dynamo.reset()
            with inductor_config.patch(max_autotune_gemm_backends="ATEN", **settings), torch.no_grad():
                function = lambda x, w, r: (F.linear(x, w) + r).to(dtype)  # noqa: B023, E731
                results.append(torch.compile(function, dynamic=False)(x, w, row).view(torch.uint8))
        assert torch.equal(*results)
    assert all(record["fused"] for record in decisions())


def test_tuning_stays_within_twice_its_tensors(inductor_config, decisions):
    x, w, b = randn(8192, 4096), randn(8192, 4096) / 64, randn(8192)
    own = x.nbytes + w.nbytes + b.nbytes + 8192 * 8192 * 2
    flush = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with inductor_config.patch(max_autotune_gemm_backends="ATEN"), torch.no_grad():
        result = torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"))(x, w, b)
    peak = torch.cuda.max_memory_reserved() - before
    assert peak <= 2 * own + flush + (64 << 20), (peak, own, flush)
    del result
    assert decisions()


def test_special_values_are_inductors(inductor_config, decisions):
    specials = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 3e38], device="cuda")
    row = specials.repeat(64).to(BF16)
    x, w = torch.zeros(256, 128, device="cuda", dtype=BF16), torch.zeros(512, 128, device="cuda", dtype=BF16)
    for function, has_any_zero in (  # as in `fusion.ops`: the larger of two zeros is either
        (lambda x, w, r: F.relu(F.linear(x, w) + r), True),
        (lambda x, w, r: torch.sigmoid(F.linear(x, w) + r), False),
        (lambda x, w, r: (F.linear(x, w) + r).clamp(-1, 1), True),
        (lambda x, w, r: torch.maximum(F.linear(x, w), r), True),
        (lambda x, w, r: torch.where(F.linear(x, w) >= r, r, -r), False),
        (lambda x, w, r: torch.tanh(F.linear(x, w) + r) * torch.rsqrt(F.linear(x, w) + r), False),
    ):
        torch._dynamo.reset()
        with inductor_config.patch(nvgemm_epilogue_fusion=False, max_autotune_gemm_backends="ATEN"), torch.no_grad():
            unfused = torch.compile(function)(x, w, row)
        torch._dynamo.reset()
        with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
            result = torch.compile(function)(x, w, row)
        assert torch.equal(result.isnan(), unfused.isnan())
        assert torch.equal(result.nan_to_num(), unfused.nan_to_num())
        is_compared = ~result.isnan() & ~(has_any_zero & (result == 0))
        assert torch.equal(torch.signbit(result)[is_compared], torch.signbit(unfused)[is_compared])


def test_cuda_graphs_and_side_streams(inductor_config, decisions):
    x, w, b = randn(256, 1024), randn(2048, 1024) / 32, randn(2048)
    function = lambda x, w, b: F.relu(F.linear(x, w, b))  # noqa: E731
    exact = function(x.double(), w.double(), b.double())
    with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
        compiled = torch.compile(function, mode="max-autotune")
        for _ in range(4):
            result = compiled(x, w, b).clone()
        assert relative_error(result, exact) < 1e-2
        torch._dynamo.reset()
        compiled = torch.compile(function)
        compiled(x, w, b)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = compiled(x, w, b)
        stream.synchronize()
        assert relative_error(result, exact) < 1e-2
    assert all(record["fused"] for record in decisions())


def test_several_threads(inductor_config, decisions):
    w, b, inputs = randn(2048, 1024) / 32, randn(2048), [randn(256, 1024) for _ in range(16)]
    function = lambda x: F.relu(F.linear(x, w, b))  # noqa: E731
    with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
        compiled = torch.compile(function)
        compiled(inputs[0])

    def run(x):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            result = compiled(x)
            torch.cuda.current_stream().synchronize()
            return result

    with ThreadPoolExecutor(4) as pool:
        for x, result in zip(inputs, pool.map(run, inputs), strict=True):
            assert relative_error(result, F.relu(F.linear(x.double(), w.double(), b.double()))) < 1e-2
    assert [record["fused"] for record in decisions()] == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu(inductor_config, decisions):
    inputs = [tensor.to("cuda:1") for tensor in (randn(512, 1024), randn(2048, 1024) / 32, randn(2048))]
    function = lambda x, w, b: F.gelu(F.linear(x, w, b))  # noqa: E731
    fused_by_force(function, inputs, inductor_config, decisions)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function)(*inputs)
    assert not not_measured(decisions()[-1])


SCRIPT = """
import time, torch
import torch.nn.functional as F
x, w, b = (torch.randn(*size, device="cuda").bfloat16() for size in ((512, 1024), (4096, 1024), (4096,)))
start = time.perf_counter()
with torch.no_grad():
    torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b)), mode="max-autotune-no-cudagraphs")(x, w, b)
print(f"{time.perf_counter() - start:.1f} s")
"""


def test_a_second_process_takes_its_decision_from_disk(tmp_path):
    records = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        environment = {
            "NVGEMM_FUSION_CACHE_DIR": str(tmp_path / "ours"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"inductor{number}"),  # else it would not lower a second time
            "TORCHINDUCTOR_NVGEMM_EPILOGUE_FUSION": "1",
            "TORCHINDUCTOR_NVGEMM_FUSION_LOG": str(path),
        }
        subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, check=True)
        records += log.read(str(path))
    first, second = records
    assert (first["from_cache"], second["from_cache"]) == (False, True)
    choice = first["alternatives"][first["chosen"]]
    assert second["alternatives"][second["chosen"]]["candidate"] == choice["candidate"]
    assert len(second["alternatives"]) == 1 and all(not a["compile_s"] for a in second["alternatives"])


def test_without_force_the_fastest_is_chosen(inductor_config, decisions):
    x, w, b = randn(4096, 4096), randn(4096, 4096) / 64, randn(4096)
    with torch.no_grad():
        torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"))(x, w, b)
    (record,) = decisions()
    times = [a["us"] for a in record["alternatives"] if a["us"] is not None]
    assert {(backend, status) for backend, status, _ in not_measured(record)} <= {("NVGEMM", "failed")}
    assert {a["backend"] for a in record["alternatives"]} == {"ATEN", "TRITON", "NVGEMM"}
    chosen = record["alternatives"][record["chosen"]]
    assert chosen["us"] <= min(times) + max(a["spread"] or 0 for a in record["alternatives"])


def test_an_operand_that_stock_computes_on_the_way_is_timed_on_both_sides(inductor_config, decisions):
    x, w = randn(1024, 1024), randn(1024, 1024) / 32
    with torch.no_grad():
        torch.compile(lambda x, w: F.linear(x, w) * torch.rand(1024, 1024, device="cuda"))(x, w)
    (record,) = decisions()
    failed = [(a["backend"], a["detail"]) for a in record["alternatives"] if a["status"] == "failed"]
    assert not failed
    assert all(a["separate"] for a in record["alternatives"])


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_right_kernel_passes_verification(mode, inductor_config, decisions, caplog):
    x, w, b = randn(512, 1024), randn(2048, 1024) / 32, randn(2048)
    with inductor_config.patch(nvgemm_fusion_verify=mode):
        fused_by_force(lambda x, w, b: F.silu(F.linear(x, w, b)), (x, w, b), inductor_config, decisions)
    assert "wrong result" not in caplog.text


def test_training(inductor_config, decisions):
    x, w, b = randn(512, 1024), randn(2048, 1024) / 32, randn(2048)

    def gradients(function, *inputs):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        function(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    function = lambda x, w, b: F.gelu(F.linear(x, w, b))  # noqa: E731
    exact = gradients(function, x.double(), w.double(), b.double())
    with inductor_config.patch(nvgemm_fusion_force=True):
        ours = gradients(torch.compile(function), x, w, b)
    assert decisions()
    assert all(relative_error(a, b) < 2e-2 for a, b in zip(ours, exact))
