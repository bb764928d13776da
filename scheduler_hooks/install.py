"""Connecting to Inductor's extension points, and letting go of them again.

Each of the three modules that we extend is connected right after it has been imported (see `autoload`). Nothing
that happens here may make an import fail: whatever goes wrong is said once, and Inductor stays as it is. With the flag
off, it does so as well, and this module with our settings is all that is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..lowering.packages import DISTRIBUTION, missing_libraries, missing_packages
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
        missing = missing_libraries()
        if missing and name != autoload.CONFIG:
            _say_what_is_missing(missing)
        else:
            _disconnect[name] = _CONNECTORS[name]()
            with contextlib.suppress(Exception):  # it is a head start, and no more
                _expect_kernels()
    except Exception:  # an import of Inductor must not fail because of us
        logger.warning("epilogue fusion is off: cannot connect to %s", name, exc_info=True)


@functools.lru_cache(maxsize=None)
def _say_what_is_missing(libraries: tuple[str, ...]) -> None:
    """Once, however many modules cannot be connected."""
    logger.warning("epilogue fusion is off: `pip install %s`, which %s needs", " ".join(libraries), DISTRIBUTION)


def _connect_config() -> Callable[[], None]:
    from torch._inductor import config

    from . import settings

    settings.add_entries(config)
    return lambda: settings.remove_entries(config)


def _connect_select_algorithm() -> Callable[[], None]:
    from torch._inductor.select_algorithm import add_preprocessing_fn, get_algorithm_selector_cache

    add_preprocessing_fn(_add_candidates)
    return lambda: get_algorithm_selector_cache().preprocessing_fns.remove(_add_candidates)


def _connect_scheduling() -> Callable[[], None]:
    from torch._inductor.codegen.common import device_codegens, register_backend_for_device
    from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
    from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    former, wrappers = device_codegens.get("cuda"), (PythonWrapperCodegen, CppWrapperGpu, WrapperFxCodegen)
    register_backend_for_device("cuda", _scheduling, *wrappers)

    def restore() -> None:
        register_backend_for_device("cuda", CUDACombinedScheduling, *wrappers)
        if former is not None:
            device_codegens["cuda"] = former

    return restore


# What stays with Inductor asks our modules when it is called, and only where the flag is set: nobody else pays for
# their imports. They may import Inductor as well, and come no further than that when it is connected.


def _where_enabled(module: str) -> ModuleType | None:
    """Our `module`, where the flag is set and the module can be imported."""
    from torch._inductor import config

    return _imported(module) if getattr(config, "nvgemm_epilogue_fusion", False) else None


@functools.lru_cache(maxsize=None)
def _imported(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(f".{module}", __package__)
    except Exception:  # nor may a compile fail
        logger.warning("epilogue fusion is off: cannot import %s", module, exc_info=True)
    return None


def _add_candidates(choices: list[Any]) -> list[Any]:
    ours = _where_enabled("choices")
    return choices if ours is None else ours.add_candidates(choices)


def _scheduling(scheduler: Any) -> Any:
    """The backend that `config.cuda_backend` asks for: ours extends Triton's, the others stay as they are."""
    from torch._inductor import config

    if config.cuda_backend == "triton":
        ours = _where_enabled("codegen")
        if ours is not None:
            return ours.FusionScheduling(scheduler)
        from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling

        return CUDACombinedScheduling(scheduler)
    if config.cuda_backend == "halide":
        from torch._inductor.codegen.halide import HalideScheduling

        return HalideScheduling(scheduler)
    from torch._inductor.codegen.pallas import PallasScheduling

    return PallasScheduling(scheduler)


def _expect_kernels() -> None:
    """Starts the compilers' imports beside Inductor's own, where no kernel is on disk yet: there will be candidates to
    compile. The first time with Inductor's settings, which are there long before the rest of it; once more later, for a
    flag that was set in between. Of one that only a single compile gets, in its options, nothing is known yet."""
    from torch._inductor import config

    if config.nvgemm_epilogue_fusion and not missing_packages() and torch.cuda.is_initialized():
        from ..lowering.compiler import shared_compiler
        from ..lowering.targets import Target, current_target

        if isinstance(current_target(), Target):
            shared_compiler(config.compile_threads).expect()


_CONNECTORS = {
    autoload.CONFIG: _connect_config,
    autoload.SELECT_ALGORITHM: _connect_select_algorithm,
    autoload.CUDA_SCHEDULING: _connect_scheduling,
}
