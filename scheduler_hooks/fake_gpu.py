"""The fake GPU: what a script's tensors on "cuda" are where there is none.

They are torch's fake tensors, which have a shape, a dtype and a device but no values, and which `torch.compile` itself
traces with. Inside of it the device may be anything; a whole script meets more of torch. So while `fake_gpu` is open:

    devices      C++ is told that a fake CUDA tensor lies on "meta". Told "cuda", the autograd engine and the device
                 guards ask a driver, and abort the process where torch was built without one. Python, and with it
                 everything that decides, sees "cuda:0". What C++ then creates on "meta" is created on "cuda:0".
    the CPU      its tensors are real, so that a script can read files, shuffle and count; those that are `LARGE` are
                 fake, since a model is often built on the CPU before it is moved.
    parameters   a module that is moved keeps its parameter objects (ties, optimizers), as with a real GPU
    values       whatever needs them raises `ValueNeeded`, or one of torch's own exceptions for fake tensors
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

DEVICE = torch.device("cuda", 0)
META = torch.device("meta")

LARGE = 1 << 20
"""Elements from which on a new tensor on the CPU is fake."""


class ValueNeeded(RuntimeError):
    """The values of a fake tensor are asked for, and it has none."""


class FakeGpu(FakeTensorMode):
    """Makes fake what is on the GPU, what is large, and what is computed from either; the rest stays real."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._is_computing = False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        leaves = pytree.arg_tree_leaves(*arguments, **options)
        if not (self._is_computing or any(map(_is_fake, leaves)) or _is_large(arguments, options)):
            return function(*arguments, **options)
        _refuse_writes(function, arguments)
        outer, self._is_computing = self._is_computing, True  # what a decomposition creates on the way is fake, too
        try:
            return super().__torch_dispatch__(function, types, arguments, options)
        finally:
            self._is_computing = outer


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside the block, tensors on "cuda" are fake ones. See the module's docstring."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    of_tensors = {
        "to": _with_index(torch.Tensor.to),
        "cuda": lambda tensor, device=None, *options, **named: tensor.to(DEVICE, *options, **named),
        "pin_memory": lambda tensor, *_: tensor,
    }
    of_fake_tensors = {
        "__torch_dispatch__": classmethod(_dispatch_without_mode),
        "is_cuda": property(lambda tensor: tensor.device.type == "cuda"),
        "is_meta": property(lambda tensor: tensor.device.type == "meta"),
        "numpy": _no_value,
        "__array__": _no_value,
        "__format__": lambda tensor, specification: _no_value() if specification else repr(tensor),
    }
    with contextlib.ExitStack() as stack:
        for owner, replacements in ((torch.Tensor, of_tensors), (FakeTensor, of_fake_tensors)):
            for name, replacement in replacements.items():
                stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        stack.enter_context(mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {_ASK_DEVICE: _told_to_cpp}))
        stack.enter_context(mock.patch.object(FakeTensorMode, "dispatch", _dispatch_in_mode))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swap))
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(FakeGpu())
        yield


_ASK_DEVICE = torch.ops.prim.device.default
_of_tensor: Callable[..., Any] = FakeTensor.__torch_dispatch__
_of_mode: Callable[..., Any] = FakeTensorMode.dispatch


def _told_to_cpp(arguments: Sequence[Any]) -> torch.device:
    tensor = arguments[0]
    return META if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type == "cuda" else tensor.fake_device


def _dispatch_without_mode(
    cls: type, function: Any, types: Sequence[type], arguments: Sequence[Any] = (), options: Any = None
) -> Any:
    if function is _ASK_DEVICE:
        return _told_to_cpp(arguments)
    return _of_tensor(function, types, arguments, options or {})


def _dispatch_in_mode(
    mode: FakeTensorMode, function: Any, types: Sequence[type], arguments: Sequence[Any] = (), options: Any = None
) -> Any:
    options = options or {}
    if options.get("device") == META:
        options = {**options, "device": DEVICE}
    return _of_mode(mode, function, types, arguments, options)


def _is_fake(value: Any) -> bool:
    """Whether it makes an operation one on the GPU: a fake tensor, or the device of a tensor to be created."""
    return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type in ("cuda", "meta"))


def _is_large(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the arguments are those of a function that creates a large tensor out of nothing."""
    if "device" not in options:
        return False
    sizes = (value for value in arguments if isinstance(value, (list, tuple)))
    return any(math.prod(size) >= LARGE for size in sizes if all(isinstance(steps, int) for steps in size))


def _refuse_writes(function: Any, arguments: Sequence[Any]) -> None:
    """A real tensor cannot be given values that nobody knows."""
    for parameter, value in zip(function._schema.arguments, arguments):
        written = parameter.alias_info is not None and parameter.alias_info.is_write
        if written and isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            raise ValueNeeded(f"{function} writes to a tensor on the CPU")


def _no_value(*_: Any) -> Any:
    raise ValueNeeded("a value is read")


def _with_index(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to` with an index for "cuda": for the current device's, C++ asks the driver."""

    def indexed(value: Any) -> Any:
        return DEVICE if isinstance(value, (str, torch.device)) and str(value) == "cuda" else value

    return lambda tensor, *options, **named: to(
        tensor, *map(indexed, options), **{name: indexed(value) for name, value in named.items()}
    )


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` for tensors that others have weak references to, as every fake tensor's mode has."""
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)
