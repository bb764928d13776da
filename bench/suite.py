"""The suite: layers of real models side by side with every backend that torch ships, on a Hopper GPU.

    python -m nvgemm_fusion.bench.suite [OUTPUT] [--quick]      (default: bench/results/h200-suite.json)

One row is one layer at one M, in bfloat16. It is decided in one process, with nothing on disk that could help, and
measured in another: there the layer is compiled with the flag on, which takes the decision from disk, and as each peer;
all are timed by the stopwatch side by side. Then the contest is held again, for the regret: the time of what was
chosen over that of the best of all alternatives and peers. All GPUs of the machine are used, each by two processes that
take turns. Rows that are done are kept beside OUTPUT, and a run that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..fusion import log
from ..fusion.decision import Status
from ..lowering.packages import versions
from ..scheduler_hooks.stopwatch import Stopwatch
from .gpus import over_gpus
from .layers import LAYERS, Layer
from .numerics import error
from .rows import write_rows
from .side_by_side import ATEN, FRESH, FUSED, STOCK, compiled, timed

RESULTS = Path(__file__).parent / "results" / "h200-suite.json"
M_ORDER = 256, 4096, 16, 1024, 64, 1
"""An interrupted run has something of everything."""
QUICK_M, QUICK_LAYERS = (16, 1024), tuple({layer.epilogue: layer for layer in reversed(LAYERS)}.values())
"""One layer of each epilogue: eight rows, of which the slowest host so far took 26 s each."""
OURS = "ours"
Task = tuple[Layer, int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the rows. Exits with 1 when a result is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a layer of each epilogue, two sizes of M: four minutes")
    parser.add_argument("--m", type=int, nargs="+", default=M_ORDER, choices=M_ORDER, help="these sizes of M alone")
    options = parser.parse_args(arguments)
    tasks = [(layer, m) for m in options.m for layer in LAYERS]
    if options.quick:
        tasks = [(layer, m) for layer, m in tasks if m in QUICK_M and layer in QUICK_LAYERS]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    finished = options.output.with_suffix(".partial.jsonl")
    rows = [json.loads(line) for line in finished.read_text().splitlines()] if finished.exists() else []
    done = {(row["model"], row["layer"], row["m"]) for row in rows}
    todo = [(layer, m) for layer, m in tasks if (layer.model, layer.name, m) not in done]
    with tempfile.TemporaryDirectory() as folder, finished.open("a", encoding="utf-8") as lines:
        os.environ["NVGEMM_FUSION_CACHE_DIR"] = f"{folder}/decisions"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        for row in track(over_gpus(measured_row, todo), "measuring", len(todo), disable=not sys.stderr.isatty()):
            rows.append(row)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(_line(row), flush=True)
    order = {(layer.model, layer.name): number for number, layer in enumerate(LAYERS)}
    rows.sort(key=lambda row: (order[row["model"], row["layer"]], row["m"]))
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "summary": summary(rows)}
    write_rows(options.output, about, "rows", rows)
    finished.unlink()
    print(json.dumps(about["summary"], indent=1))
    sys.exit(1 if any(row["error_ratio"] > 1.1 for row in rows) else 0)


def measured_row(task: Task) -> dict[str, Any]:
    """The row of a layer: decided here, measured in another process."""
    choices = decide(task)
    torch.cuda.empty_cache()
    return with_regret(_other_process().submit(measure, task).result(), choices)


@lru_cache(maxsize=None)
def _other_process() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    # A process that multiprocessing has started waits at its end for those that it has started, and they wait for work
    # until their pool is closed. So it is closed then, and before its queues are, which is at a priority of 10.
    Finalize(None, pool.shutdown, exitpriority=100)
    return pool


def decide(task: Task) -> list[dict[str, Any]]:
    """The decisions of a layer, which are on disk from here on."""
    torch.compiler.reset()
    inputs = _inputs(task)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/log.jsonl"
        compiled(task[0].function, inputs, {**FUSED, "nvgemm_fusion_log": path})
        return [_choice(record) for record in log.read(path)]


def measure(task: Task) -> dict[str, Any]:
    """A row without its regret: `us` and `spread` of every form, and `again`, the contests held a second time."""
    layer, m = task
    torch.compiler.reset()
    inputs = _inputs(task)
    forms = {OURS: compiled(layer.function, inputs, FUSED), "eager": layer.function}
    forms["ATEN"] = compiled(layer.function, inputs, ATEN)
    forms["ATEN,TRITON"] = compiled(layer.function, inputs, STOCK)
    if stock_has_nvgemm():
        forms["ATEN,TRITON,NVGEMM"] = compiled(
            layer.function, inputs, {**STOCK, "max_autotune_gemm_backends": "ATEN,TRITON,NVGEMM"}
        )
    if layer.epilogue in CUBLASLT:
        forms["cuBLASLt"] = CUBLASLT[layer.epilogue]
    with torch.no_grad():
        exact = layer.function(*(tensor.double() for tensor in inputs))
        errors = [error([forms[name](*inputs)], [exact]) for name in (OURS, "ATEN")]
        del exact
        times = timed(forms, inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/log.jsonl"
        compiled(layer.function, inputs, {**FRESH, "nvgemm_fusion_log": path})
        again = [
            {(a["backend"], a["candidate"], len(a["fused"])): a["us"] for a in record["alternatives"] if a["us"]}
            for record in log.read(path)
        ]
    bandwidth, rate = peaks()
    torch.cuda.empty_cache()
    return {
        "model": layer.model,
        "layer": layer.name,
        "m": m,
        "n": layer.n,
        "k": layer.k,
        "gemms": layer.weights,
        "dtype": "bfloat16",
        "us": {name: round(timing.us, 2) for name, timing in times.items()},
        "spread": {name: round(timing.spread, 2) for name, timing in times.items()},
        "error_ratio": round(errors[0] / errors[1], 4),
        "roofline_us": round(max(layer.bytes_moved(m) / bandwidth, layer.flops(m) / rate) * 1e6, 2),
        "again": again,
    }


def with_regret(row: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with what was decided, and with the ratios that follow. A choice also says how long it took when the
    contest was held again, how long the others did, and who was the fastest then."""
    us, found = row["us"], []
    for choice, times in zip(choices, row["again"]):
        fastest = min(times, key=times.get)
        again = {"us_again": _us_again(choice, times), "us_fastest_again": times[fastest]}
        again["fastest_again"] = " ".join(fastest[:2])
        found.append({**choice, **again, "alternatives_again": {_name(*key): us for key, us in times.items()}})
    chosen, best = (sum(choice[name] for choice in found) for name in ("us_again", "us_fastest_again"))
    peers = {name: value for name, value in us.items() if name != OURS}
    best_peer = min(peers, key=peers.get)
    return {
        **{key: value for key, value in row.items() if key != "again"},
        "choice": found,
        "best_peer": best_peer,
        "regret": round(max(1.0, us[OURS] / us[best_peer], chosen / best if best else 1.0), 4),
        "speedup_best_peer": round(us[best_peer] / us[OURS], 4),
        "speedup_stock": round(us["ATEN,TRITON"] / us[OURS], 4),
    }


