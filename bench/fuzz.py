"""Random graphs on a real GPU, fused by force: is any number wrong?

    python -m nvgemm_fusion.bench.fuzz [--count N] [--seed N] [--workers N] [--output FILE]

The result goes to bench/results/h200-fuzz.json. Batches of graphs are compiled in `--workers` processes at a time, that
share one GPU: nothing is timed.

Each is a GEMM of random size with a random expression over it (`random_graphs`). Two things are asked: that the error
against float64 is at most 1.1 times that of the unfused form, and that a NaN or an infinity stands where the unfused
form, which is Inductor's own kernel, has one. A tenth of the graphs has operands with NaN, infinities and zeros of both
signs. Batches are run until `--count` graphs were fused; those that are refused count apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.progress import Progress

from ..fusion import log
from ..lowering.packages import versions
from .random_graphs import operands, tree, written
from .side_by_side import ATEN, FORCED

BATCH = 10
"""Graphs that are compiled together."""
LEAVES = 10
M_SIZES, K_SIZES = (1, 17, 64, 200, 512), (64, 192, 1024)
SPECIALS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)
LARGEST_RATIO = 1.1
FLOOR = 2**-20
"""A relative error below this is none."""
UNFUSED = {**ATEN, "shape_padding": False}
FUSED = {**FORCED, "max_autotune_gemm_backends": "ATEN", "shape_padding": False, "nvgemm_fusion_candidates": 1}
DEFAULT_OUTPUT = Path(__file__).parent / "results" / "h200-fuzz.json"
WORST = 10
"""How many of the worst cases are kept."""


def main() -> None:
    """Measures and writes the result. Exits with 1 when a number is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args()
    source = random.Random(options.seed)
    # Each process has compilers of its own, and all of them share the cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.workers)))
    cases: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool, Progress() as progress:
        task = progress.add_task("fused graphs", total=options.count)
        while (fused := sum(case["fused"] for case in cases)) < options.count:
            progress.update(task, completed=fused)
            for found in pool.map(batch, [source.getrandbits(64) for _ in range(options.workers)]):
                cases += found
    ours = [case for case in cases if case["fused"]]
    worst = sorted(ours, key=lambda case: (not case["wrong"], -case["error_ratio"]))[:WORST]
    result = {
        "count": fused,
        "compiled": len(cases),
        "wrong": sum(case["wrong"] for case in ours),
        "worst_error_ratio": max(case["error_ratio"] for case in ours),
        "seed": options.seed,
        "worst": worst,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print({key: result[key] for key in ("count", "compiled", "wrong", "worst_error_ratio")})
    raise SystemExit(int(result["wrong"] > 0))


def batch(seed: int) -> list[dict[str, Any]]:
    """BATCH cases of one x (M, K): what each computed, against float64 and against the unfused form."""
    source = random.Random(seed)
    torch.manual_seed(source.getrandbits(32))
    m, k, dtype = source.choice(M_SIZES), source.choice(K_SIZES), source.choice((torch.bfloat16, torch.float16))
    has_specials = source.random() < 0.1
    trees, sizes, inputs = [], [], [torch.randn(m, k).to(dtype)]
    for _ in range(BATCH):
        # No two products alike, so that each is found in the log by its size.
        sizes.append(source.choice([n for n in range(64, 1100, 8) if n not in sizes]))
        trees.append(tree(source, source.randint(1, LEAVES)))
        wide, small = source.choice((torch.float32, dtype)), source.choice((torch.int8, torch.int32))
        inputs += operands(m, sizes[-1], k, dtype, wide, small)
    if has_specials:
        for tensor in inputs[1:]:
            if tensor.is_floating_point() and tensor.shape[-1] != k:
                at = torch.rand(tensor.shape) < 0.02
                tensor[at] = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (int(at.sum()),))].to(tensor.dtype)
    inputs = [tensor.cuda() for tensor in inputs]
    function = written(trees)
    exact = function(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(Path(folder) / "log.jsonl")
        results = compiled(function, inputs, {**FUSED, "nvgemm_fusion_log": path})
        fused = {record["problem"]["n"]: record["fused"] for record in log.read(path) if record["problem"]}
        unfused = compiled(function, inputs, UNFUSED)
    return [
        {
            "graph": text,
            "m": m,
            "n": n,
            "k": k,
            "dtype": str(dtype),
            "specials": has_specials,
            "fused": fused.get(n, False),
            **compared(ours, stock, right),
        }
        for text, n, ours, stock, right in zip(trees, sizes, results, unfused, exact, strict=True)
    ]


def compiled(function: Any, inputs: Sequence[torch.Tensor], settings: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What `function`, compiled under `settings`, returns."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, options=settings)(*inputs)


def compared(ours: torch.Tensor, stock: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """`error_ratio`: the error of `ours` over that of `stock`, both against `right` where all are finite. `wrong`: that
    is too large, or a NaN or an infinity stands elsewhere."""
    finite = ours.isfinite() & stock.isfinite() & right.isfinite()
    size = right[finite].norm().clamp_min(1e-30)
    error, allowed = (((x.double() - right)[finite].norm() / size).item() for x in (ours, stock))
    ratio = max(error, FLOOR) / max(allowed, FLOOR)
    alike = torch.equal(ours.isnan(), stock.isnan()) and torch.equal(ours.isinf(), stock.isinf())
    wrong = ratio > LARGEST_RATIO or not alike
    return {"error": error, "error_ratio": round(ratio, 4), "specials_alike": alike, "wrong": wrong}


if __name__ == "__main__":
    main()
