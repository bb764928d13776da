"""The virtual device: `torch.compile` for a GPU that is not there.

    with virtual_device("H200"):
        torch.compile(model)(x)        # model and x on the CPU, real or fake

Tracing and autograd see CPU tensors. At the door of Inductor the graph is moved to "cuda:0" with fake tensors, and
lowering, scheduling, our pass and the wrapper's code generation run as they would there. Two things differ: GEMMs
are decided by a cost model instead of a stopwatch (their times are marked as modelled), and the generated module
is kept as text (`VirtualDevice.code`) instead of being loaded. The compiled function computes with the graph
itself on the CPU, so what comes after it goes on with right numbers.

Nothing here touches a driver. What Inductor and Triton ask of a device is answered from `lowering.targets`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses import fake_tensor

from ..lowering.targets import TARGETS, Target
from .virtual_cuda import DEVICE, virtual_cuda


@dataclass
class VirtualDevice:
    """A device in use: its target, and the source of every module that was generated for it, in order.

    settings: entries of Inductor's configuration that hold in every compile, whatever else sets them. takes_cpu:
    graphs on the CPU are compiled as if they lay on the device; otherwise they run as they are, and are counted.
    """

    target: Target
    code: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    takes_cpu: bool = True
    cpu_graphs: int = 0


_current: VirtualDevice | None = None


def current_virtual_device() -> VirtualDevice | None:
    """The device of the innermost `virtual_device` block, or None outside of one."""
    return _current


@contextlib.contextmanager
def virtual_device(name: str, **options: Any) -> Iterator[VirtualDevice]:
    """Compiles for the GPU `name` (a key of `TARGETS`) inside the block. `options`: fields of `VirtualDevice`.

    Raises KeyError for an unknown name.
    """
    global _current
    from torch._inductor import compile_fx

    device = VirtualDevice(TARGETS[name], **options)
    outer, _current = _current, device
    torch._dynamo.reset()
    try:
        with (
            mock.patch.object(compile_fx, "_compile_fx_inner", lambda *a, **k: _compile_inner(device, *a, **k)),
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            yield device
    finally:
        _current = outer
        torch._dynamo.reset()


def lower(device: VirtualDevice, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> str:
    """The source of the module that Inductor generates on `device` for a graph of fake CUDA tensors.

    `inputs` are fake tensors on `DEVICE` (or symbolic integers) of one fake tensor mode.
    """
    from torch._inductor import compile_fx

    options = {"cudagraphs": compile_fx.BoxedBool(False), **options}
    with _answer_for(device):
        compile_fx.fx_codegen_and_compile(graph, inputs, (), **options)
    return device.code[-1]


def _compile_inner(device: VirtualDevice, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Stands in for Inductor's inner compiler: lowers a copy of the graph on the virtual device, and returns a
    function that computes the graph as it is."""
    from torch._inductor import compile_fx

    if device.takes_cpu or _is_on_gpu(graph, inputs):
        options["cudagraphs"] = compile_fx.BoxedBool(False)
        moved, moved_inputs = _to_device(graph, inputs)
        with torch._inductor.config.patch(device.settings):
            lower(device, moved, moved_inputs, **options)
    else:
        device.cpu_graphs += 1
    return compile_fx.make_boxed_func(torch.fx.Interpreter(graph).run)


def _is_on_gpu(graph: torch.fx.GraphModule, inputs: list[Any]) -> bool:
    values = pytree.tree_leaves([inputs, [node.meta.get("val") for node in graph.graph.nodes]])
    return any(isinstance(value, torch.Tensor) and value.device.type == DEVICE.type for value in values)


def _to_device(graph: torch.fx.GraphModule, inputs: list[Any]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A copy of `graph` and fake `inputs` on DEVICE. Tensors that the graph holds become fake ones there."""
    mode = torch._guards.detect_fake_mode(inputs) or fake_tensor.FakeTensorMode()

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, fake_tensor.FakeTensor):
                value = mode.from_tensor(value)
            # What Dynamo makes of a Python number that changes stays on the CPU, where it lies on a real GPU, too.
            is_number = value.dim() == 0 and value.dtype == torch.float64
            device = value.device if is_number else DEVICE
            with mode, torch.no_grad():
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return DEVICE if isinstance(value, torch.device) else value

    copied = torch.fx.GraphModule({}, torch.fx.Graph())
    for name, tensor in [*graph.named_parameters(), *graph.named_buffers(), *vars(graph).items()]:
        if isinstance(tensor, torch.Tensor):
            # Inductor reads the value of a constant, if it is one number.
            readable = tensor.dim() == 0 and not isinstance(tensor, fake_tensor.FakeTensor)
            setattr(copied, name, tensor if readable else move(tensor))
    for name, child in graph.named_children():
        setattr(copied, name, _to_device(child, inputs)[0] if isinstance(child, torch.fx.GraphModule) else child)
    copied.graph.graph_copy(graph.graph, value_map := {})
    output = next(iter(reversed(graph.graph.nodes)))
    copied.graph.output(torch.fx.node.map_arg(output.args[0], value_map.__getitem__))
    copied.meta.update(graph.meta)
    for node in copied.graph.nodes:
        node.args = pytree.tree_map(move, node.args)
        node.kwargs = pytree.tree_map(move, node.kwargs)
        node.meta = {key: pytree.tree_map(move, value) if key == "val" else value for key, value in node.meta.items()}
    copied.recompile()
    return copied, [move(value) for value in inputs]


@contextlib.contextmanager
def _answer_for(device: VirtualDevice) -> Iterator[None]:
    """Answers what Inductor and Triton ask of a GPU, and keeps the generated module as text."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual_cuda(device.target))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        # Indexes the tensor of seeds, which asks for a device guard that a CPU build of torch does not have.
        lookup_seed = torch.ops.prims.inductor_lookup_seed.default
        stack.enter_context(
            mock.patch.object(lookup_seed, "prim_meta_impl", lambda seeds, index: seeds.new_empty(()))
        )
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", _keep_as_text(device)))
        for method in ("benchmark_fused_nodes", "benchmark_codegened_module"):
            stack.enter_context(mock.patch.object(Scheduler, method, lambda *_: (1.0, "virtual")))
        stack.enter_context(mock.patch.object(AlgorithmSelectorCache, "do_autotuning", _prefer_external_kernels))
        yield


def _keep_as_text(device: VirtualDevice) -> Any:
    from torch._inductor.codecache import PyCodeCache

    def compile_to_module(lowering: Any) -> types.SimpleNamespace:
        source = lowering.codegen()[0]
        device.code.append(getattr(source, "value", source))
        lowering.cache_key, lowering.cache_path = PyCodeCache.write(device.code[-1])
        lowering.cache_linemap = []
        return types.SimpleNamespace(call=None, __file__=lowering.cache_path)

    return compile_to_module


def _prefer_external_kernels(
    cache: Any, name: str, inputs: Any, layout: Any, generators: Any, key: Any, choices: list[Any], *_: Any, **__: Any
) -> dict[Any, float]:
    """Inductor's own autotuning, for the GEMMs that our pass does not decide: nothing can be timed here, so the
    external kernels are taken (or the first choice, where there is none)."""
    from torch._inductor.select_algorithm import ExternKernelCaller

    external = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    return {choice: 1.0 + index for index, choice in enumerate(external or choices[:1])}
