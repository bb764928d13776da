"""What differs between torch versions, and which versions are known at all."""

from __future__ import annotations

import functools
import inspect
import logging
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger("nvgemm_fusion")

OLDEST = (2, 11)
NEWEST = (2, 15)


@functools.lru_cache(maxsize=1)
def is_supported() -> bool:
    """Whether this torch is one that the extension points have been seen to work with. Says so once when not."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if OLDEST <= (major, minor) <= NEWEST:
        return True
    logger.warning(
        "epilogue fusion stays off: torch %s is not one of %d.%d to %d.%d", torch.__version__, *OLDEST, *NEWEST
    )
    return False


def config_entry(name: str, **description: Any) -> Any:
    """An entry for a configuration module, from the keywords of `torch.utils._config_module.Config`.

    2.11 makes it of the description alone, later versions also want its name.
    """
    from torch.utils._config_module import Config, _ConfigEntry

    names = (name,) if "name" in inspect.signature(_ConfigEntry).parameters else ()
    return _ConfigEntry(Config(**description), *names)


def complete(scheduler: Any) -> None:
    """Gives a scheduler under construction what it has only after our pass, and is asked for when a kernel is
    generated: in later versions, whether nodes run on several streams, and in which memory pools they are. Those of a
    contest have none of their own (see `is_placed`)."""
    for name, nothing in (("_multi_stream_nodes", False), ("node_to_mempool", {}), ("buff_to_mempool", {})):
        if not hasattr(scheduler, name):
            setattr(scheduler, name, nothing)


def is_placed(node: Any) -> bool:
    """Whether the program itself says on which stream a scheduler node runs, or in which memory pool its result lies.
    Older versions know of neither."""
    operations = [part.node for part in node.get_nodes() if part.node is not None]
    questions = ("get_stream_idx", "get_mempool")
    return any(getattr(operation, name, lambda: None)() is not None for operation in operations for name in questions)


def forget_config_hash(config: ModuleType) -> None:
    """Has a configuration module compute its hash anew. From 2.12 on it keeps none."""
    if "_is_dirty" in config._bypass_keys:
        config._is_dirty = True
