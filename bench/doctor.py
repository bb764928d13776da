"""Whether epilogue fusion can work here: what is installed, what fits, and what to do where it does not."""

from __future__ import annotations

import enum
import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from packaging.requirements import Requirement

from ..fusion.problem import Problem
from ..fusion.program import ACCUMULATOR, Major, ProgramBuilder, Store
from ..fusion.reasons import Refusal
from ..lowering.candidates import candidates
from ..lowering.compiler import CompiledKernel, KernelCompiler
from ..lowering.heuristics import estimates
from ..lowering.kernel import KernelSpec
from ..lowering.packages import DISTRIBUTION
from ..lowering.store import DIRECTORY_VARIABLE, KernelStore
from ..lowering.targets import TARGETS, Target, current_target
from ..scheduler_hooks import install, settings


class State(str, enum.Enum):
    """What a finding means: fine, a note to be read, or a fault that keeps fusion from working."""

    FINE = "fine"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it (empty where nothing is to be done)."""

    name: str
    state: State
    found: str
    fix: str = ""


def examine(virtual: bool = False) -> Iterator[Finding]:
    """All findings. With `virtual`, a missing GPU is no fault: the virtual device is all that is wanted."""
    yield from _packages()
    yield _gpu(virtual)
    yield from _extension_points()
    yield _flag()
    yield _cache()
    yield _heuristics()
    yield _compiler()


def _packages() -> Iterator[Finding]:
    """What the distribution requires (without its extras), against what is installed."""
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, State.FAULT, "not installed", f"pip install '{wanted}'")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        fix = "" if fits else f"pip install '{wanted}'"
        yield Finding(requirement.name, State.FINE if fits else State.FAULT, version, fix)


def _gpu(virtual: bool) -> Finding:
    missing = State.NOTE if virtual else State.FAULT
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (torch is a build for the CPU)"
        fix = "plans, logs and checks work on the virtual device: nvgemm-fusion doctor --virtual"
        return Finding("GPU", missing, f"no CUDA GPU{built}", fix)
    driver = torch._C._cuda_getDriverVersion()
    supports = f"{driver // 1000}.{driver % 1000 // 10}"
    found = f"{torch.cuda.get_device_name()}, torch for CUDA {torch.version.cuda}, driver for CUDA {supports}"
    target = current_target()
    if not isinstance(target, Target):
        known = ", ".join(name for name, target in TARGETS.items() if target.measured)
        return Finding("GPU", missing, found, f"kernels are made for {known}; stock code runs here")
    return Finding("GPU", State.FINE, f"{found}, target {target.name} ({target.arch})")


def _extension_points() -> Iterator[Finding]:
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    fix = "unset TORCH_DEVICE_BACKEND_AUTOLOAD" if autoload == "0" else "install a torch that is known: see torch above"
    for name, connected in install.extension_points().items():
        yield Finding(
            name.removeprefix("torch._inductor."),
            State.FINE if connected else State.FAULT,
            "connected" if connected else "not connected",
            "" if connected else fix,
        )


def _flag() -> Finding:
    values = settings.current_values()
    if values.get("nvgemm_epilogue_fusion"):
        return Finding("the flag", State.FINE, ", ".join(f"{name}={value}" for name, value in values.items()))
    variable = f"{settings.ENVIRONMENT_PREFIX}NVGEMM_EPILOGUE_FUSION"
    return Finding("the flag", State.NOTE, "off", f"config.nvgemm_epilogue_fusion = True, or {variable}=1")


def _cache() -> Finding:
    store = KernelStore()
    try:
        store.temporary().unlink()
        kernels, size = store.size()
    except OSError as error:
        fix = f"make it writable, or set {DIRECTORY_VARIABLE} to a folder that is"
        return Finding("cache folder", State.FAULT, f"{store.directory}: {error.strerror}", fix)
    return Finding("cache folder", State.FINE, f"{store.directory}: {kernels} kernels, {size / 1e6:.1f} MB")


def _heuristics() -> Finding:
    answers = estimates(_PROBLEM, TARGETS["H200"])
    if not answers:
        fix = "reinstall nvidia-matmul-heuristics; without it, candidates are ranked by our own model alone"
        return Finding("nvMatmulHeuristics", State.NOTE, "no answer", fix)
    return Finding("nvMatmulHeuristics", State.FINE, f"{len(answers)} configurations for a problem of 4096")


def _compiler() -> Finding:
    """One small kernel, really compiled (or found, where it was compiled before)."""
    program, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
    target = TARGETS["H200"]
    best = candidates(_PROBLEM, target, program, 1)
    if isinstance(best, Refusal):
        return Finding("compiler", State.FAULT, str(best))
    compiler = KernelCompiler(KernelStore(), workers=1)
    compiled = compiler.compile([KernelSpec.of(_PROBLEM, best[0], program, target)])[0]
    compiler.close()
    if isinstance(compiled, CompiledKernel):
        how = f"in {compiled.seconds:.1f} s" if compiled.seconds else "(found in the cache)"
        return Finding("compiler", State.FINE, f"a kernel for {target.arch} {how}")
    return Finding("compiler", State.FAULT, compiled.explanation, "reinstall the kernel packages above")


_PROBLEM = Problem(4096, 4096, 4096, torch.bfloat16, Major.ROW, Major.COLUMN, "sm_90a")
