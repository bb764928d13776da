"""Attention on the fake GPU: which of its fused kernels `scaled_dot_product_attention` calls.

On a GPU, torch chooses one in C++, by the device of its tensors. A fake tensor has none there, so torch would compute
with two products and a softmax instead, which no GPU does, and which would be planned as if one did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

aten = torch.ops.aten
LARGEST_HEAD = 256
"""Elements of a head that the fused kernels take."""


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Inside the block, attention over fake tensors on the GPU is a call of a fused kernel where there is one."""
    operator = aten.scaled_dot_product_attention.default
    with torch.library._scoped_library("aten", "IMPL") as library:
        for key in ("AutogradCUDA", "AutogradMeta"):
            library.impl("scaled_dot_product_attention", _attention, key)
        # Without autograd (in inference mode) torch takes the operator apart by this table.
        composite = {torch._C.DispatchKey.CompositeImplicitAutograd: _attention}
        with mock.patch.dict(operator.py_kernels, composite):
            operator._dispatch_cache.clear()
            yield
    operator._dispatch_cache.clear()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    options: dict[str, Any] = {"scale": scale}
    inputs = (query, key, value)
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD and query.shape[-1] % 8 == 0
    if query.device.type in ("cuda", "meta") and fits:
        if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
            if torch.backends.cuda.flash_sdp_enabled():
                return aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, **options)[0]
        elif torch.backends.cuda.mem_efficient_sdp_enabled() and query.shape[1] == key.shape[1]:
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            needs_sum = any(tensor.requires_grad for tensor in inputs)
            return aten._scaled_dot_product_efficient_attention(
                *inputs, bias, needs_sum, dropout_p, is_causal, **options
            )[0]
    return aten._scaled_dot_product_attention_math(
        *inputs, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **options
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the kernel takes it: what is added, of the shape of the product."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
