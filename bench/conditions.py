"""Conditions: how much the time of each kernel depends on where B lies, and on what the GPU has done just before.

    python -m nvgemm_fusion.bench.conditions [OUTPUT]   (default: bench/results/h200-conditions.json)

A contest has B in overlapping places within memory for two (`scheduler_hooks.workload`), a model has it wherever its
allocator puts it. A GPU that is busy without a pause lowers its clocks, one that rests in between does not. Each
kernel of a few GEMMs is timed with B in PLACES places under each condition; in one window are all kernels with B in
one place. All GPUs of the machine are used.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..fusion.decision import Timing
from ..lowering.candidates import candidates
from ..lowering.kernel import Candidate
from ..lowering.packages import versions
from ..scheduler_hooks.measurement import REST
from ..scheduler_hooks.stopwatch import Stopwatch
from ..scheduler_hooks.workload import ALIGNMENT_BYTES, PLACES, place_starts
from .gpus import over_gpus
from .kernels import TARGET, Task, b_of, compile_all, kernels, random_b, runs_on
from .layers import LAYERS, Gemm, program
from .rows import write_rows

RESULTS = Path(__file__).parent / "results" / "h200-conditions.json"
CHOSEN = {
    ("Llama 3.3 70B", "qkv"): (1, 16, 256, 4096),
    ("Llama 3.3 70B", "o"): (4096,),
    ("Llama 3.1 8B", "o"): (16, 256),
    ("Llama 3.1 8B", "down"): (16, 256, 4096),
    ("Qwen3 32B", "qkv"): (16, 256),
    ("Qwen3 32B", "o"): (64, 256),
}
"""M of the layers: where contests, or a contest and the suite, have disagreed, and the same layers at another M."""
LIMIT, ROUNDS, BUDGET_MS = 10, 10, 2000
PAGE_BYTES = 2 << 20
"""Where torch's allocator lets a large tensor begin."""
PIECE_BYTES, SPARE_BYTES = 20 << 20, 1 << 30
"""Of memory that is full of holes: what torch's allocator takes at a time for small tensors, and what stays free."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    output = Path(arguments[0]) if arguments else RESULTS
    todo = [(layer.gemms[-1], m) for layer in LAYERS for m in CHOSEN.get((layer.model, layer.name), ())]
    compile_all((task, _ranked(task)) for task in todo)
    results = track(over_gpus(measure, todo), "timing", len(todo), disable=not sys.stderr.isatty())
    rows = sorted(results, key=lambda row: (row["m"], row["n"], row["k"]))
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "conditions": list(CONDITIONS)}
    write_rows(output, about, "rows", rows)
    for row in rows:
        print(row["m"], row["n"], row["k"], row["epilogue"])
        for name, found in row["us"].items():
            print(f"    {name:45}", *(f"{statistics.fmean(us):8.2f} ± {statistics.stdev(us):.2f}" for us in found))


def measure(task: Task) -> dict[str, Any]:
    """The row of a GEMM: for each kernel that runs, and each condition, microseconds in every place."""
    gemm, m = task
    found = _ranked(task)
    compiled, stopwatch = kernels(task, found), Stopwatch(ROUNDS, BUDGET_MS)
    us: dict[str, list[list[float]]] = {name: [] for name in ("torch.mm", *map(str, found))}
    for places, rest in CONDITIONS.values():
        windows = [stopwatch.time(runs_on(b, compiled), rest) for b in places(gemm)]
        for name, timed in zip(us, zip(*windows)):
            us[name].append([round(one.us, 2) for one in timed if isinstance(one, Timing)])
        torch.cuda.empty_cache()
    complete = {name: times for name, times in us.items() if all(len(of) == PLACES for of in times)}
    return {"m": m, "n": gemm.n, "k": gemm.k, "epilogue": gemm.epilogue, "us": complete}


def copies(gemm: Gemm) -> Iterator[torch.Tensor]:
    """B in memory of its own each time."""
    memory = [random_b(gemm, gemm.n * gemm.k) for _ in range(PLACES)]  # all at once, so that no two are one
    yield from (b_of(gemm, of) for of in memory)


def scattered_copies(gemm: Gemm) -> Iterator[torch.Tensor]:
    """The same, allocated when memory is full of holes."""
    holes = _memory_with_holes()
    found = list(copies(gemm))
    del holes
    yield from found


def overlapping(gemm: Gemm, alignment_bytes: int) -> Iterator[torch.Tensor]:
    """B at equal distances, multiples of `alignment_bytes`, within memory for two."""
    elements = gemm.n * gemm.k
    memory = random_b(gemm, 2 * elements)
    starts = place_starts(len(memory), elements, alignment_bytes // memory.itemsize)
    yield from (b_of(gemm, memory, start) for start in starts)


def _memory_with_holes() -> list[torch.Tensor]:
    """Takes all memory in small pieces, and gives every other one back: what is allocated next lies in the holes."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    count = (free - SPARE_BYTES) // PIECE_BYTES
    pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(count)]
    del pieces[::2]
    torch.cuda.empty_cache()
    return pieces


CONDITIONS = {
    "copies": (copies, 0.0),
    "scattered copies": (scattered_copies, 0.0),
    "overlapping, from pages on": (functools.partial(overlapping, alignment_bytes=PAGE_BYTES), 0.0),
    "overlapping, anywhere": (functools.partial(overlapping, alignment_bytes=ALIGNMENT_BYTES), 0.0),
    "copies, a rested GPU": (copies, REST),
}
"""Where B lies, and how long the GPU rests after each round, in multiples of the round."""


def _ranked(task: Task) -> list[Candidate]:
    gemm, m = task
    return candidates(gemm.problem(m), TARGET, program(gemm.epilogue), LIMIT)


if __name__ == "__main__":
    main()
