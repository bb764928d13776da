"""Several values that leave one epilogue, in inference and in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

BF16 = torch.bfloat16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


X, W, V = randn(64, 32), randn(128, 32), randn(96, 128)
ROW, TILE = randn(128), randn(64, 128)


def beside(y):
    """The product and what is made of it."""
    return y, F.relu(y)


def on_the_way(y):
    """A value that is needed itself, and read further on."""
    a = torch.tanh(y)
    return a.t(), torch.exp(a.t()).t()


@pytest.mark.parametrize(
    ("function", "stores"),
    [
        (lambda: beside(F.linear(X, W)), 2),
        (lambda: beside(F.linear(X, W, ROW)), 2),
        (lambda: beside(torch.addmm(TILE, X, W.t(), beta=0.5, alpha=-2)), 2),
        (lambda: (lambda y: (torch.tanh(y), y * TILE))(F.linear(X, W)), 2),
        (lambda: (lambda y: (F.relu(y), y.float() * 2))(F.linear(X, W)), 2),
        (lambda: (lambda y: (y, y.relu(), y.exp(), y + ROW))(F.linear(X, W)), 4),
        (lambda: (lambda a: (a, F.linear(a, V)))(F.gelu(F.linear(X, W))), 1),
        (lambda: (lambda y: (F.linear(y, V), F.linear(F.relu(y), V)))(F.linear(X, W)), 2),
        (lambda: (lambda a: (a, a))(F.relu(F.linear(X, W))), 1),
        (lambda: (lambda y: (y, F.silu(y) * TILE.view(4, 16, 128)))(F.linear(X, W).view(4, 16, 128)), 2),
        (lambda: on_the_way(F.linear(X, W)), 2),
    ],
)
def test_every_value_that_leaves_is_stored(checked_graphs, decisions, function, stores):
    torch.compile(function, dynamic=False)()
    assert len(checked_graphs) == 1 and checked_graphs[0]
    record = decisions()[0]
    program = record["programs"][record["alternatives"][record["chosen"]]["epilogue"]]["readable"]
    assert program.count("store ") == stores, program


NARROW = {
    "mask": lambda y: (F.relu(y), y > 0),
    "mask alone": lambda y: (y * TILE) <= ROW,
    "int8": lambda y: (y * 20).round().clamp(-127, 127).to(torch.int8),
    "uint8 and the product": lambda y: (y, (y.sigmoid() * 255).to(torch.uint8)),
    "int32": lambda y: (y * 1000).to(torch.int32) * 65537,
    "float8": lambda y: (F.silu(y) * 500).to(torch.float8_e4m3fn),
    "float8_e5m2 and a mask": lambda y: ((y * TILE).to(torch.float8_e5m2), y != y),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_results(checked_graphs, decisions, name):
    torch.compile(lambda: NARROW[name](F.linear(X, W)), dynamic=False)()
    (calls,) = checked_graphs
    assert calls and decisions()[0]["fused"]


def test_where_a_value_is_needed_the_region_may_end_too(checked_graphs, inductor_config, decisions):
    def function(x, w):
        a = F.relu(F.linear(x, w))
        for _ in range(3):
            b = torch.sigmoid(a.clamp(-2, 2) * TILE + 0.125) * 1.5 - ROW
            a, c = torch.tanh(b), a
        return c, a

    fused = []
    for force in (True, False):  # by force, the largest region alone
        torch._dynamo.reset()
        with inductor_config.patch(nvgemm_fusion_force=force):
            torch.compile(function, dynamic=False)(X, W)
        fused.append({tuple(a["fused"]) for a in decisions()[-1]["alternatives"] if a["backend"] == "NVGEMM"} - {()})
    assert len(checked_graphs) == 2 and list(map(len, fused)) == [1, 2], fused


@pytest.mark.parametrize("activation", [F.relu, F.silu, F.gelu, torch.tanh, lambda y: F.gelu(y, approximate="tanh")])
def test_training_saves_the_product_or_the_activation(checked_graphs, decisions, activation):
    """Forward: the activation, and what its derivative needs. Backward: a product times the derivative."""
    x, w, v = X.clone().requires_grad_(), W.clone().requires_grad_(), V.clone().requires_grad_()
    with torch.enable_grad():
        torch.compile(lambda x, w, v: F.linear(activation(F.linear(x, w)), v), dynamic=False)(x, w, v).backward(
            torch.ones(64, 96).bfloat16()
        )
    assert len(checked_graphs) == 2
    forward, backward = checked_graphs
    assert forward and backward
    records = decisions()
    assert {record["graph"].endswith("_backward") for record in records if record["fused"]} == {True, False}
