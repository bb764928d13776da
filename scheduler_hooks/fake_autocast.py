"""Autocast on the fake GPU: what it casts, and to what.

torch does it in C++, for tensors that C++ takes for CUDA tensors; those of the fake GPU it does not. So its kernels are
replaced by one that asks Python. Which operators they are, torch knows; to which of its three lists each belongs is
said in its documentation ("CUDA Op-Specific Behavior").
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

KEY = "AutocastCUDA"

_IN_LOW_PRECISION = frozenset(
    """
    _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr
    baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear
    lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """.split()
)
"""In bfloat16 or float16, as `torch.autocast` is told."""

_AS_THEY_ARE = frozenset(
    """
    _cudnn_rnn addcdiv addcmul atan2 bilinear binary_cross_entropy cross dot grid_sampler index_put scatter_add
    tensordot vdot
    """.split()
)
"""In the widest type of their inputs, which they take by themselves. What is in neither list is in float32."""


@contextlib.contextmanager
def autocasting() -> Iterator[None]:
    """Inside the block, `torch.autocast("cuda")` casts fake tensors on the GPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
                namespace, _, operator = name.partition("::")
                packet, _, overload = operator.partition(".")
                if namespace == "aten" and packet and packet not in _AS_THEY_ARE:
                    found = getattr(getattr(torch.ops.aten, packet), overload or "default")
                    library.impl(found, _casting(found, packet in _IN_LOW_PRECISION), KEY)
        yield


def _casting(operator: Any, low: bool) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

    def run(*arguments: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda") if low else torch.float32

        def cast(value: Any) -> Any:
            fits = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if fits and value.device.type in ("cuda", "meta") else value

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            arguments, options = pytree.tree_map(cast, (arguments, options))
            return operator(*arguments, **options)

    return run
