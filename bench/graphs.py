"""Named graphs with a GEMM and pointwise work after it, as measured by the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Graph:
    """`function` of tensors, and `inputs` that makes random ones for (M, N, K, dtype)."""

    name: str
    function: Callable[..., torch.Tensor]
    extra: str
    """What it takes besides x (M, K) and the weight (N, K): a "row" (N) or a "tile" (M, N)."""

    def inputs(self, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        """Random inputs on the GPU, scaled so that the product has unit variance."""
        extra = {"row": (n,), "tile": (m, n)}[self.extra]
        scaled = torch.randn(n, k, device="cuda") / math.sqrt(k)
        return torch.randn(m, k, device="cuda").to(dtype), scaled.to(dtype), torch.randn(extra, device="cuda").to(dtype)


GRAPHS = (
    Graph("bias_relu", lambda x, w, b: F.relu(F.linear(x, w, b)), "row"),
    Graph("bias_gelu", lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), "row"),
    Graph("residual", lambda x, w, r: F.linear(x, w) + r, "tile"),
    Graph("silu_mul", lambda x, w, u: F.silu(F.linear(x, w)) * u, "tile"),
)
