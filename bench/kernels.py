"""Kernels of one GEMM, compiled by hand, as functions of B: everything else that they read is random."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from rich.progress import track

from ..fusion.program import OperandKind
from ..fusion.reasons import Refusal
from ..lowering.compiler import CompiledKernel, KernelCompiler
from ..lowering.kernel import Candidate, KernelSpec
from ..lowering.launcher import Launcher, bind
from ..lowering.store import KernelStore
from ..lowering.targets import TARGETS
from ..scheduler_hooks.stopwatch import Run
from .layers import Gemm, program

TARGET = TARGETS["H200"]
Task = tuple[Gemm, int]
"""A GEMM and its M."""
Kernel = Callable[[torch.Tensor], None]
"""Computes the GEMM and its epilogue with the B (K, N) that it is given, in column-major order."""


def compile_all(todo: Iterable[tuple[Task, Sequence[Candidate]]]) -> None:
    """Compiles the candidates of each task, on all cores."""
    specs = {spec.key: spec for task, candidates in todo for spec in (_spec(task, of) for of in candidates)}
    compiler = KernelCompiler(KernelStore(), len(os.sched_getaffinity(0)))
    try:
        futures = [compiler.submit(spec) for spec in specs.values()]
        for future in track(futures, "compiling", disable=not sys.stderr.isatty()):
            future.result()
    finally:
        compiler.close()


def kernels(task: Task, candidates: Sequence[Candidate]) -> list[Kernel | Refusal]:
    """The product alone by `torch.mm`, then each candidate with the epilogue, or why it does not compile."""
    gemm, m = task
    problem, epilogue = gemm.problem(m), program(gemm.epilogue)
    a = torch.randn(m, gemm.k, dtype=problem.dtype, device="cuda")
    sizes = {OperandKind.TILE: (m, gemm.n), OperandKind.ROW: (gemm.n,)}
    operands = [torch.randn(sizes[x.kind], dtype=x.dtype, device="cuda") for x in epilogue.operands]
    result = torch.empty(m, gemm.n, dtype=problem.dtype, device="cuda")

    def kernel(candidate: Candidate) -> Kernel | Refusal:
        launch = _launcher(_spec(task, candidate))
        return launch if isinstance(launch, Refusal) else lambda b: launch(a, b, *operands, result)

    return [lambda b: torch.mm(a, b, out=result), *map(kernel, candidates)]


def runs_on(b: torch.Tensor, found: Sequence[Kernel | Refusal]) -> list[Run | Refusal]:
    """What the stopwatch takes: each kernel with this B."""
    return [kernel if isinstance(kernel, Refusal) else functools.partial(kernel, b) for kernel in found]


def random_b(gemm: Gemm, elements: int) -> torch.Tensor:
    """So many elements, one after the other, scaled so that the product has unit variance."""
    return torch.randn(elements, dtype=gemm.problem(1).dtype, device="cuda").mul_(1 / math.sqrt(gemm.k))


def b_of(gemm: Gemm, memory: torch.Tensor, start: int = 0) -> torch.Tensor:
    """B (K, N) in column-major order, from element `start` of `memory` on."""
    return memory.as_strided((gemm.k, gemm.n), (1, gemm.k), start)


def _spec(task: Task, candidate: Candidate) -> KernelSpec:
    gemm, m = task
    return KernelSpec.of(gemm.problem(m), candidate, program(gemm.epilogue), TARGET)


@functools.lru_cache(maxsize=None)
def _launcher(spec: KernelSpec) -> Launcher | Refusal:
    compiled = _compiler().compile([spec])[0]
    return bind(compiled) if isinstance(compiled, CompiledKernel) else compiled


@functools.lru_cache(maxsize=None)
def _compiler() -> KernelCompiler:
    return KernelCompiler(KernelStore(), 1)
