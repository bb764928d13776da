"""Launchers: a compiled kernel bound to a function of tensors, ready to be called from generated code.

Generated code calls `load_kernel` once, when it is loaded, and the launcher it returns with each run. All checking
happens before the first: a launcher packs its arguments and calls the compiled function, which reads sizes and
addresses from the tensors, checks them against what it was compiled for, and launches on the current stream.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import torch

from ..fusion.program import EpilogueProgram, OperandKind
from ..fusion.reasons import Reason, Refusal, described
from . import cublaslt
from .compiler import CompiledKernel, KernelCompiler, shared_compiler
from .emit import CARRIERS, carrier
from .kernel import KernelSpec
from .library import load
from .providers import OPERATORS, SKINNY
from .residency import resident_clusters
from .verification import compute, verified

logger = logging.getLogger("nvgemm_fusion")

Launcher = Callable[..., None]
"""launcher(a, b, *operands, *outputs): a (M, K), b (K, N), the operands and outputs in the program's order."""
Crossing = Callable[[Sequence[torch.Tensor]], Sequence[Any]]
"""From operands and outputs to what a compiled function takes in their places."""

_SWIZZLE = 8
"""The width, in tiles, of the band in which QuACK's scheduler walks over the product (its own default)."""

_loader = ThreadPoolExecutor(1, thread_name_prefix="nvgemm-load")
"""Loads kernels while generated code goes on. TVM-FFI's imports and the kernel take 35 ms on an H200's host, and the
first product of cuBLAS's, with which a graph may begin, takes 0.2 s without Python."""


@lru_cache(maxsize=None)
def load_kernel(spec_json: str, verify: str = "off") -> Launcher:
    """The launcher of the kernel that `spec_json` (a KernelSpec as JSON) describes, on the current device. It is there
    at once, and its first call waits for the kernel.

    That is found in the store, or compiled now. Where neither works, where the kernel does not load, and where it was
    found to be wrong, torch computes what it would have: a model goes on, slower and with a warning. verify: "first"
    and "always" compare the first result of the kernel, or each, with the reference.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    loading = _loader.submit(_loaded, KernelSpec.from_json(json.loads(spec_json)), verify, device)
    launcher = cache(loading.result)  # which takes a lock each time
    return lambda *tensors: launcher()(*tensors)


def _loaded(spec: KernelSpec, verify: str, device: int) -> Launcher:
    """device: the number of a CUDA device, negative for none."""
    compiler = shared_compiler()
    with torch.cuda.device(device):
        launch = _load(spec, compiler)
    if isinstance(launch, Refusal):
        logger.warning("torch computes, slower, what %s would: %s", spec.candidate, launch)
        return lambda *tensors: compute(spec.program, tensors)
    if verify == "off":
        return launch

    def discard(found: str) -> None:
        wrong = Refusal(Reason.WRONG_RESULT, f"{spec.candidate}: {found}")
        logger.error("%s. The kernel is not used again, until `nvgemm-fusion cache clear`", wrong)
        compiler.store.ban(spec, wrong)

    return verified(launch, spec.program, verify == "always", discard)


def _load(spec: KernelSpec, compiler: KernelCompiler) -> Launcher | Refusal:
    """The kernel, compiled and bound, or why it cannot be.

    Between the two, another process may remove the library to make room in the store. Then it is compiled once more,
    and not again and again: a store that is smaller than what its processes use at a time would never let them go on.
    """
    for _ in range(2):
        compiled = compiler.compile([spec])[0]
        if isinstance(compiled, Refusal):
            return compiled
        try:
            return bind(compiled)
        except Exception as error:  # a loader may raise anything; the model goes on
            refusal = Refusal(Reason.RUN_ERROR, described(error))
        if compiled.path is None or compiled.path.exists():
            break
    return refusal


def bind(compiled: CompiledKernel) -> Launcher:
    """The launcher of a compiled kernel on the current device. Raises what loading it raises."""
    spec = compiled.spec
    if compiled.path is None:
        return cublaslt.launcher(spec)
    function = load(compiled.path)
    if spec.candidate.provider == OPERATORS:
        return function
    cross = _crossing(spec.program)
    if spec.candidate.provider == SKINNY:
        return lambda a, b, *rest: function(a, b, tuple(cross(rest)))
    cluster_size = spec.candidate.cluster_m * spec.candidate.cluster_n
    clusters = resident_clusters(cluster_size, torch.cuda.current_device())
    return _bind_quack(function, spec, cross, clusters)


def _bind_quack(function: Callable, spec: KernelSpec, cross: Crossing, clusters: int) -> Launcher:
    # What every call passes alike. The scheduler's tuple: clusters, raster order (compiled in), swizzle, and three
    # things that plain GEMMs do not use; the epilogue's ends with split-K's semaphore and workspace.
    scheduler = (clusters, None, _SWIZZLE, None, None, None)
    count, swap_ab = len(spec.program.operands), spec.candidate.swap_ab

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> None:
        rest = cross(rest)
        first, second = (b, a) if swap_ab else (a, b)  # a kernel of the transposed product takes B in A's place
        epilogue = (*rest[:count], *rest[count + 1 :], None, None)
        function(first, second, rest[count], None, epilogue, scheduler, None, None, None)

    return launch


def _crossing(program: EpilogueProgram) -> Crossing:
    """How the operands and outputs of `program` reach a kernel: numbers as they are, scalars as addresses, and what the
    kernel does not know the dtype of as the same bytes in one that it knows."""
    single = {
        i: float if operand.kind is OperandKind.NUMBER else torch.Tensor.data_ptr
        for i, operand in enumerate(program.operands)
        if operand.kind in (OperandKind.NUMBER, OperandKind.SCALAR)
    }
    dtypes = [(operand.dtype, carrier(operand)) for operand in program.operands]
    dtypes += [(store.dtype, CARRIERS[store.dtype]) for store in program.stores]
    carried = {i: crossing for i, (dtype, crossing) in enumerate(dtypes) if crossing != dtype}

    def cross(rest: Sequence[torch.Tensor]) -> Sequence[Any]:
        if carried:
            rest = [t.view(carried[i]) if i in carried else t for i, t in enumerate(rest)]
        return [single[i](t) if i in single else t for i, t in enumerate(rest)] if single else rest

    return cross
