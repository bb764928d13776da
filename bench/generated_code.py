"""The module that Inductor generates for the virtual device, run on the CPU in float64.

Its function `call` is taken as it is. Allocations become float64 tensors, external GEMMs are torch's, and each of our
kernels becomes its epilogue program over the product. So it shows which tensors a kernel gets, through which views,
and what becomes of its result. A module with a Triton kernel cannot be run here.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..lowering.kernel import KernelSpec
from ..lowering.verification import compute
from .numerics import relaid, tensors, widened


def graph_inputs(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
    """The tensors that the generated module of `function` is called with: its inputs and parameters, in the order in
    which Dynamo meets them. None when Dynamo makes several graphs of the function."""
    noted = []

    def note(graph: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        def run(*values: torch.Tensor) -> Any:
            noted.append(values)
            return graph(*values)

        return run

    torch.compiler.reset()
    torch.compile(function, backend=note, dynamic=False)(*inputs)
    torch.compiler.reset()
    return noted[0] if len(noted) == 1 else None


def run_on_cpu(source: str, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    """What the generated module `source` returns for `inputs`, or None when it needs what has no stand-in here.

    Executes the module's function `call`, so `source` must be our own Inductor's.
    """
    module = ast.parse(source)
    call = next((n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call"), None)
    if call is None:
        return None
    names = {**_STAND_INS, **dict(_kernels(module))}
    exec(compile(ast.Module([call], []), "generated module", "exec"), names)
    values = [relaid(tensor, widened) for tensor in inputs]
    try:
        # In a module with a class around it, `call` is a method that does not use `self` unless the graph is in parts.
        return tensors(names["call"](*[None] * (len(call.args.args) - 1), values))
    except (NameError, AttributeError):
        return None


def _kernels(module: ast.Module) -> Iterator[tuple[str, Callable[..., None]]]:
    """Our kernels by their names in the module, each computed by its reference."""
    for node in module.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("load_kernel"), [ast.Constant(spec), *_])):
                program = KernelSpec.from_json(json.loads(spec)).program
                yield name, lambda *tensors, program=program: compute(program, tensors, torch.float64)


def _empty(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """NaN wherever nothing will be written."""
    if not dtype.is_floating_point:
        return torch.empty_strided(size, strides, dtype=dtype)
    return torch.empty_strided(size, strides, dtype=torch.float64).fill_(math.nan)


def _view(tensor: torch.Tensor, size: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, strides, tensor.storage_offset() + offset)


_DTYPE_NAMES = "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 bool uint8 int8 int16 int32 int64".split()
_STAND_INS = {
    "assert_size_stride": lambda *_: None,
    "assert_size_stride_grouped": lambda *_: None,
    "assert_alignment": lambda *_: None,
    "empty_strided_cuda": _empty,
    "reinterpret_tensor": _view,
    "extern_kernels": types.SimpleNamespace(mm=torch.mm, addmm=torch.addmm, bias_addmm=torch.addmm),
    "torch": types.SimpleNamespace(
        cuda=types.SimpleNamespace(_DeviceGuard=lambda _: contextlib.nullcontext(), set_device=lambda _: None),
        **{name: getattr(torch, name) for name in _DTYPE_NAMES},
    ),
}
"""What `call` may use. Everything else makes it something that cannot be run here."""
