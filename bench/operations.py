"""Every op on a GPU, against float64 and against Inductor's own Triton kernel; and the page of operations.

    python -m nvgemm_fusion.bench.operations [OUTPUT]      (default: bench/results/h200-operations.json)
    python -m nvgemm_fusion.bench.operations --page        writes docs/operations.md; needs no GPU

An op is measured by a kernel of its own: a GEMM whose epilogue ignores the product and applies the op to tiles. An
error counts in ulp of the exact result, where that is a normal number of float32. At special values (NaN, infinities,
zeros) and wherever a result is one, ours has to be what Inductor's kernel makes of the same operands, or eager torch:
Triton 3.6 negates by subtracting from +0, and its remainder of an infinity is not a NaN.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..fusion.ops import BOOL, FLOAT, INTEGER, OPS, kind_of
from ..fusion.program import EpilogueProgram, Major, Operand, OperandKind, ProgramBuilder, Store, dtype_name
from ..fusion.reference import evaluate
from ..lowering.compiler import CompiledKernel, KernelCompiler
from ..lowering.expressions import ERRORS
from ..lowering.kernel import Candidate, KernelSpec
from ..lowering.launcher import bind
from ..lowering.packages import versions
from ..lowering.providers import QUACK
from ..lowering.store import KernelStore
from .operations_page import PAGE, RESULTS, page

M = N = 512
CANDIDATE = Candidate(QUACK, 64, 32)
DTYPES = {FLOAT: [torch.float32], INTEGER: [torch.int8, torch.uint8, torch.int32], BOOL: [torch.bool]}
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
SPECIALS = [math.nan, math.inf, 0.0, 0.5, 1.0, 1.5, 2.5, 3.0, LARGEST, SMALLEST]
SPECIALS += [-value for value in SPECIALS[1:]]
ANY_ZERO = ("maximum", "minimum", "relu")
"""Ops whose zeros have either sign: see `fusion.ops`."""
SHOWN = 4
"""How many of an op's mismatches are kept."""


@dataclass(frozen=True)
class Case:
    """One op in one dtype: its program over tiles, and the tiles."""

    name: str
    dtype: torch.dtype
    program: EpilogueProgram
    operands: tuple[torch.Tensor, ...]

    @property
    def spec(self) -> KernelSpec:
        """The kernel. It has to run on the GPU that is here, where the number of clusters is asked for at launch."""
        return KernelSpec(CANDIDATE, torch.bfloat16, Major.ROW, Major.COLUMN, self.program, "sm_90a", 132)


def cases(device: str) -> Iterator[Case]:
    """Every op in every dtype in which it is measured, with tensors on `device`."""
    generator = torch.Generator().manual_seed(0)
    for name, op in OPS.items():
        for dtype in (dtype for kind in op.takes for dtype in DTYPES[kind]):
            builder = ProgramBuilder()
            tiles = [builder.operand(i, Operand(OperandKind.TILE, dtype)) for i in range(op.arity)]
            inputs = [builder.convert(tiles[0], torch.bool), *tiles[1:]] if name == "where" else tiles
            value = builder.convert(builder.op(name, *inputs), torch.float32)
            program, _ = builder.build([Store(value, torch.float32)])
            operands = tuple(_spread(dtype, i, generator).to(device) for i in range(op.arity))
            yield Case(name, dtype, program, operands)


def compiled(measured: Sequence[Case], store: KernelStore, workers: int) -> list[CompiledKernel]:
    """The kernels of `measured`, in order. Raises RuntimeError for one that does not compile."""
    compiler = KernelCompiler(store, workers)
    try:
        kernels = compiler.compile([case.spec for case in measured])
    finally:
        compiler.close()
    for case, kernel in zip(measured, kernels):
        if not isinstance(kernel, CompiledKernel):
            raise RuntimeError(f"{case.name} of {case.dtype}: {kernel}")
    return kernels


def run(case: Case, kernel: CompiledKernel) -> torch.Tensor:
    """What `kernel` makes of the operands: (M, N), float32."""
    zeros = torch.zeros(M, 64, dtype=torch.bfloat16, device="cuda")
    result = torch.full((M, N), math.nan, device="cuda")
    bind(kernel)(zeros, zeros.t(), *case.operands, result)
    return result


def by_inductor(measured: Sequence[Case]) -> list[torch.Tensor]:
    """What Inductor makes of the operands of each: (M, N), float32. One kernel an op, compiled in parallel."""
    counts = [(case.name, len(case.operands)) for case in measured]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results, start = [], 0
        for name, count in counts:
            first, others = tensors[start], tensors[start + 1 : start + count]
            results.append(OPS[name].reference(first != 0 if name == "where" else first, *others).float())
            start += count
        return results

    one_by_one = torch.compile(function, dynamic=False, options={"max_fusion_size": 1})
    return one_by_one(*(tensor for case in measured for tensor in case.operands))


