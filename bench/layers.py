"""Layers of real models: the GEMMs that are measured, with what the model computes after them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..fusion.problem import Problem
from ..fusion.program import ACCUMULATOR, EpilogueProgram, Major, Operand, OperandKind, ProgramBuilder, Store

DTYPE = torch.bfloat16
M_SIZES = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Gemm:
    """x (M, K) @ w.T with w (N, K). epilogue: the name of what may follow in the kernel (see `program`)."""

    n: int
    k: int
    epilogue: str

    def problem(self, m: int) -> Problem:
        """The problem at M = `m`, in bfloat16 on Hopper."""
        return Problem(m, self.n, self.k, DTYPE, Major.ROW, Major.COLUMN, "sm_90a")


@dataclass(frozen=True)
class Layer:
    """`function` of x (M, K), `weights` weights (N, K), and what the epilogue reads: a row (N) or a tile (M, N)."""

    model: str
    name: str
    function: Callable[..., torch.Tensor]
    n: int
    k: int
    epilogue: str
    weights: int = 1

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """Its GEMMs; the last one has the epilogue."""
        return (Gemm(self.n, self.k, "none"),) * (self.weights - 1) + (Gemm(self.n, self.k, self.epilogue),)

    def inputs(self, m: int) -> tuple[torch.Tensor, ...]:
        """Random inputs on the GPU, scaled so that each product has unit variance."""
        x = torch.randn(m, self.k, device="cuda").to(DTYPE)
        weights = [
            torch.randn(self.n, self.k, dtype=DTYPE, device="cuda").mul_(1 / math.sqrt(self.k))
            for _ in range(self.weights)
        ]
        extra = {"residual": [(m, self.n)], "bias_gelu": [(self.n,)]}.get(self.epilogue, [])
        return (x, *weights, *(torch.randn(size, device="cuda").to(DTYPE) for size in extra))

    def bytes_moved(self, m: int) -> int:
        """What the layer has to read and to write at least, intermediate values aside."""
        extra = {"residual": m * self.n, "bias_gelu": self.n}.get(self.epilogue, 0)
        return DTYPE.itemsize * (m * self.k + self.weights * self.n * self.k + extra + m * self.n)

    def flops(self, m: int) -> int:
        """Multiplications and additions of its GEMMs."""
        return 2 * m * self.n * self.k * self.weights


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def residual(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w) + r


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def bias_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def _decoder(model: str, hidden: int, intermediate: int, queries: int, keys: int) -> tuple[Layer, ...]:
    """The four layers of a decoder block. queries and keys: heads times their size; keys count for values as well."""
    return (
        Layer(model, "qkv", linear, queries + 2 * keys, hidden, "none"),
        Layer(model, "o", residual, hidden, queries, "residual"),
        Layer(model, "gate_up", gated, intermediate, hidden, "silu_mul", weights=2),
        Layer(model, "down", residual, hidden, intermediate, "residual"),
    )


LAYERS = (
    *_decoder("Llama 3.1 8B", 4096, 14336, 4096, 1024),
    *_decoder("Llama 3.3 70B", 8192, 28672, 8192, 1024),
    *_decoder("Qwen3 32B", 5120, 25600, 8192, 1024),
    Layer("GPT-2 XL", "up", bias_gelu, 6400, 1600, "bias_gelu"),
)
"""None of the three has a bias at its qkv."""


def program(epilogue: str) -> EpilogueProgram:
    """The epilogue program by its name: none, residual, silu_mul or bias_gelu."""
    builder = ProgramBuilder()

    def op(name: str, *inputs: int | float) -> int:
        return builder.op(name, *(builder.constant(x) if isinstance(x, float) else x for x in inputs))

    value = ACCUMULATOR
    if epilogue == "bias_gelu":
        x = op("add", value, builder.operand("bias", Operand(OperandKind.ROW, DTYPE)))
        inner = op("mul", op("add", x, op("mul", op("mul", op("mul", x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        value = op("mul", op("mul", x, 0.5), op("add", op("tanh", inner), 1.0))
    elif epilogue != "none":
        tile = builder.operand("tile", Operand(OperandKind.TILE, DTYPE))
        if epilogue == "silu_mul":
            value = op("mul", value, op("sigmoid", value))
        value = op({"residual": "add", "silu_mul": "mul"}[epilogue], value, tile)
    return builder.build([Store(value, DTYPE)])[0]
