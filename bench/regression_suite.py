"""Suite: a Python file with a generator `graphs` that yields (name, callable of tensors, inputs on the CPU)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .baseline import WrongUse, printable

SEED = 0
MODULE_NAME = "nvgemm_fusion_suite"
END = object()


@dataclass(frozen=True)
class SuiteGraph:
    """One graph of a suite: a function or module, and the tensors that it is called with."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]


def load(path: Path | None) -> Iterator[SuiteGraph]:
    """The graphs of the suite in a file, or of ours for None, made one at a time from seeded random numbers.

    While the suite is in use, what lies beside the file can be imported. Raises WrongUse, also in the midst of the
    graphs, for a suite that cannot be imported or yields anything else.
    """
    if path is None:
        from . import regression_graphs

        yield from _graphs(regression_graphs, "the suite")
        return
    if not path.is_file() or path.suffix != ".py":
        raise WrongUse(f"there is no suite {path}: --suite takes a Python file with a generator `graphs`")
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        yield from _graphs(_module(path), f"the suite {path}")
    finally:
        sys.path.remove(str(path.parent.resolve()))


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # Dynamo looks up the module of a function by name
    with _blamed_on(f"the suite {path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _graphs(module: ModuleType, suite: str) -> Iterator[SuiteGraph]:
    function, names = getattr(module, "graphs", None), set()
    if not callable(function):
        raise WrongUse(f"{suite} has no generator `graphs` that yields (name, callable, inputs)")
    with _blamed_on(f"{suite} fails in graphs()"):
        remaining = iter(function())
    while True:
        # Each graph is seeded by itself, so that its inputs stay when another one comes or goes.
        with _blamed_on(f"{suite} fails in graphs()"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            entry = next(remaining, END)
        if entry is END:
            break
        graph = _checked(entry, f"{suite}, graph {len(names) + 1}")
        if graph.name in names:
            raise WrongUse(f"{suite} has two graphs {graph.name!r}: give each a name of its own")
        names.add(graph.name)
        yield graph
    if not names:
        raise WrongUse(f"{suite} yields no graph")


def _checked(entry: Any, where: str) -> SuiteGraph:
    if not isinstance(entry, tuple) or len(entry) != 3:
        raise WrongUse(f"{where}: graphs() must yield (name, callable, inputs), not {type(entry).__name__}")
    name, function, inputs = entry
    if not isinstance(name, str) or not name.strip() or printable(name) != name:
        raise WrongUse(f"{where}: a name must be printable text on one line, not {name!r:.80}")
    if not callable(function):
        raise WrongUse(f"{where}: {name!r} must come with something to call, not {type(function).__name__}")
    if not isinstance(inputs, (tuple, list)) or not all(
        isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs
    ):
        raise WrongUse(f"{where}: the inputs of {name!r} must be a tuple of tensors on the CPU")
    return SuiteGraph(name, function, tuple(inputs))


@contextmanager
def _blamed_on(what: str) -> Iterator[None]:
    """Whatever the suite's own code raises, as one line that says where."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise WrongUse(f"{what}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """The kind of an error and its message, on one line."""
    return printable(f"{type(error).__name__}: {error}").removesuffix(": ")