def compare(case: Case, result: torch.Tensor, inductor: torch.Tensor | None) -> dict[str, Any]:
    """The record of one case. inductor: what Inductor makes of it, None for what has no special values.

    ulp: the largest error, at the operands `at`. beyond: by how much the documented bound is exceeded at most, where a
    correct rounding is granted half an ulp; 0 where it is kept. mismatches: how often a special value is neither
    Inductor's nor eager's, with some of them in `examples` as [operands, ours, Inductor's]. as_eager: how often it is
    eager's and not Inductor's.
    """
    product = torch.zeros(M, N, device=result.device)
    (exact,), (eager,) = (evaluate(case.program, product, case.operands, to) for to in (torch.float64, torch.float32))
    inductor = eager if inductor is None else inductor
    operands = [operand.double() for operand in case.operands]
    error = ERRORS[case.name]
    normal = exact.isfinite() & (exact.abs() >= SMALLEST) & (exact.abs() <= LARGEST)
    if kind_of(case.dtype) != FLOAT:
        normal |= exact == 0
    ulps = torch.where(normal, (result.double() - exact).abs() / _ulp(exact), 0.0).nan_to_num(math.inf, math.inf)
    beyond = ulps - (error.ulp + 0.5 + error.grows * operands[0].abs().nan_to_num(0.0, 0.0, 0.0))
    worst = int(ulps.argmax())
    special = ~exact.isfinite() | (exact == 0) | (exact.abs() > LARGEST)
    for operand in operands:
        special |= ~operand.isfinite() | (operand == 0)
    # Inductor's kernels take subnormal numbers for zero here and there.
    for tensor in (*operands, exact):
        special &= (tensor == 0) | ~(tensor.abs() < SMALLEST)
    unlike_eager, unlike_inductor = (special & (_kind(result) != _kind(theirs)) for theirs in (eager, inductor))
    wrong = unlike_eager & unlike_inductor
    if case.name in ANY_ZERO:
        wrong &= (result != 0) | (inductor != 0)
    return {
        "ulp": round(ulps.max().item(), 3),
        "at": [repr(operand.flatten()[worst].item()) for operand in operands],
        "beyond": round(max(0.0, beyond.max().item()), 3),
        "compared": int(normal.sum()),
        "mismatches": int(wrong.sum()),
        "as_eager": int((unlike_inductor & ~unlike_eager).sum()),
        "examples": [
            [[repr(operand.flatten()[i].item()) for operand in operands], *(repr(t.flatten()[i].item()) for t in pair)]
            for pair in [(result, inductor)]
            for i in wrong.flatten().nonzero().flatten()[:SHOWN].tolist()
        ],
    }


def measure(workers: int | None = None) -> dict[str, Any]:
    """The records of all ops by name and dtype, and what they were measured with."""
    measured = list(cases("cuda"))
    kernels = compiled(measured, KernelStore(), workers or len(os.sched_getaffinity(0)))
    of_floats = [case for case in measured if case.dtype == torch.float32]
    inductor = {case.name: result for case, result in zip(of_floats, by_inductor(of_floats))}
    records: dict[str, dict[str, Any]] = {}
    for case, kernel in zip(measured, kernels):
        theirs = inductor[case.name] if case.dtype == torch.float32 else None
        records.setdefault(case.name, {})[dtype_name(case.dtype)] = compare(case, run(case, kernel), theirs)
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "versions": versions(), "ops": records}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or writes the page. Exits with 1 when an error is larger than documented or a special value wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--page" in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return
    results = measure()
    faults = 0
    for name, records in results["ops"].items():
        for dtype, record in records.items():
            fault = bool(record["beyond"] or record["mismatches"])
            faults += fault
            print(f"{name:20} {dtype:8} {record['ulp']:10.3f} ulp at {', '.join(record['at'])}", "WRONG" * fault)
            if fault:
                print(f"    beyond: {record['beyond']}, mismatches: {record['mismatches']} {record['examples']}")
    output = Path(arguments[0]) if arguments else RESULTS
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if faults else 0)


def _spread(dtype: torch.dtype, index: int, generator: torch.Generator) -> torch.Tensor:
    """Operand `index` of an op, (M, N): ordinary numbers, numbers of every magnitude, and at the beginning all
    combinations of special values with those of the other operands."""
    if kind_of(dtype) == FLOAT:
        ordinary = 3 * torch.randn(M * N, generator=generator)
        exponent = 252 * torch.rand(M * N, generator=generator) - 126
        values = torch.where(torch.rand(M * N, generator=generator) < 0.5, ordinary, ordinary.sign() * exponent.exp2())
        specials = torch.tensor(SPECIALS)
    else:
        limits = torch.iinfo(torch.int8 if dtype == torch.bool else dtype)
        large = torch.randint(limits.min, limits.max + 1, (M * N,), generator=generator)
        small = torch.randint(-8, 9, (M * N,), generator=generator)
        values = torch.where(torch.rand(M * N, generator=generator) < 0.5, small, large)
        specials = torch.tensor([limits.min, limits.max, -1, 0, 1, 2, 7, 8, 31, 32])
    count = len(specials)
    place = torch.arange(count**3) // count**index % count
    values[: count**3] = specials[place]
    return (values if dtype != torch.bool else values % 2).to(dtype).reshape(M, N)


def _ulp(exact: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring float32 numbers at `exact` (float64)."""
    return torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 24)


def _kind(result: torch.Tensor) -> torch.Tensor:
    """A number for each: NaN, the infinities, the zeros, and what is ordinary."""
    kind = result.isnan() * 1 + result.isinf() * 2 + (result == 0) * 3
    return torch.where(result.isnan() | (kind == 0), kind, kind + 4 * torch.signbit(result))


if __name__ == "__main__":
    main()
