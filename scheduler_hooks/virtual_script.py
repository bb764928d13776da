"""The virtual script: somebody's program, run as it is on a GPU that is not there.

Its tensors on "cuda" are those of `fake_gpu`, `torch.cuda` answers as `virtual_cuda` does, and what it compiles goes
through `virtual_device` with our flag on, so that each GEMM is decided and logged. It runs in this process as
`python script.py arguments` would run it: as `__main__`, with its folder first on `sys.path`.
"""

from __future__ import annotations

import contextlib
import linecache
import site
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .fake_gpu import NEEDS_VALUES, NO_SHAPE_RULE, fake_gpu
from .virtual_cuda import virtual_cuda
from .virtual_device import VirtualDevice, virtual_device

SETTINGS = {
    "max_autotune_gemm": True,
    "nvgemm_epilogue_fusion": True,
    "nvgemm_fusion_cache": False,
}
"""Entries of Inductor's configuration that hold, whatever a script sets: without them no GEMM is decided."""


class CannotRun(Exception):
    """The script cannot be run on a virtual GPU; the message says in one line where and why."""


class ScriptFailed(Exception):
    """The script raised an exception; the message is its traceback, with the frames that are the user's own."""


@dataclass(frozen=True)
class ScriptRun:
    """A script that came to its end. gpu_graphs, cpu_graphs: how many graphs it had Inductor compile for each."""

    gpu_graphs: int
    cpu_graphs: int
    exit_code: int


def run_script(path: Path, arguments: Sequence[str], target: str, log: Path) -> ScriptRun:
    """Runs a script on the GPU `target` (a key of `TARGETS`), and appends what is decided to `log`.

    Raises KeyError for an unknown target, CannotRun and ScriptFailed.
    """
    code = _compiled(path)
    settings = {**SETTINGS, "nvgemm_fusion_log": str(log)}
    with virtual_gpu(target, settings) as device:
        exit_code = _run_as_main(code, path, arguments)
    return ScriptRun(len(device.code), device.cpu_graphs, exit_code)


def _compiled(path: Path) -> types.CodeType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise CannotRun(f"cannot read {path}: {error.strerror}") from error
    try:
        return compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CannotRun(f"{path}:{error.lineno or 1}: {error.msg}: this is no Python script") from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise CannotRun(f"{path}: {error}: this is no Python script") from error


@contextlib.contextmanager
def virtual_gpu(target: str, settings: dict[str, Any]) -> Iterator[VirtualDevice]:
    """Inside the block, tensors on "cuda" are fake, and what is compiled for them goes through the virtual device
    `target` with `settings`, entries of Inductor's configuration. Raises KeyError for an unknown target."""
    from torch._inductor.fx_passes import joint_graph, pad_mm
    from triton.runtime.jit import JITFunction

    folder = joint_graph.UniformValueConstantFolder
    with (
        virtual_device(target, settings=settings, takes_cpu=False) as device,
        virtual_cuda(device.target),
        fake_gpu(),
        # Whether padding a GEMM pays is measured, which cannot be done here.
        mock.patch.object(pad_mm, "_should_pad", lambda *_, **__: False),
        # A Triton kernel of the script's own, outside of what is compiled, changes values only.
        mock.patch.object(JITFunction, "run", lambda *_, **__: None),
        # Constants are folded with real tensors of one element, on the device of the graph.
        mock.patch.object(folder, "run", _on_cpu(folder.run)),
    ):
        yield device


class OnCpu(TorchDispatchMode):
    """Creates on the CPU what is to be created on a GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        arguments, options = pytree.tree_map(moved, (arguments, options or {}))
        return function(*arguments, **options)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with OnCpu():
            return function(*arguments, **options)

    return run


def _run_as_main(code: types.CodeType, path: Path, arguments: Sequence[str]) -> int:
    """Runs the script; returns the code that it exits with."""
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    outer, sys.modules["__main__"] = sys.modules["__main__"], main
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
    ):
        try:
            exec(code, main.__dict__)
        except SystemExit as ended:
            return _exit_code(ended)
        except Exception as error:
            _blame(error, path)
        finally:
            sys.modules["__main__"] = outer
    return 0


def _exit_code(ended: SystemExit) -> int:
    """What Python makes of `sys.exit`: a text is printed, and means 1."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _blame(error: Exception, path: Path) -> NoReturn:
    """Raises what the error of a script means to its user."""
    for cause in _causes(error):
        where = _where(cause, path) or _where(error, path) or str(path)
        if isinstance(cause, NEEDS_VALUES):
            raise CannotRun(
                f"{where} needs the values of a tensor, which on a virtual GPU has none: leave it out of this run"
            ) from error
        if isinstance(cause, NO_SHAPE_RULE):
            raise CannotRun(f"{where} calls an operator whose result has no shape without a GPU: {cause}") from error
    described = traceback.TracebackException.from_exception(error)
    _keep_user_frames(described)
    raise ScriptFailed("".join(described.format()).rstrip()) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _where(error: BaseException, path: Path) -> str | None:
    """The innermost line of the user's that an error went through, as `file:line: source`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return None
    frame = frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno}: `{line}`"


_NOT_USERS = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{site.getusersitepackages()}/",
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parent}/",
    "<",
)
"""How the names of files begin that are not the user's: Python, its packages, this one, and generated code."""


def _is_users(file: str) -> bool:
    return not file.startswith(_NOT_USERS)


def _keep_user_frames(described: traceback.TracebackException) -> None:
    described.stack[:] = [frame for frame in described.stack if _is_users(frame.filename)]
    for cause in (described.__cause__, described.__context__):
        if cause is not None:
            _keep_user_frames(cause)