def _us_again(choice: dict[str, Any], times: dict[tuple[str, str, int], float]) -> float:
    """How long a choice took when the contest was held again. Where it was not timed then: a Triton template goes by
    another number, and the fastest of its kind counts; one that was pruned takes what it took, at the pace of the rest;
    and where Inductor was left to choose, that is the fastest."""
    key = choice["backend"], choice["candidate"], choice["fused"]
    alike = [us for (backend, _, fused), us in times.items() if (backend, fused) == (key[0], key[2])]
    if alike:
        return times.get(key, min(alike))
    if choice["us"] is None:
        return min(times.values())
    before = {name: us for name, (us, _) in choice["alternatives"].items()}
    return choice["us"] * _mean([us / before[_name(*key)] for key, us in times.items() if _name(*key) in before])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the rows say in a few numbers; geometric means."""
    fused = [row for row in rows if is_fused(row)]
    against_peer = [row["speedup_best_peer"] for row in rows]
    return {
        "rows": len(rows),
        "rows_fused": len(fused),
        "regret": _mean([row["regret"] for row in rows]),
        "worst_regret": max(row["regret"] for row in rows),
        "speedup_best_peer": _mean(against_peer),
        "slowest_against_best_peer": min(against_peer),
        "speedup_best_peer_where_fused": _mean([row["speedup_best_peer"] for row in fused]),
        "speedup_stock": _mean([row["speedup_stock"] for row in rows]),
        "worst_error_ratio": max(row["error_ratio"] for row in rows),
    }


def is_fused(row: dict[str, Any]) -> bool:
    """Whether a kernel with an epilogue was chosen for one of its GEMMs."""
    return any(choice["epilogue"] for choice in row["choice"])


def stock_has_nvgemm() -> bool:
    """Whether torch's own NVGEMM backend works here: from 2.15 on it finds the Operator API under today's name."""
    return tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 15)


@lru_cache(maxsize=None)
def peaks() -> tuple[float, float]:
    """What this GPU reaches: bytes a second, of a long copy or of a long read, whichever is faster (a product of few
    rows does little but read), and operations a second of a large matrix product."""
    source = torch.randn(1 << 29, device="cuda").bfloat16()
    target, total = torch.empty_like(source), torch.zeros((), device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product, words = torch.empty_like(a), source.view(torch.float32)
    runs = [
        lambda: target.copy_(source),
        lambda: torch.sum(words, dim=0, out=total),
        lambda: torch.mm(a, b, out=product),
    ]
    copy, read, multiply = (timing.us / 1e6 for timing in Stopwatch(rounds=40, budget_ms=2000).time(runs))
    return max(2 * source.nbytes / copy, source.nbytes / read), 2 * 8192**3 / multiply


CUBLASLT = {
    "residual": lambda x, w, r: torch.addmm(r, x, w.t()),
    "bias_gelu": lambda x, w, b: torch._addmm_activation(b, x, w.t(), use_gelu=True),
}
"""What torch passes to cuBLASLt with an epilogue of its own."""


def _inputs(task: Task) -> tuple[torch.Tensor, ...]:
    layer, m = task
    torch.manual_seed(0)
    return layer.inputs(m)


def _choice(record: dict[str, Any]) -> dict[str, Any]:
    """What was chosen for one GEMM, how long each alternative took, and how many could not be timed."""
    failed = sum(alternative["status"] == Status.FAILED.value for alternative in record["alternatives"])
    timed = [a for a in record["alternatives"] if a["us"] is not None]
    nothing = {"backend": "", "candidate": "", "us": None, "fused": (), "epilogue": ""}
    chosen = nothing if record["chosen"] is None else record["alternatives"][record["chosen"]]
    return {
        "backend": chosen["backend"],
        "candidate": chosen["candidate"],
        "us": chosen["us"],
        "fused": len(chosen["fused"]),
        "epilogue": bool(chosen["epilogue"]),
        "failed": failed,
        "alternatives": {_name(a["backend"], a["candidate"], len(a["fused"])): [a["us"], a["spread"]] for a in timed},
    }


def _name(backend: str, candidate: str, fused: int) -> str:
    return f"{backend} {candidate}" + f" + {fused}" * bool(fused)


def _mean(ratios: Sequence[float]) -> float:
    return round(statistics.geometric_mean(ratios), 4) if ratios else 1.0


def _line(row: dict[str, Any]) -> str:
    times = " ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    choice = ", ".join(f"{c['backend']} {c['candidate']}" + " +" * c["epilogue"] for c in row["choice"])
    failed = sum(c["failed"] for c in row["choice"])
    found = f"regret {row['regret']:.3f}, error {row['error_ratio']}" + f", {failed} failed" * bool(failed)
    return f"{row['model']} {row['layer']} {row['m']}: {times}; {found}; {choice}"


if __name__ == "__main__":
    main()
