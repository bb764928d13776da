"""The fake GPU: what a script's tensors on "cuda" are where there is none.

They are torch's fake tensors, which have a shape, a dtype and a device but no values, and which `torch.compile` itself
traces with. Inside of it the device may be anything; a whole script meets more of torch. So while `fake_gpu` is open:

    devices      C++ is told that a fake CUDA tensor lies on "meta". Told "cuda", the autograd engine and the device
                 guards ask a driver, and abort the process where torch was built without one. Python, and with it
                 everything that decides, sees "cuda:0". What C++ then creates on "meta" is created on "cuda:0".
    the CPU      its tensors are real, so that a script can read files, shuffle and count; those that are `LARGE` are
                 fake, since a model is often built on the CPU before it is moved, and so is what `torch.load` reads.
    parameters   a module that is moved keeps its parameter objects (ties, optimizers), as with a real GPU
    operators    that C++ chooses by the device are chosen here: see `fake_attention` and `fake_autocast`
    values       whatever needs them raises one of `NEEDS_VALUES`
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._device import _device_constructors

from .fake_attention import fused_attention
from .fake_autocast import autocasting
from .virtual_cuda import DEVICE

META = torch.device("meta")

LARGE = 1 << 20
"""Elements from which on a new tensor on the CPU is fake."""


class ValueNeeded(RuntimeError):
    """The values of a fake tensor are asked for, and it has none."""


NEEDS_VALUES = (ValueNeeded, fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
NO_SHAPE_RULE = fake_tensor.UnsupportedOperatorException
"""Raised for an operator that does not say what its result looks like."""


class FakeGpu(FakeTensorMode):
    """Makes fake what is on the GPU, what is large, and what is computed from either; the rest stays real."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._is_computing = False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(options or {})
        if isinstance(function, torch._ops.HigherOrderOperator):
            if function in registered_hop_fake_fns:
                return super().__torch_dispatch__(function, types, arguments, options)
            return function.python_key_table[FakeTensorMode](self, *arguments, **options)
        if options.get("pin_memory"):
            options["pin_memory"] = False  # the allocator of pinned memory asks a driver
        leaves = pytree.arg_tree_leaves(*arguments, **options)
        if not (self._is_computing or any(map(_is_fake, leaves)) or _is_large(arguments, options)):
            return function(*arguments, **options)
        _refuse_writes(function, arguments, options)
        if not function._schema.returns:
            return None  # it changes values only, as the fused optimizers do
        outer, self._is_computing = self._is_computing, True  # what a decomposition creates on the way is fake, too
        try:
            return super().__torch_dispatch__(function, types, arguments, options)
        finally:
            self._is_computing = outer


class Generator(torch.Generator):
    """A source of random numbers on any device: the one on the GPU is on the CPU, too."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.told = torch.device(_device(device))
        return made

    device = property(lambda generator: generator.told)


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside the block, tensors on "cuda" are fake ones. See the module's docstring."""
    from torch._dynamo.variables.optimizer import OptimizerVariable

    _device_constructors()  # torch remembers which functions create tensors: its own, not those from here
    for function in (_tensor_to, *_CONSTRUCTORS.values()):
        torch.compiler.allow_in_graph(function)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    replaced: dict[Any, dict[str, Any]] = {
        torch: {"Generator": Generator, "load": _load, "save": _save, **_CONSTRUCTORS},
        torch.nn.init: {"_no_grad_trunc_normal_": _trunc_normal},
        torch.nn.Module: {"to": _with_index(torch.nn.Module.to)},
        torch.Tensor: {
            "to": _tensor_to,
            "cuda": _cuda,
            "module_load": _module_load,
            "pin_memory": lambda tensor, *_: tensor,
        },
        FakeTensor: {
            "__torch_dispatch__": classmethod(_dispatch_without_mode),
            "is_cuda": property(lambda tensor: tensor.device.type == "cuda"),
            "is_meta": property(lambda tensor: tensor.device.type == "meta"),
            "get_device": lambda tensor: 0 if tensor.is_cuda else -1,
            "record_stream": lambda *_: None,
            "numpy": _no_value,
            "__array__": _no_value,
            "__reduce_ex__": _no_value,
            "__format__": lambda tensor, specification: _no_value() if specification else repr(tensor),
        },
        FunctionalTensor: {"__new__": staticmethod(_functional)},
        FakeTensorMode: {"dispatch": _dispatch_in_mode, "avoid_device_init": True},
        fake_tensor: {"init_gpu_context": lambda _: None},
        proxy_tensor: {"CONSTANT_NUMEL_LIMIT": -1},  # tracing computes with small constants, on their device
        fake_tensor.log: {"disabled": True},  # what an operator refuses is said by its exception, too
        torch.utils: {"swap_tensors": _swap},
    }
    with contextlib.ExitStack() as stack:
        for owner, replacements in replaced.items():
            for name, replacement in replacements.items():
                stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        stack.enter_context(mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {_ASK_DEVICE: _told_to_cpp}))
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(_composites())
        stack.enter_context(fused_attention())
        stack.enter_context(autocasting())
        with_mode = _with_mode(stack.enter_context(FakeGpu()), OptimizerVariable.call_method)
        stack.enter_context(mock.patch.object(OptimizerVariable, "call_method", with_mode))
        stack.callback(torch.set_default_device, None)
        yield


