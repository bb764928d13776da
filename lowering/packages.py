"""The packages that kernels come from, and the libraries that we use: which are installed, and what is missing."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch

KERNEL_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-operators",
    "quack-kernels",
    "apache-tvm-ffi",
    "nvidia-matmul-heuristics",
)
"""Distributions, as pip names them. Looking them up imports none of them."""
LIBRARIES = ("filelock", "msgspec", "networkx", "platformdirs")
"""What we import besides torch and those; modules and distributions have the same names."""
DISTRIBUTION = "nvgemm-epilogue-fusion"
"""This package."""


@functools.lru_cache(maxsize=1)
def installed_versions() -> dict[str, str | None]:
    """The version of each of KERNEL_PACKAGES, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in KERNEL_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def versions() -> dict[str, str]:
    """What a decision depends on besides the GPU: torch, KERNEL_PACKAGES ("none" for what is missing), and this
    package, whose next version may have other candidates."""
    packages = {name: found or "none" for name, found in installed_versions().items()}
    return {"torch": str(torch.__version__), **packages, DISTRIBUTION: importlib.metadata.version(DISTRIBUTION)}


def missing_packages() -> list[str]:
    """Those of KERNEL_PACKAGES that are not installed."""
    return [name for name, version in installed_versions().items() if version is None]


@functools.lru_cache(maxsize=1)
def missing_libraries() -> tuple[str, ...]:
    """Those of LIBRARIES that are not installed. Imports none of them."""
    return tuple(name for name in LIBRARIES if importlib.util.find_spec(name) is None)
