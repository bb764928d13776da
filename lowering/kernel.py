"""KernelSpec: everything that a compiled kernel depends on, as data.

A kernel is compiled for dtypes and majors, not for sizes: M, N and K, strides and addresses come with each call. So
one kernel serves every problem of its class, and a spec is small enough to stand in generated code as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram, Major, dtype_from_name, dtype_name
from .emit import emit
from .packages import installed_versions
from .targets import Target

RECIPE = ("providers.py", "skinny.py", "tf32.py", "shared_memory.py", "library.py")
"""The modules that turn a spec into a library. What another version of them has made is not used."""


@dataclass(frozen=True)
class Candidate:
    """One kernel configuration of one provider (no tile where a provider has only one kernel).

    tile_m and tile_n: the block's tile of the kernel's own output, cluster_m and cluster_n: blocks that share loads.
    With `swap_ab` the kernel computes the transposed product (its output is N by M), so tile_m runs along N.
    `pingpong`: two warp groups take turns on tiles, one computing while the other stores. split_k: in how many parts K
    is taken.
    """

    provider: str
    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    swap_ab: bool = False
    split_k: int = 1

    def __str__(self) -> str:
        if not self.tile_m:
            return self.provider
        extras = (" pingpong" if self.pingpong else "") + (" swapped" if self.swap_ab else "")
        extras += f" split {self.split_k}" if self.split_k > 1 else ""
        return f"{self.provider} {self.tile_m}x{self.tile_n} cluster {self.cluster_m}x{self.cluster_n}{extras}"


@dataclass(frozen=True)
class KernelSpec:
    """A candidate for one class of problems, with the epilogue that it carries.

    arch: the compiler's name of the target. max_active_clusters: how many clusters are resident at once, for the
    kernels that have it compiled in (those of the Operator API; QuACK's take it at launch).
    """

    candidate: Candidate
    dtype: torch.dtype
    a_major: Major
    b_major: Major
    program: EpilogueProgram
    arch: str
    max_active_clusters: int

    @classmethod
    def of(cls, problem: Problem, candidate: Candidate, program: EpilogueProgram, target: Target) -> KernelSpec:
        """The kernel of `candidate` for the class of `problem`."""
        clusters = target.max_active_clusters(candidate.cluster_m * candidate.cluster_n)
        return cls(candidate, problem.dtype, problem.a_major, problem.b_major, program, target.arch, clusters)

    @cached_property
    def key(self) -> str:
        """Names the compiled library: the spec, the source emitted for it, the compilers' versions, our use of them."""
        content = [self.to_json(), emit(self.program), installed_versions(), _recipe()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "candidate": asdict(self.candidate),
            "dtype": dtype_name(self.dtype),
            "a_major": self.a_major.value,
            "b_major": self.b_major.value,
            "program": self.program.to_json(),
            "arch": self.arch,
            "max_active_clusters": self.max_active_clusters,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KernelSpec:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        try:
            return cls(
                candidate=Candidate(**data["candidate"]),
                dtype=dtype_from_name(data["dtype"]),
                a_major=Major(data["a_major"]),
                b_major=Major(data["b_major"]),
                program=EpilogueProgram.from_json(data["program"]),
                arch=str(data["arch"]),
                max_active_clusters=int(data["max_active_clusters"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a kernel spec: {error!r}") from error


@lru_cache(maxsize=None)
def _recipe() -> str:
    """A digest of the modules of RECIPE."""
    content = b"".join(Path(__file__).with_name(name).read_bytes() for name in RECIPE)
    return hashlib.sha256(content).hexdigest()
