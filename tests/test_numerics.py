"""Results against float64: what the gate holds right, and the generated code that it runs on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.bench import generated_code, numerics

BF16 = torch.bfloat16


def randn(*shape):
    return torch.randn(*shape).to(BF16)


def generated(function, inputs):
    """What the code generated for the virtual H200 computes, beside eager float64."""
    from nvgemm_fusion.scheduler_hooks.virtual_device import virtual_device

    order = generated_code.graph_inputs(function, inputs)
    with virtual_device("H200") as device:
        torch.compile(function, dynamic=False)(*inputs)
    results = generated_code.run_on_cpu(device.code[-1], order)
    expected = numerics.exact(function, inputs, function(*inputs))
    return None if results is None else expected.fault(results, in_float64=True)


@pytest.mark.usefixtures("h200", "instant_kernels")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, r: F.relu(F.linear(x, w)) * r,
        lambda x, w, r: (F.linear(x * 1, w) * r.t().contiguous().t()).t(),
        lambda x, w, r: r + F.silu(F.linear(x, w)).view(4, 16, 128).view(64, 128),
        lambda x, w, r: F.linear(F.linear(x, w) * r + 1, w.t()),
        lambda x, w, r: {"a": (F.relu(F.linear(x, w)), torch.mm(x.t(), r))},
    ],
    ids=["tile", "transposed", "view", "two GEMMs", "several outputs"],
)
def test_generated_code_runs_on_the_cpu(inductor_config, function):
    with inductor_config.patch(nvgemm_fusion_force=True):
        assert generated(function, (randn(64, 32), randn(128, 32), randn(64, 128))) in ("", None)


@pytest.mark.usefixtures("h200", "instant_kernels")
def test_generated_code_gets_its_inputs_in_its_own_order(inductor_config):
    """Dynamo numbers them by their first use, views of one tensor and parameters included."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(randn(128, 32))

        def forward(self, r, x):
            return F.relu(F.linear(x[8:72], self.w)) * r[:, 64:192]

    with inductor_config.patch(nvgemm_fusion_force=True):
        assert generated(Module(), (randn(64, 256), randn(96, 32))) == ""


@pytest.mark.usefixtures("h200", "instant_kernels")
def test_generated_code_with_a_triton_kernel_is_not_run():
    inputs = randn(64, 32), randn(128, 32), randn(128)
    assert generated(lambda x, w, r: F.softmax(F.linear(x, w), -1) * r, inputs) is None


def test_a_graph_that_names_a_dtype_is_held_to_what_eager_can_do():
    x, w = randn(16, 16), randn(16, 16)

    def rounding(x, w):
        return (x @ w).to(torch.bfloat16) * 2

    exact = numerics.exact(rounding, (x, w), rounding(x, w))
    assert exact.rounding == 2**-7 and exact.fault([2 * (x.double() @ w.double())], in_float64=True) == ""
    assert "relative error" in exact.fault([2.1 * (x.double() @ w.double())], in_float64=True)
    assert numerics.exact(torch.mm, (x, w), x @ w).rounding == 0
    assert numerics.exact(lambda x: x @ torch.ones(16, 16, dtype=BF16), (x,), x) is None


def test_infinities_and_nan_equal_themselves_and_nothing_else():
    nan, inf = float("nan"), float("inf")
    exact = torch.tensor([1.0, nan, inf, -inf])
    assert numerics.error([exact.clone()], [exact]) == 0
    for wrong in ([1.0, 0.0, inf, -inf], [nan, nan, inf, -inf], [1.0, nan, -inf, -inf], [1.0, nan, 1e30, -inf]):
        assert not numerics.error([torch.tensor(wrong)], [exact]) <= 1e3
    assert "shape" in numerics.Exact((exact,), 0.0, 0.0).fault([exact.view(2, 2)])
