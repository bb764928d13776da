"""Connecting to Inductor's extension points, and letting go of them again.

Each of the three modules that we extend is connected right after it has been imported (see `autoload`). Nothing
that happens here may make an import fail: whatever goes wrong is said once, and Inductor stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import autoload, torch_versions

logger = logging.getLogger("nvgemm_fusion")

_disconnect: dict[str, Callable[[], None]] = {}
"""For each connected module, what takes our part out of it."""


def install() -> None:
    """Connects to Inductor: done by `import torch` unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 forbids it."""
    autoload.autoload()


def uninstall() -> None:
    """Takes everything out of Inductor again, and the import hook with it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, autoload.AfterImport)]
    while _disconnect:
        _disconnect.popitem()[1]()


def extension_points() -> dict[str, bool]:
    """Each place where we reach into Inductor, and whether it is there and connected. Imports Inductor."""
    for name in autoload.EXTENDED_MODULES:
        importlib.import_module(name)
    config = sys.modules[autoload.CONFIG]
    points = {name: name in _disconnect for name in autoload.EXTENDED_MODULES}
    return {**points, f"{autoload.CONFIG}._pre_fusion_custom_pass": "_pre_fusion_custom_pass" in config._config}


def connect(name: str) -> None:
    """Connects to the Inductor module `name`, which has just been imported. Once is enough."""
    if name in _disconnect or not torch_versions.is_supported():
        return
    try:
        _disconnect[name] = _CONNECTORS[name]()
    except ModuleNotFoundError as error:
        _say_what_is_missing(str(error.name).partition(".")[0])
    except Exception:  # an import of Inductor must not fail because of us
        logger.warning("epilogue fusion is off: cannot connect to %s", name, exc_info=True)


@functools.lru_cache(maxsize=None)
def _say_what_is_missing(package: str) -> None:
    """Once a package, however many modules need it."""
    logger.warning("epilogue fusion is off: `pip install %s`, which nvgemm-epilogue-fusion needs", package)


def _connect_config() -> Callable[[], None]:
    from torch._inductor import config

    from . import settings

    settings.add_entries(config)
    return lambda: settings.remove_entries(config)


def _connect_select_algorithm() -> Callable[[], None]:
    from torch._inductor.select_algorithm import add_preprocessing_fn, get_algorithm_selector_cache

    from . import choices  # noqa: F401  where one of our libraries is missing, nothing is connected

    add_preprocessing_fn(_add_candidates)
    with contextlib.suppress(Exception):  # it is a head start, and no more
        _expect_kernels()
    return lambda: get_algorithm_selector_cache().preprocessing_fns.remove(_add_candidates)


def _connect_scheduling() -> Callable[[], None]:
    from torch._inductor.codegen.common import device_codegens, register_backend_for_device
    from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
    from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    from . import codegen  # noqa: F401

    former, wrappers = device_codegens.get("cuda"), (PythonWrapperCodegen, CppWrapperGpu, WrapperFxCodegen)
    register_backend_for_device("cuda", _scheduling, *wrappers)

    def restore() -> None:
        register_backend_for_device("cuda", CUDACombinedScheduling, *wrappers)
        if former is not None:
            device_codegens["cuda"] = former

    return restore


# What stays with Inductor asks our modules when it is called. When it is connected, one of them may have come no
# further than to its import of Inductor.


def _add_candidates(choices: list[Any]) -> list[Any]:
    from .choices import add_candidates

    return add_candidates(choices)


def _scheduling(scheduler: Any) -> Any:
    """The backend that `config.cuda_backend` asks for: ours extends Triton's, the others stay as they are."""
    from torch._inductor import config

    if config.cuda_backend == "triton":
        from .codegen import FusionScheduling

        return FusionScheduling(scheduler)
    if config.cuda_backend == "halide":
        from torch._inductor.codegen.halide import HalideScheduling

        return HalideScheduling(scheduler)
    from torch._inductor.codegen.pallas import PallasScheduling

    return PallasScheduling(scheduler)


def _expect_kernels() -> None:
    """Starts the compilers' imports beside Inductor's own, where no kernel is on disk yet: there will be candidates to
    compile. Of a flag that only a single compile gets, in its options, nothing is known yet."""
    from torch._inductor import config

    from ..lowering.compiler import shared_compiler
    from ..lowering.packages import missing_packages
    from ..lowering.targets import Target, current_target

    if config.nvgemm_epilogue_fusion and not missing_packages() and torch.cuda.is_initialized():
        if isinstance(current_target(), Target):
            shared_compiler(config.compile_threads).expect()


_CONNECTORS = {
    autoload.CONFIG: _connect_config,
    autoload.SELECT_ALGORITHM: _connect_select_algorithm,
    autoload.CUDA_SCHEDULING: _connect_scheduling,
}
