"""The candidates study: how far are the best N candidates of a problem from the best of all?

    python -m nvgemm_fusion.bench.candidates [OUTPUT]   times all; needs a Hopper GPU, and uses every one that is there
    python -m nvgemm_fusion.bench.candidates --check    ranks again and compares with the times on file; needs no GPU

Every legal configuration of QuACK is timed on every GEMM of `layers`, with the epilogue that follows it there, beside
`torch.mm` (the product alone). The file keeps all times, so that a ranking can be judged, and fitted, without a GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..fusion.decision import Timing
from ..fusion.problem import Problem
from ..lowering.candidates import tiled_candidates
from ..lowering.kernel import Candidate
from ..lowering.packages import versions
from ..lowering.providers import QUACK
from ..lowering.targets import current_target
from ..scheduler_hooks.stopwatch import Stopwatch
from .gpus import over_gpus
from .kernels import TARGET, Task, b_of, compile_all, kernels, random_b, runs_on
from .layers import LAYERS, M_SIZES, Gemm, program
from .rows import write_rows

RESULTS = Path(__file__).parent / "results" / "h200-candidates.json"
LIMIT = 5
"""How many candidates of a problem are compared with all: one less than compete by default."""
FAR = 1.03
"""Further behind, a problem is counted."""
ROUNDS, BUDGET_MS = 15, 4000


def tasks() -> list[Task]:
    """Every different GEMM of the layers, at every M, the longest first: no GPU shall have one left at the end."""
    gemms = dict.fromkeys(gemm for layer in LAYERS for gemm in layer.gemms)
    return [(gemm, m) for m in reversed(M_SIZES) for gemm in gemms]


def every_candidate(problem: Problem, epilogue: str) -> list[Candidate]:
    """All legal configurations of QuACK."""
    found = tiled_candidates(problem, TARGET, program(epilogue), None)
    return [candidate for candidate in found if candidate.provider == QUACK]


def measure(task: Task) -> dict[str, Any]:
    """The record of one task: microseconds of every candidate that runs, and of the product alone."""
    gemm, m = task
    found = every_candidate(gemm.problem(m), gemm.epilogue)
    b = b_of(gemm, random_b(gemm, gemm.n * gemm.k))
    alone, *timings = Stopwatch(ROUNDS, BUDGET_MS).time(runs_on(b, kernels(task, found)))
    return {
        "m": m,
        "n": gemm.n,
        "k": gemm.k,
        "epilogue": gemm.epilogue,
        "us_mm_alone": round(alone.us, 2),
        "us": {str(c): round(t.us, 2) for c, t in zip(found, timings) if isinstance(t, Timing)},
        "failed": {str(c): str(t) for c, t in zip(found, timings) if not isinstance(t, Timing)},
    }


def problem_of(record: dict[str, Any]) -> Problem:
    """What was measured."""
    return Gemm(record["n"], record["k"], record["epilogue"]).problem(record["m"])


def shortfall(record: dict[str, Any], limit: int = LIMIT) -> float:
    """The time of the best of the first `limit` candidates, as ranked now, over that of the best of all."""
    ranked = tiled_candidates(problem_of(record), TARGET, program(record["epilogue"]), limit)
    times = [record["us"][str(candidate)] for candidate in ranked if str(candidate) in record["us"]]
    return min(times, default=math.inf) / min(record["us"].values())


def summary(shortfalls: Sequence[float]) -> str:
    """The shortfalls of all problems in one line."""
    mean, over = statistics.geometric_mean(shortfalls), sum(ratio > FAR for ratio in shortfalls)
    return (
        f"{len(shortfalls)} problems: the best of the top {LIMIT} takes {mean:.4f} times the best of all "
        f"(geometric mean); {max(shortfalls):.3f} at worst; more than {FAR} in {over}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the records, or checks the ranking against those on file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--check" in arguments:
        records = json.loads(RESULTS.read_text(encoding="utf-8"))["records"]
        ranked = sorted(((shortfall(record), record) for record in records), key=lambda pair: -pair[0])
        for behind, record in ranked:
            best = min(record["us"], key=record["us"].get)
            size = f"{record['m']:5} {record['n']:6} {record['k']:6}"
            print(f"{behind:.3f} {size} {record['epilogue']:9} {record['us'][best]:8.1f} us  {best}")
        print(summary([behind for behind, _ in ranked]))
        return
    output = Path(arguments[0]) if arguments else RESULTS
    todo = tasks()
    compile_all((task, every_candidate(task[0].problem(task[1]), task[0].epilogue)) for task in todo)
    results = track(over_gpus(measure, todo), "timing", len(todo), disable=not sys.stderr.isatty())
    records = sorted(results, key=lambda record: (record["m"], record["n"], record["k"], record["epilogue"]))
    about = {"gpu": torch.cuda.get_device_name(), "target": str(current_target()), "versions": versions()}
    write_rows(output, about, "records", records)
    print(summary(list(map(shortfall, records))))


if __name__ == "__main__":
    main()
