"""Our entries of `torch._inductor.config`: real ones, so that `config.patch`, environment variables and Inductor's
cache key treat them as any other."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

from ..lowering.packages import DISTRIBUTION, installed_versions, missing_libraries
from .torch_versions import config_entry, forget_config_hash

logger = logging.getLogger("nvgemm_fusion")

ENVIRONMENT_PREFIX = "TORCHINDUCTOR_"


@dataclass(frozen=True)
class Setting:
    """One entry. Its environment variable is TORCHINDUCTOR_ and the name in capitals; a set value comes first."""

    name: str
    value_type: Any
    default: Any
    description: str


CANDIDATES = 6
"""Where ten competed (`bench/results/h200-suite.json` at aa98533), the fastest alternative is 0.005 % faster than with
six in the geometric mean of all GEMMs, and 0.5 % at most. To compile ten takes two thirds more. Torch's
`nvgemm_max_profiling_configs`, 5 or 10 by its version, is for its own kernels."""
SETTINGS = (
    Setting("nvgemm_epilogue_fusion", bool, False, "fuse pointwise work into CuTe DSL GEMMs where it measures faster"),
    Setting("nvgemm_fusion_log", Optional[str], None, "file to which decisions are appended, one JSON object a line"),
    Setting("nvgemm_fusion_cache", bool, True, "keep measured decisions on disk, and use those that are there"),
    Setting("nvgemm_fusion_verify", str, "off", "compare results with the reference: off, first (call), always"),
    Setting("nvgemm_fusion_benchmark_ms", int, 150, "how long the stopwatch may run for one GEMM, in milliseconds"),
    Setting(
        "nvgemm_fusion_candidates",
        Optional[int],
        CANDIDATES,
        "how many of our kernels compete for a GEMM, and as many with each of its regions; None: all",
    ),
    Setting("nvgemm_fusion_force", bool, False, "debugging: fuse wherever it is legal, whatever it costs"),
)

VERSION_ENTRY = "nvgemm_fusion_version"
"""Not a setting: what this package and its kernels' compilers are, so that Inductor's caches tell them apart."""


def add_entries(config: ModuleType) -> None:
    """Adds our entries to the module `torch._inductor.config`; those that are there stay as they are."""
    for setting in SETTINGS:
        if setting.name not in config._config:
            config._config[setting.name] = config_entry(
                setting.name, value_type=setting.value_type, **_default(setting)
            )
    if VERSION_ENTRY not in config._config:
        config._config[VERSION_ENTRY] = config_entry(VERSION_ENTRY, default=version(), value_type=str)
    forget_config_hash(config)


def _default(setting: Setting) -> dict[str, Any]:
    """The default of an entry and where the environment changes it, as a configuration module wants to be told."""
    variable = ENVIRONMENT_PREFIX + setting.name.upper()
    if setting.value_type not in (int, Optional[int]):
        return {"default": setting.default, "env_name_default": variable}
    # The modules read no numbers from the environment, so it is read here.
    value = os.environ.get(variable, "")
    if value and not value.isdecimal():
        logger.warning("%s has to be a whole number, not %r: it stays %d", variable, value, setting.default)
    return {"default": int(value) if value.isdecimal() else setting.default}


def remove_entries(config: ModuleType) -> None:
    """Takes our entries out again."""
    for name in (*(setting.name for setting in SETTINGS), VERSION_ENTRY):
        config._config.pop(name, None)
    forget_config_hash(config)


def current_values() -> dict[str, Any]:
    """Our settings as they stand in this process; empty when they are not there. Imports Inductor's configuration."""
    from torch._inductor import config

    return {setting.name: getattr(config, setting.name) for setting in SETTINGS if setting.name in config._config}


def version() -> str:
    """The installed version, a digest of the source (an editable install changes without a version), what kernels are
    compiled with, and which library of ours is missing."""
    digest = hashlib.sha256()
    for folder in ("fusion", "lowering", "scheduler_hooks"):
        for path in sorted((Path(__file__).parent.parent / folder).glob("*.py")):
            digest.update(path.read_bytes())
    digest.update(repr((installed_versions(), missing_libraries())).encode())
    return f"{importlib.metadata.version(DISTRIBUTION)}+{digest.hexdigest()[:16]}"
