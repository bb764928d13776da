"""A suite, compiled graph by graph with the flag on: what was decided, and whether the results are right.

On a CUDA GPU of compute capability 9.0 for real, anywhere else for a virtual H200: there, every emitted epilogue and,
where it can be, the generated code run on the CPU, and whether a fused kernel is chosen is modelled.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import track

from ..fusion import log
from ..fusion.decision import Status
from ..lowering.packages import versions
from ..lowering.targets import current_target
from ..scheduler_hooks.virtual_device import virtual_device
from .baseline import SCHEMA, Baseline, GemmDecision, WrongUse
from .generated_code import graph_inputs, run_on_cpu
from .numerics import exact, relaid, tensors, wrong_epilogues
from .regression_suite import SuiteGraph, describe

VIRTUAL_TARGET = "H200"
OPTIONS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "nvgemm_epilogue_fusion": True,
    "nvgemm_fusion_cache": False,  # times must be those of this run
    "nvgemm_fusion_force": False,
    "shape_padding": False,  # whether it pays is measured, so what a graph looks like would change from run to run
    "fx_graph_cache": False,  # a graph that comes from the cache is not decided again
}


@dataclass(frozen=True)
class SuiteRun:
    """What a suite was compiled to.

    faults: for each graph whose results are wrong, or that fails when it is compiled, sentences about it. compared:
    the graphs whose results were compared with float64 as a whole.
    """

    decisions: Baseline
    faults: dict[str, tuple[str, ...]]
    compared: frozenset[str]


def run(graphs: Iterable[SuiteGraph], log_file: Path | None = None, count: int | None = None) -> SuiteRun:
    """Compiles and checks all of `graphs`; a bar counts them (of `count`, if that is known) where there is a terminal.

    The decisions are written to `log_file`, each with the name of its graph. Raises WrongUse for a graph that does not
    run as it stands, and for a log that cannot be written.
    """
    here = current_target()
    on_gpu = bool(here)
    terminal = Console(stderr=True)
    bar = {"total": count, "console": terminal, "transient": True, "disable": not terminal.is_terminal}
    decisions: dict[str, tuple[GemmDecision, ...]] = {}
    faults, compared = {}, set()
    with _writer(log_file) as write, torch.no_grad():
        for graph in track(graphs, "compiling", **bar):
            found, whole, records = _examine(_on_gpu(graph) if on_gpu else graph, on_gpu)
            decisions[graph.name] = tuple(map(GemmDecision.of, records))
            if found:
                faults[graph.name] = found
            if whole:
                compared.add(graph.name)
            for record in records:
                write({**record, "graph": graph.name})
    baseline = Baseline(
        schema=SCHEMA,
        versions=versions(),
        target=here.name if here else VIRTUAL_TARGET,
        times=(Status.MEASURED if on_gpu else Status.MODELLED).value,
        graphs=decisions,
    )
    return SuiteRun(baseline, faults, frozenset(compared))


def _examine(graph: SuiteGraph, on_gpu: bool) -> tuple[tuple[str, ...], bool, list[dict[str, Any]]]:
    """What is wrong with one graph, whether its result was compared as a whole, and its decision records."""
    try:
        eager = graph.function(*graph.inputs)
    except Exception as error:
        raise WrongUse(f"the graph {graph.name!r} does not run as it stands: {describe(error)}") from error
    expected = exact(graph.function, graph.inputs, eager)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        path.touch()
        try:
            outputs = (_run_on_gpu if on_gpu else _run_on_virtual_device)(graph, str(path))
        except Exception as error:
            faults, whole = [f"it fails when compiled: {describe(error)}"], False
        else:
            whole = expected is not None and outputs is not None
            fault = expected.fault(outputs, in_float64=not on_gpu) if whole else ""
            faults = [fault] if fault else []
        records = list(log.read(path))
    faults += [fault for record in records for fault in wrong_epilogues(record)]
    return tuple(faults), whole, records


def _run_on_gpu(graph: SuiteGraph, log_file: str) -> tuple[torch.Tensor, ...]:
    """What `graph`, compiled, computes on the GPU."""
    torch.compiler.reset()
    options = {**OPTIONS, "nvgemm_fusion_log": log_file}
    return tensors(torch.compile(graph.function, dynamic=False, options=options)(*graph.inputs))


def _run_on_virtual_device(graph: SuiteGraph, log_file: str) -> tuple[torch.Tensor, ...] | None:
    """What the code that is generated for `graph` computes in float64; None where it cannot be run on the CPU."""
    inputs = graph_inputs(graph.function, graph.inputs)
    options = {**OPTIONS, "nvgemm_fusion_candidates": 2, "nvgemm_fusion_log": log_file}
    with virtual_device(VIRTUAL_TARGET) as device:
        torch.compile(graph.function, dynamic=False, options=options)(*graph.inputs)
    return run_on_cpu(device.code[0], inputs) if inputs is not None and len(device.code) == 1 else None


def _on_gpu(graph: SuiteGraph) -> SuiteGraph:
    """The same graph with its inputs, and its parameters, on the GPU."""
    function = graph.function
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).to("cuda")
    return SuiteGraph(graph.name, function, tuple(relaid(tensor, torch.Tensor.cuda) for tensor in graph.inputs))


@contextlib.contextmanager
def _writer(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes decision records to a new log at `path`; to nowhere for None. Raises WrongUse when that cannot be done."""
    if path is None:
        yield lambda record: None
        return
    try:
        with path.open("wb") as lines:
            yield lambda record: lines.write(msgspec.json.encode(record) + b"\n")
    except OSError as failure:
        raise WrongUse(f"cannot write the log {path}: {failure.strerror}") from failure