_ASK_DEVICE = torch.ops.prim.device.default
_of_functional: Callable[..., Any] = FunctionalTensor.__new__
_of_tensor: Callable[..., Any] = FakeTensor.__torch_dispatch__
_of_mode: Callable[..., Any] = FakeTensorMode.dispatch
_torch_load, _torch_save, _torch_module_load = torch.load, torch.save, torch.Tensor.module_load
_torch_trunc_normal = torch.nn.init._no_grad_trunc_normal_


def _with_mode(gpu: FakeGpu, call_method: Callable[..., Any]) -> Callable[..., Any]:
    """For Dynamo, which has an optimizer make its state while no mode is on."""

    def called(*arguments: Any, **options: Any) -> Any:
        with gpu:
            return call_method(*arguments, **options)

    return called


def _told_to_cpp(arguments: Sequence[Any]) -> torch.device:
    tensor = arguments[0]
    return META if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type == "cuda" else tensor.fake_device


@contextlib.contextmanager
def _composites() -> Iterator[None]:
    """Inside the block, an operator that is made of others keeps its gradient when AOTAutograd traces it on "meta".

    Of those that have a function for "meta" as well, torch's Python dispatcher would take that.
    """
    key = torch._C.DispatchKey.AutogradMeta
    packets = [packet for packet in vars(torch.ops.aten).values() if isinstance(packet, torch._ops.OpOverloadPacket)]
    operators = [
        operator
        for packet in packets
        for operator in vars(packet).values()
        if isinstance(operator, torch._ops.OpOverload)
        and torch._C.DispatchKey.Meta in operator.py_kernels
        and torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    ]
    with contextlib.ExitStack() as stack:
        for operator in operators:
            stack.callback(operator._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(operator.py_kernels, {key: operator.decompose}))
            operator._dispatch_cache.clear()
        yield


def _functional(cls: type, tensor: torch.Tensor, mode: Any) -> Any:
    """The wrapper that AOTAutograd puts around a tensor: on "meta", it has no key for autocast of its own."""
    keys = FunctionalTensor._extra_dispatch_keys
    FunctionalTensor._extra_dispatch_keys = keys.add(torch._C.DispatchKey.AutocastCUDA)
    try:
        return _of_functional(cls, tensor, mode)
    finally:
        FunctionalTensor._extra_dispatch_keys = keys


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


def _refuse_writes(function: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """A real tensor cannot be given values that nobody knows."""
    parameters = function._schema.arguments
    given = [*zip(parameters, arguments), *((p, options[p.name]) for p in parameters if p.name in options)]
    for parameter, value in given:
        if parameter.alias_info is None or not parameter.alias_info.is_write:
            continue
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                raise ValueNeeded(f"{function} writes to a tensor on the CPU")


def _trunc_normal(tensor: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """`torch.nn.init.trunc_normal_`, which draws again until it has seen that every value fits."""
    return tensor if isinstance(tensor, FakeTensor) else _torch_trunc_normal(tensor, *options, **named)


def _no_value(*_: Any, **__: Any) -> Any:
    raise ValueNeeded("a value is read")


def _device(value: Any) -> Any:
    """`value`, with an index where it means the GPU: for the current device's, C++ asks the driver."""
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device(DEVICE.type, value)
    return DEVICE if isinstance(value, (str, torch.device)) and str(value) == DEVICE.type else value


def _with_index(to: Callable[..., Any]) -> Callable[..., Any]:
    """`to` of a tensor or a module, for "cuda" and for a bare index."""

    def moved(self: Any, *options: Any, **named: Any) -> Any:
        if options:
            options = (_device(options[0]), *options[1:])
        if "device" in named:
            named["device"] = _device(named["device"])
        return to(self, *options, **named)

    return moved


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
    return tensor.to(DEVICE, non_blocking=non_blocking, **options)


def _through_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` and its like, by way of the CPU: straight to a device, C++ asks the driver for it."""

    def made(data: Any, *options: Any, device: Any = None, **named: Any) -> torch.Tensor:
        requires_grad = named.pop("requires_grad", False)
        if isinstance(data, torch.Tensor):
            tensor = make(data, *options, **named)
        else:
            tensor = make(data, *options, device="cpu", **named)
            device = torch.empty(0).device if device is None else device
        tensor = tensor if device is None else tensor.to(device)
        return tensor.requires_grad_() if requires_grad else tensor

    return made


_tensor_to = _with_index(torch.Tensor.to)
_CONSTRUCTORS = {name: _through_cpu(getattr(torch, name)) for name in ("as_tensor", "asarray", "tensor")}


def _load(file: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
    return _torch_load(file, _device(map_location), *arguments, **options)


def _save(value: Any, file: Any, *arguments: Any, **options: Any) -> None:
    """`torch.save`, which spoils what is in the file before it meets a tensor without values."""
    _torch_save(value, io.BytesIO(), *arguments, **options)
    _torch_save(value, file, *arguments, **options)


def _module_load(parameter: torch.Tensor, loaded: torch.Tensor, assign: bool = False) -> torch.Tensor:
    """What is loaded into a parameter; one that is real cannot take values that nobody knows, so it becomes fake."""
    if isinstance(loaded, FakeTensor) and not isinstance(parameter, FakeTensor) and not assign:
        return loaded.detach().to(parameter.dtype)
    return _torch_module_load(parameter, loaded, assign)


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` for tensors that others have weak references to, as every fake tensor's mode has."""
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)
