"""Random graphs: the product of a GEMM, and a random expression of torch's functions over it.

An expression is text, so that a case that fails can be read and run again. Its leaves are the product `v` and operands:
a tile, a row, a column, a scalar, a column-major tile, a mask and a row of small integers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

LEAVES = ["v", "v", "tile", "row", "column", "scalar", "transposed", "mask.to(v.dtype)", "small.to(v.dtype)"]
UNARY = """
    torch.relu({0}) F.gelu({0}) F.gelu({0},approximate="tanh") F.silu({0}) F.mish({0}) F.elu({0}) F.softplus({0})
    F.hardswish({0}) F.logsigmoid({0}) torch.tanh({0}) torch.sigmoid({0}) torch.erf({0}) {0}.abs() (-{0}) {0}.sin()
    {0}.cos() {0}.clamp(-0.5,1.5) {0}.clamp(-4,4).exp() {0}.clamp(-4,4).expm1() ({0}.abs()+0.5).log() {0}.abs().log1p()
    ({0}.abs()+0.25).sqrt() ({0}.abs()+0.5).rsqrt() {0}.square() ({0}*0.75-0.25) {0}.sign() ({0}.abs()+1).reciprocal()
    {0}.clamp(-2,2).exp2() {0}.erfc() torch.atan({0}) ({0}.clamp(-3,3)**3) (({0}.abs()+0.5)**0.75)
    {0}.nan_to_num(0.0,1.0,2.0)
""".split()
BINARY = """
    ({0}+{1}) ({0}-{1}) ({0}*{1}) ({0}/({1}.abs()+1)) torch.maximum({0},{1}) torch.minimum({0},{1})
    torch.where({0}>{1},{0},{1}*0.5) torch.where(({0}<=0.25)&mask,{0},{1}) torch.where(mask|({1}!=0.5),{1},{0})
    torch.copysign({0}.abs()+1,{1}+0.125) torch.addcmul({0},{1},{1},value=0.5)
    ({0}.masked_fill(~mask,0.5)+{1}) torch.atan2({0}.abs()+1,{1}) torch.logaddexp({0},{1}) torch.add({0},{1},alpha=2)
    torch.where(small>{1},{0},small) ({0}*(small&6)+({1}*0.5)) torch.where(small//4>1,{0},{1})
""".split()

OPERANDS = ("tile", "row", "column", "scalar", "transposed", "mask", "small")
WIDTH = 1 + len(OPERANDS)
"""Tensors of one product: its weight and the operands."""


def tree(source: random.Random, leaves: int) -> str:
    """A random expression with up to `leaves` leaves."""
    if leaves <= 1 or source.random() < 0.1:
        text = source.choice(LEAVES)
        return source.choice(UNARY).format(text) if source.random() < 0.6 else text
    if source.random() < 0.4:
        return source.choice(UNARY).format(tree(source, leaves))
    left = source.randint(1, leaves - 1)
    return source.choice(BINARY).format(tree(source, left), tree(source, leaves - left))


def written(trees: Sequence[str]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function of x (M, K) and, for each of `trees`, WIDTH tensors (see `operands`): the results of all, (M, N)."""
    lines = ["def function(x, *rest):"]
    for number, text in enumerate(trees):
        lines.append(f"    w, {', '.join(OPERANDS)} = rest[{number * WIDTH}:{(number + 1) * WIDTH}]")
        lines.append("    v, transposed = F.linear(x, w), transposed.t()")
        lines.append(f"    result_{number} = {text} + v * 0.25")
    lines.append(f"    return {', '.join(f'result_{number}' for number in range(len(trees)))},")
    namespace = {"torch": torch, "F": F}
    exec("\n".join(lines), namespace)
    return namespace["function"]


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, column_dtype: torch.dtype, small_dtype: torch.dtype
) -> list[torch.Tensor]:
    """The weight (N, K) of one product and its operands, random and of order one. small_dtype: an integer one."""
    return [
        (torch.randn(n, k) * k**-0.5).to(dtype),
        torch.randn(m, n).to(dtype),
        torch.randn(n).to(dtype),
        torch.randn(m, 1).to(column_dtype),
        torch.randn(1).to(dtype),
        torch.randn(n, m).to(dtype),
        torch.rand(m, n) < 0.5,
        torch.randint(-9, 10, (n,)).to(small_dtype),
    ]
