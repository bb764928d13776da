"""Compile time: `torch.compile` with the flag on over stock `ATEN,TRITON`, cold and warm.

    python -m nvgemm_fusion.bench.compile_time [OUTPUT] [--rounds N] [--graphs ...]

OUTPUT: bench/results/h200-compile-time.json, unless another is named.

Each time is that of the first call of a compiled function in a process of its own, once torch has made its CUDA
context. "cold": nothing is on disk but Python's bytecode, as after an installation. "warm": what a cold process left
is, with Inductor's graphs. "changed": the same with Inductor's cache of whole graphs switched off, as when something
else in the graph has changed: it is lowered anew, but what was measured for its GEMMs counts. Off and on take turns, in
every state; medians. All GPUs of the machine are used, one for each graph.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..lowering.packages import versions
from ..scheduler_hooks.settings import ENVIRONMENT_PREFIX
from .e2e import decoder
from .gpus import over_gpus
from .layers import LAYERS
from .rows import write_rows
from .side_by_side import FUSED, STOCK

RESULTS = Path(__file__).parent / "results" / "h200-compile-time.json"
GRAPHS = ("GPT-2 XL up", "Llama 3.1 8B gate_up", "Llama 3.1 8B decoder layer")
SETTINGS = {"off": STOCK, "on": FUSED}
VARIABLE = f"{ENVIRONMENT_PREFIX}NVGEMM_EPILOGUE_FUSION"
"""The flag for a whole process, as people set it: with `options` alone, nothing is known of it before Inductor runs."""
STATES = {"cold": 1, "warm": 5, "changed": 1}
"""With the processes of each round that are measured. A warm one is short, and varies more."""
TOKENS = 1024
TARGETS = {"cold": 1.3, "warm": 1.0}
LEAST_PART_S = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the result. Exits with 1 when a graph could not be measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, choices=GRAPHS, help="these alone")
    parser.add_argument("--once", nargs=3, metavar=("GRAPH", "SETTING", "STATE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.once:
        print(json.dumps(once(*options.once)))
        return
    cores = len(os.sched_getaffinity(0)) // torch.cuda.device_count()
    about = {"gpu": torch.cuda.get_device_name(), "cores": cores, "versions": versions(), "targets": TARGETS}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as bytecode:
        for setting in SETTINGS:  # the first processes write nearly all of it, and are not measured
            with tempfile.TemporaryDirectory() as folder:
                _in_a_process(GRAPHS[0], setting, "cold", folder, bytecode)
        longest_first = [graph for graph in reversed(GRAPHS) if graph in options.graphs]
        todo = [(graph, options.rounds, bytecode) for graph in longest_first]
        for row in track(over_gpus(measure, todo), "graphs", len(todo), disable=not sys.stderr.isatty()):
            if "failed" in row:
                print(f"{row['graph']}: {row['failed']} failed; what it said is above", flush=True)
                continue
            rows.append(row)
            rows.sort(key=lambda row: GRAPHS.index(row["graph"]))
            write_rows(options.output, about, "rows", rows)
            print(f"{row['graph']}: " + ", ".join(_said(state, row[state]) for state in STATES), flush=True)
    sys.exit(1 if len(rows) < len(todo) else 0)


def measure(task: tuple[str, int, str]) -> dict[str, Any]:
    """The record of one graph: for each state the seconds of every process, their medians, and the ratio of those; and
    the parts of the last process. Where a process fails, which one: the other graphs are worth their minutes."""
    graph, rounds, bytecode = task
    seconds = {state: {setting: [] for setting in SETTINGS} for state in STATES}
    parts: dict[str, dict[str, Any]] = {state: {} for state in STATES}
    for number in range(rounds):
        with contextlib.ExitStack() as until_then:
            folders = {name: until_then.enter_context(tempfile.TemporaryDirectory()) for name in SETTINGS}
            turns = [state for state, repeats in STATES.items() for _ in range(repeats)]
            for turn, state in enumerate(turns):
                for setting in list(SETTINGS)[:: 1 if (number + turn) % 2 else -1]:
                    try:
                        found = _in_a_process(graph, setting, state, folders[setting], bytecode)
                    except subprocess.CalledProcessError:
                        return {"graph": graph, "failed": f"{state} with the flag {setting}"}
                    seconds[state][setting].append(found["seconds"])
                    parts[state][setting] = found["parts"]
    return {"graph": graph, **{state: {**_compared(seconds[state]), "parts": parts[state]} for state in STATES}}


def once(graph: str, setting: str, state: str) -> dict[str, Any]:
    """The `seconds` that the first call of `graph` takes, here and now, and its `parts` as torch accounts for them (one
    may be a part of another)."""
    function, inputs = _built(graph)
    torch.cuda.synchronize()
    options = {**SETTINGS[setting], "fx_graph_cache": state != "changed"}
    with torch.no_grad():
        started = time.perf_counter()
        torch.compile(function, dynamic=False, options=options)(*inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    from torch._dynamo.utils import compilation_time_metrics  # not before: importing it is a part of what is timed

    spent = {name: round(sum(times), 2) for name, times in compilation_time_metrics.items()}
    return {"seconds": seconds, "parts": {name: part for name, part in spent.items() if part >= LEAST_PART_S}}


def _in_a_process(graph: str, setting: str, state: str, folder: str, bytecode: str) -> dict[str, Any]:
    """`once` in a new process, whose caches are in `folder`, and whose modules' bytecode is in `bytecode`."""
    caches = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": bytecode,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "NVGEMM_FUSION_CACHE_DIR": f"{folder}/kernels",
        VARIABLE: "1" if setting == "on" else "0",
    }
    command = [sys.executable, "-m", "nvgemm_fusion.bench.compile_time", "--once", graph, setting, state]
    done = subprocess.run(command, env={**os.environ, **caches}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _built(graph: str) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    layer = next((layer for layer in LAYERS if f"{layer.model} {layer.name}" == graph), None)
    if layer is not None:
        return layer.function, layer.inputs(TOKENS)
    (block,), rotary, shape = decoder(1)
    x = torch.randn(1, TOKENS, shape.hidden_size, device="cuda").bfloat16()
    cos, sin = (table.bfloat16() for table in rotary(x, torch.arange(TOKENS, device="cuda").unsqueeze(0)))
    return lambda x, cos, sin: block(x, position_embeddings=(cos, sin)), (x, cos, sin)


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {setting: statistics.median(times) for setting, times in seconds.items()}
    rounded = {setting: [round(second, 2) for second in times] for setting, times in seconds.items()}
    return {"seconds": rounded, **medians, "ratio": round(medians["on"] / medians["off"], 3)}


def _said(state: str, of: dict[str, Any]) -> str:
    target = f" (target {TARGETS[state]})" if state in TARGETS else ""
    return f"{state} {of['off']:.1f} s off, {of['on']:.1f} s on, {of['ratio']:.2f}{target}"


if __name__ == "__main__":
    main()
