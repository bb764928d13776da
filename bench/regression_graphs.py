"""The suite of `nvgemm-fusion regress`: small graphs for what is fused, and for what is not.

An example of a suite, too: a file with a generator `graphs` that yields (name, callable, inputs on the CPU).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

BATCH, TOKENS, N, K = 4, 16, 128, 96
M = BATCH * TOKENS


class Mlp(torch.nn.Module):
    """Two linear layers with biases and a GELU between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = torch.nn.Linear(K, N, dtype=dtype)
        self.down = torch.nn.Linear(N, K, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def bias_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.linear(x, w, b))


def bias_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def residual(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w) + r


def silu_mul(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, w)) * u


def normed_residual(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of a transformer layer: the next one needs the norm and the residual itself."""
    kept = F.linear(x, w) + r
    return F.rms_norm(kept, kept.shape[-1:]), kept


def product_needed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product is an output itself, as where training saves it: two values leave the epilogue."""
    product = F.linear(x, w)
    return product, F.relu(product)


def chain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """More operations than Inductor puts into one loop: a region of two nodes."""
    value = F.linear(x, w)
    for _ in range(3):
        value = torch.sigmoid(value.clamp(-2, 2) * r + 0.125) * 1.5 - b
    return torch.tanh(value)


def graphs() -> Iterator[tuple[str, Callable[..., object], tuple[torch.Tensor, ...]]]:
    """Every graph in bfloat16 and in float16. `regress` seeds the random numbers."""
    for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        x, w = torch.randn(M, K).to(dtype), (torch.randn(N, K) / math.sqrt(K)).to(dtype)
        row, tile = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
        x_batched, tile_batched = x.view(BATCH, TOKENS, K), tile.view(BATCH, TOKENS, N)
        yield f"bias_relu {suffix}", bias_relu, (x, w, row)
        yield f"bias_gelu {suffix}", bias_gelu, (x, w, row)
        yield f"residual {suffix}", residual, (x, w, tile)
        yield f"residual batched {suffix}", residual, (x_batched, w, tile_batched)
        yield f"silu_mul {suffix}", silu_mul, (x, w, tile)
        yield f"normed_residual {suffix}", normed_residual, (x_batched, w, tile_batched)
        yield f"product_needed {suffix}", product_needed, (x, w)
        yield f"chain {suffix}", chain, (x, w, row, tile)
        yield f"mlp {suffix}", Mlp(dtype), (x,)
