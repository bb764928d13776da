"""Every op: its reference, its emission, what Inductor makes of it, and why others are refused."""

from __future__ import annotations

import inspect
import json
import math
import types

import pytest
import torch
import torch.nn.functional as F
from cpu_run import run_on_cpu
from nvgemm_fusion.bench import operations, operations_page
from nvgemm_fusion.fusion.ops import BOOL, FLOAT, INTEGER, INTEGER_DTYPES, OPS, kind_of
from nvgemm_fusion.fusion.program import (
    ACCUMULATOR,
    EpilogueProgram,
    Operand,
    OperandKind,
    ProgramBuilder,
    Store,
)
from nvgemm_fusion.fusion.reference import evaluate
from nvgemm_fusion.lowering.dry_run import dry_run
from nvgemm_fusion.lowering.emit import CARRIERS, emit
from nvgemm_fusion.lowering.expressions import ERRORS, EXPRESSIONS, HELPERS, INTEGER_EXPRESSIONS
from nvgemm_fusion.lowering.store import KernelStore

BF16, F16 = torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf
VALUES = {
    torch.float32: [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, -3.0, 7.0, 0.3, 1e30, -1e-30, 1e-40],
    torch.bool: [True, False],
    torch.int8: [-128, -127, -8, -1, 0, 1, 2, 5, 7, 8, 31, 100, 127],
    torch.uint8: [0, 1, 2, 3, 5, 7, 8, 31, 32, 127, 128, 200, 255],
    torch.int16: [-(2**15), -300, -3, -1, 0, 1, 2, 15, 16, 17, 300, 2**15 - 1],
    torch.int32: [-(2**31), -(2**31) + 1, -7, -1, 0, 1, 2, 31, 32, 33, 100_000, 2**31 - 1],
}
DTYPES = {FLOAT: [torch.float32], INTEGER: INTEGER_DTYPES, BOOL: [torch.bool]}


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def applied(name, dtype):
    """`name` of three tiles in `dtype`, as float32: the program, and all combinations of two values as its operands."""
    values = torch.tensor(VALUES[dtype], dtype=torch.float64 if dtype == torch.float32 else dtype)
    first = values.repeat(len(values), 1)
    tensors = [first, first.t().contiguous(), first.flip(1)]
    loaded = torch.int32 if dtype not in CARRIERS else dtype  # an int16 is computed with, but not loaded
    builder = ProgramBuilder()
    tiles = [builder.operand(i, Operand(OperandKind.TILE, loaded)) for i in range(3)]
    inputs = [builder.convert(tile, dtype) for tile in tiles][: OPS[name].arity]
    if name == "where":
        inputs[0] = builder.op("ne", inputs[0], inputs[1])
    program, keys = builder.build([Store(builder.convert(builder.op(name, *inputs), torch.float32), torch.float32)])
    return program, [tensors[key] for key in keys]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, op in OPS.items() for kind in op.takes for dtype in DTYPES[kind]],
    ids=str,
)
def test_an_op_is_emitted_as_what_its_reference_computes(name, dtype):
    program, operands = applied(name, dtype)
    accumulator = torch.zeros(operands[0].shape, dtype=torch.float64)
    (exact,), (emitted,) = evaluate(program, accumulator, operands), dry_run(program, accumulator, operands)
    torch.testing.assert_close(emitted.double(), exact.double(), rtol=1e-14, atol=0, equal_nan=True)
    # torch leaves open which of two zeros is the larger, and its relu makes +0 of -0; Inductor's keeps it, as ours.
    if name not in ("relu", "maximum", "minimum"):
        assert torch.equal(torch.signbit(emitted.nan_to_num()), torch.signbit(exact.nan_to_num()))
    assert EpilogueProgram.from_json(program.to_json()) == program


def test_every_op_has_a_source_and_an_error():
    assert set(EXPRESSIONS) == set(ERRORS) == set(OPS) and all(EXPRESSIONS.values())
    assert {name for name, op in OPS.items() if INTEGER in op.takes} >= set(INTEGER_EXPRESSIONS)


def test_a_module_has_the_helpers_that_it_needs_and_no_others():
    for name, helpers in {"fmod": ["floor_quotient", "quotient"], "floordiv": ["floor_quotient"], "add": []}.items():
        source = emit(applied(name, torch.int32)[0])
        assert [helper for helper in HELPERS if f"def {helper}(" in source] == helpers
    assert "Int" not in emit(applied("remainder", torch.float32)[0])


def test_what_no_op_takes_is_refused():
    builder = ProgramBuilder()
    number, mask = builder.constant(3, torch.int8), builder.constant(True)
    for name, inputs in (
        ("exp", (number,)),
        ("add", (number, ACCUMULATOR)),
        ("add", (mask, mask)),
        ("lt", (mask, mask)),
        ("logical_and", (number, number)),
        ("bitwise_and", (ACCUMULATOR, ACCUMULATOR)),
        ("where", (number, number, number)),
        ("truncdiv", (ACCUMULATOR, ACCUMULATOR)),
    ):
        with pytest.raises(ValueError, match=name):
            builder.op(name, *inputs)
    program, _ = builder.build([Store(builder.convert(builder.op("neg", number), torch.float32), BF16)])
    for change in (["constant", [], "int8", "0x1p0"], ["constant", [], "float32", 3], ["constant", [], "int8", True]):
        with pytest.raises(ValueError):
            EpilogueProgram.from_json(program.to_json() | {"instructions": [change]})


def test_conversions():
    """Constants are converted at once where that changes nothing, everything else by an instruction."""
    builder = ProgramBuilder()
    assert builder.convert(builder.constant(3, torch.int32), torch.float32) == builder.constant(3.0)
    assert builder.convert(builder.constant(3.0), torch.int8) == builder.constant(3, torch.int8)
    assert builder.convert(builder.constant(NAN), torch.bool) == builder.constant(True)
    for constant, dtype in ((300, torch.int8), (-1, torch.uint8)):
        value = builder.convert(builder.constant(constant, torch.int32), dtype)
        program, _ = builder.build([Store(builder.convert(value, torch.float32), torch.float32)])
        expected = torch.tensor(constant).to(dtype).double()
        for compute in (evaluate, dry_run):
            assert compute(program, torch.zeros(1, 1), [])[0] == expected
    assert builder.convert(ACCUMULATOR, torch.float32) == ACCUMULATOR


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounding_to_a_float8_saturates(dtype):
    builder = ProgramBuilder()
    program, _ = builder.build([Store(builder.round_to(ACCUMULATOR, dtype), torch.float32)])
    largest = torch.finfo(dtype).max
    accumulator = torch.tensor([[1.05, 1e9, -INF, NAN, 1e-9, largest]], dtype=torch.float64)
    expected = torch.tensor([[1.0, largest, -largest, NAN, 0.0, largest]], dtype=torch.float64)
    for compute in (evaluate, dry_run):
        assert torch.equal(compute(program, accumulator, [])[0].nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("round", [0.5, 1.5, 2.5, -0.5, -1.5], [0.0, 2.0, 2.0, -0.0, -2.0]),
        ("sign", [NAN, INF, -INF, -0.0, -3.0], [0.0, 1.0, -1.0, 0.0, -1.0]),
        ("floor", [-0.5, NAN, INF, -0.0], [-1.0, NAN, INF, -0.0]),
        ("trunc", [-0.5, 1.9], [-0.0, 1.0]),
        ("signbit", [-0.0, 0.0, -1.0, INF], [1.0, 0.0, 1.0, 0.0]),
        ("isinf", [NAN, INF, -INF, 3e38], [0.0, 1.0, 1.0, 0.0]),
        ("isnan", [NAN, INF], [1.0, 0.0]),
        ("reciprocal", [0.0, -0.0, INF], [INF, -INF, 0.0]),
        ("log", [0.0, -1.0, INF], [-INF, NAN, INF]),
        ("log1p", [-1.0, -2.0, -0.0], [-INF, NAN, -0.0]),
        ("expm1", [-INF, INF, -0.0], [-1.0, INF, -0.0]),
    ],
)
def test_special_values_of_one_argument(name, inputs, expected):
    builder = ProgramBuilder()
    value = builder.convert(builder.op(name, ACCUMULATOR), torch.float32)
    program, _ = builder.build([Store(value, torch.float32)])
    expected = torch.tensor([expected], dtype=torch.float64)
    for compute in (evaluate, dry_run):
        (result,) = compute(program, torch.tensor([inputs], dtype=torch.float64), [])
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(result.nan_to_num()), torch.signbit(expected.nan_to_num()))


@pytest.mark.parametrize(
    ("name", "pairs", "expected"),
    [
        ("fmod", [(5.5, -2), (-5.5, 2), (1, INF), (1, 0), (INF, 1), (-0.0, 3)], [1.5, -1.5, 1, NAN, NAN, -0.0]),
        ("remainder", [(5.5, -2), (-5.5, 2), (1, -INF), (1, 0), (-0.0, 3)], [-0.5, 0.5, -INF, NAN, -0.0]),
        ("pow", [(NAN, 0), (1, NAN), (-2, 3), (-2, 0.5), (0, -1), (-INF, 3)], [1, 1, -8, NAN, INF, -INF]),
        ("maximum", [(NAN, 1), (1, NAN), (2, 1)], [NAN, NAN, 2]),
        ("minimum", [(NAN, 1), (1, NAN), (2, 1)], [NAN, NAN, 1]),
        ("copysign", [(1, -0.0), (-2, 0.0), (NAN, -1)], [-1, 2, NAN]),
        ("div", [(1, -0.0), (0, 0), (INF, INF)], [-INF, NAN, NAN]),
        ("atan2", [(-0.0, -1), (0, -1)], [-math.pi, math.pi]),
    ],
)
def test_special_values_of_two_arguments(name, pairs, expected):
    builder = ProgramBuilder()
    row = builder.operand("row", Operand(OperandKind.ROW, torch.float32))
    program, _ = builder.build([Store(builder.op(name, ACCUMULATOR, row), torch.float32)])
    x, y = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    expected = torch.tensor([expected], dtype=torch.float64)
    for compute in (evaluate, dry_run):
        (result,) = compute(program, x.unsqueeze(0), [y])
        torch.testing.assert_close(result, expected, rtol=1e-15, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(result.nan_to_num()), torch.signbit(expected.nan_to_num()))


# What follows goes through torch.compile.


@pytest.fixture
def forced(h200, inductor_config, instant_kernels):
    with inductor_config.patch(nvgemm_fusion_force=True, nvgemm_fusion_candidates=1):
        yield


def widened(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def fused(function, inputs, calls):
    """The one fused call of `function`, after a check that it computes what the function does in float64."""
    calls.clear()
    torch._dynamo.reset()
    torch.compile(function, dynamic=False)(*inputs)
    (call,) = calls
    exact = function(*map(widened, inputs)).reshape(call.gemm.size)
    for result in run_on_cpu(call, calls.buffers):
        torch.testing.assert_close(result, exact.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    return call


ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": lambda v: F.celu(v, alpha=1.5),
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus beta": lambda v: F.softplus(v, beta=2.0, threshold=3.0),
    "softsign": F.softsign,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda v: F.threshold(v, 0.1, -2.0),
    "logsigmoid": F.logsigmoid,
    "soft cap": lambda v: 30.0 * torch.tanh(v / 30.0),
    "squared relu": lambda v: F.relu(v).square(),
}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(forced, kernel_calls, name, dtype):
    x, w = randn(16, 32, dtype=dtype), randn(128, 32, dtype=dtype)
    fused(lambda x, w: ACTIVATIONS[name](F.linear(x, w)), (x, w), kernel_calls)


FUNCTIONS = {
    "sin and cos": lambda v, o: torch.sin(v) + torch.cos(o) * torch.tan(v * 0.1),
    "hyperbolic": lambda v, o: torch.sinh(v * 0.1) - torch.cosh(o) + torch.asinh(v) + torch.acosh(o.abs() + 1),
    "inverse": lambda v, o: torch.asin(v.clamp(-1, 1)) + torch.acos(o.clamp(-1, 1)) + torch.atan(v) + torch.atan2(v, o),
    "logarithms": lambda v, o: (v.abs() + 1).log() + (o.abs() + 1).log2() + (v * v + 2).log10() + o.abs().log1p(),
    "exponentials": lambda v, o: torch.exp2(o) + torch.expm1(o) + (o * 0.1).atanh() + torch.erfc(v),
    "powers": lambda v, o: (v.abs() + 0.5) ** 0.7 + o**3 + (v.abs() + 1) ** -2 + 2**o,
    "powers of tensors": lambda v, o: (o.abs() + 0.1) ** v.clamp(-3, 3) - 0.7**o,
    "roundings": lambda v, o: v.floor() + o.ceil() + (v * 4).round() + (o * 4).trunc() + torch.frac(v),
    "remainders": lambda v, o: torch.remainder(v, o.abs() + 0.5) + torch.fmod(v, 1.5) + torch.remainder(o, -0.75),
    "floor division": lambda v, o: torch.div(v, o.abs() + 1, rounding_mode="floor") + torch.floor_divide(o, 0.3),
    "trunc division": lambda v, o: torch.div(v, o.abs() + 1, rounding_mode="trunc"),
    "signs": lambda v, o: torch.sign(v) + torch.copysign(v, o) + torch.where(torch.signbit(o), v, o) + torch.sgn(o),
    "reciprocals": lambda v, o: torch.reciprocal(v.abs() + 1) + (o.abs() + 1).rsqrt() + torch.square(o),
    "logic": lambda v, o: torch.where((v > 0) & (o < 1) | ~(v > o) ^ (o != 0), v, o),
    "logical": lambda v, o: torch.where(torch.logical_xor(v.round(), o.round()).logical_not(), v, o),
    "masks as numbers": lambda v, o: (v > 0) * v + (o > 0).to(v.dtype) * o + v * (v == o),
    "addcmul": lambda v, o: v.addcmul(o, v, value=0.5) + v.lerp(o, 0.25) + v.addcdiv(o, o.abs() + 1, value=2),
    "alpha": lambda v, o: torch.add(v, o, alpha=3) - torch.sub(o, v, alpha=0.5),
    "nan": lambda v, o: torch.nan_to_num(torch.where(v > 1, v / 0.0, o), 1.0, 9.0, -9.0) + torch.fmax(v, o) + v.isnan(),
    "logaddexp": lambda v, o: torch.logaddexp(v, o) + torch.xlogy(v, o.abs() + 1) + torch.logit(o.sigmoid()),
    "integers": lambda v, o: ((v * 20).to(torch.int32) % 7 + (o * 9).to(torch.int32) // 4).to(v.dtype),
    "bits": lambda v, o: ((v * 20).to(torch.int32) & 12 ^ ~(o * 9).to(torch.int32) | 5 << 2).to(v.dtype),
    "narrow integers": lambda v, o: v * (o.clamp(-3, 3) * 40).to(torch.int8).mul(3).div(5, rounding_mode="trunc"),
    "quantised": lambda v, o: v.mul(16).round().clamp(-128, 127).to(torch.int8).to(v.dtype) / 16 + o,
    "clamps": lambda v, o: v.clamp(min=-0.5) + o.clamp(max=0.25) + v.clamp(o - 1, o + 1),
    "heaviside": lambda v, o: torch.heaviside(v, o),
    "integer powers": lambda v, o: ((o.clamp(-3, 3) * 4).to(torch.int32) ** 3).abs().sign().to(v.dtype) * v,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_functions(forced, kernel_calls, name):
    inputs = randn(16, 32), randn(128, 32) / 4, randn(16, 128)
    if name in ("floor division", "remainders", "roundings", "integers", "bits", "narrow integers", "quantised"):
        inputs = tuple(torch.randint(-4, 5, tensor.shape).to(BF16) / 4 for tensor in inputs)  # nothing near a jump
    fused(lambda x, w, o: FUNCTIONS[name](F.linear(x, w), o), inputs, kernel_calls)


OPERANDS = {
    "mask": (torch.bool, lambda v, o: torch.where(o, v, -1.0)),
    "mask as number": (torch.bool, lambda v, o: v * o),
    "inverted mask": (torch.bool, lambda v, o: v.masked_fill(~o, 0.5)),
    "int8": (torch.int8, lambda v, o: v * o + (o * 3).to(v.dtype)),
    "uint8": (torch.uint8, lambda v, o: v * o - ((o + 7) >> 1)),
    "int32": (torch.int32, lambda v, o: v * (o & 6) + o // 3),
    "compared": (torch.int32, lambda v, o: torch.where(o > 2, v, o)),
    "float32": (torch.float32, lambda v, o: (v + o).to(v.dtype)),
    "float8 e4m3": (torch.float8_e4m3fn, lambda v, o: v * o.to(v.dtype)),
    "float8 e5m2": (torch.float8_e5m2, lambda v, o: v * o.to(v.dtype)),
}
SHAPES = {"tile": (16, 128), "row": (128,), "column": (16, 1), "scalar": (1,)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_other_dtypes(forced, kernel_calls, name, kind):
    dtype, function = OPERANDS[name]
    operand = torch.randn(SHAPES[kind]) * 3
    operand = operand > 0 if dtype == torch.bool else (operand.abs() if dtype == torch.uint8 else operand).to(dtype)
    call = fused(lambda x, w, o: function(F.linear(x, w), o), (randn(16, 32), randn(128, 32), operand), kernel_calls)
    (found,) = call.spec.program.operands
    assert (found.kind.value, found.dtype) == (kind, dtype)


def test_a_large_int32_arrives_whole(forced, kernel_calls):
    """As a float32 it would lose its last bits."""
    operand = torch.tensor([2**24 + 1, -(2**31), 2**31 - 1, 0x7FC00001]).to(torch.int32).repeat(16, 32)
    fused(lambda x, w, o: F.linear(x, w) * (o & 1), (randn(16, 32), randn(128, 32), operand), kernel_calls)


def test_a_program_of_200_operations(forced, kernel_calls):
    def function(x, w, o):
        value = F.linear(x, w)
        for step in range(50):
            value = torch.where(value > step / 64 - 0.5, value * 0.99 + o, value.abs() - 0.01 * step)
        return value

    call = fused(function, (randn(16, 32), randn(128, 32), randn(128)), kernel_calls)
    assert len(call.spec.program.instructions) >= 200


INDICES = torch.arange(128).flip(0)
WIDE = torch.arange(16 * 128).reshape(16, 128)
SHORT = WIDE.to(torch.int16)
REFUSED = {
    "randint": (lambda v, o: v + torch.randint(0, 5, (16, 128)) + o, "unsupported op", "load_seed"),
    "gather": (lambda v, o: v[:, INDICES] * 2, "index pattern", ""),
    "scatter": (lambda v, o: torch.zeros(16, 128, dtype=BF16).scatter_add(1, WIDE % 128, v), "mutation", ""),
    "padding": (lambda v, o: F.pad(v, (1, 1)) * 2, "index pattern", ""),
    "scan": (lambda v, o: v.cumsum(1), "not pointwise", ""),
    "sort": (lambda v, o: v.sort(1)[0], "not pointwise", ""),
    "triangle": (lambda v, o: v.tril(), "index pattern", "index_expr"),
    "positions": (lambda v, o: v * torch.arange(128), "index pattern", "index_expr"),
    "int64": (lambda v, o: v.to(torch.int64) * 2.5, "dtype", "a conversion to torch.int64"),
    "int64 operand": (lambda v, o: v * WIDE, "dtype", "torch.int64"),
    "int16 operand": (lambda v, o: v * SHORT, "dtype", "torch.int16"),
    "float64": (lambda v, o: (v.double() * 2.5).to(BF16), "dtype", "a conversion to torch.float64"),
    "int16 result": (lambda v, o: v.to(torch.int16), "dtype", "torch.int16"),
    "bits of a float": (lambda v, o: v.view(torch.int16).bitwise_and(3).to(BF16), "unsupported op", "to_dtype_bitcast"),
    "bucketize": (lambda v, o: torch.bucketize(v, torch.arange(4.0).to(BF16)).to(BF16), "index pattern", "bucketize"),
    "lgamma": (lambda v, o: torch.lgamma(v), "unsupported op", "lgamma"),
    "erfinv": (lambda v, o: torch.erfinv(v), "unsupported op", "erfinv"),
    "hypot": (lambda v, o: torch.hypot(v, o), "unsupported op", "hypot"),
    "nextafter": (lambda v, o: torch.nextafter(v.float(), o.float()), "unsupported op", "nextafter"),
    "frexp": (lambda v, o: torch.frexp(v)[0] + o, "unsupported op", "frexp"),
    "bessel": (lambda v, o: torch.special.bessel_j0(v.float()), "unsupported op", "bessel_j0"),
    "pooling": (lambda v, o: F.max_pool1d(v, 3) * 2, "index pattern", ""),
    "flip": (lambda v, o: (v * 2).flip(1), "index pattern", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_fused_has_a_reason(forced, decisions, name):
    function, reason, detail = REFUSED[name]
    torch.compile(lambda x, w, o: function(F.linear(x, w), o), dynamic=False)(randn(16, 32), randn(128, 32), randn(128))
    (record,) = decisions()
    assert not record["fused"]
    assert any(r["reason"] == reason and detail in r["detail"] for r in record["refusals"]), record["refusals"]


def handler_ops():
    """The names of Inductor's ops, with how many arguments each needs."""
    from torch._inductor.ops_handler import OpsHandler

    for name, method in inspect.getmembers(OpsHandler, inspect.isfunction):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        if not name.startswith("_"):
            yield name, sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_every_op_of_inductor_is_captured_or_refused():
    """Those that a graph cannot bring here, too: never an exception of another kind."""
    from nvgemm_fusion.scheduler_hooks.capture import _Recorder, _Refused, _Value

    builder, captured = ProgramBuilder(), set()
    recorder = _Recorder(types.SimpleNamespace(builder=builder), None)
    for name, count in handler_ops():
        if name in ("load", "store", "constant", "to_dtype"):
            continue
        try:
            assert isinstance(getattr(recorder, name)(*[_Value(ACCUMULATOR)] * count), _Value)
            captured.add(name)
        except _Refused as error:
            assert error.refusal.reason.value in ("unsupported op", "index pattern", "dtype") and error.refusal.detail
    floats = {name for name, op in OPS.items() if FLOAT in op.takes} - {"div"}
    assert captured >= floats - {"div_rn"} | {"truediv", "mod", "identity"}
    assert not captured & {"rand", "load_seed", "masked", "index_expr", "indirect_indexing", "scan", "sort", "lgamma"}


def test_kinds():
    assert [kind_of(dtype) for dtype in (torch.float8_e5m2, torch.uint8, torch.bool)] == [FLOAT, INTEGER, BOOL]


# The page, and what is measured on a GPU.


def test_the_page_of_operations_is_up_to_date():
    """If not: python -m nvgemm_fusion.bench.operations --page"""
    assert operations_page.PAGE.read_text(encoding="utf-8") == operations_page.page()


def test_the_page_shows_what_was_measured(monkeypatch, tmp_path):
    right = {"ulp": 0.5, "at": ["1.0"], "beyond": 0.0, "mismatches": 0, "as_eager": 0}
    results = {"gpu": "NVIDIA H200", "torch": "2.13.0", "ops": {"exp": {"float32": right | {"ulp": 1.625}}}}
    results["ops"]["add"] = {"float32": right, "int8": right | {"ulp": 9.0, "beyond": 8.5}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    monkeypatch.setattr(operations_page, "RESULTS", path)
    lines = operations_page.page().splitlines()
    assert next(line for line in lines if line.startswith("| exp |")).endswith("| 1.62 |")
    assert next(line for line in lines if line.startswith("| add |")).endswith("| 9.00 (wrong: int8) |")
    assert next(line for line in lines if line.startswith("| sub |")).endswith("| not measured yet |")


def test_what_is_emitted_passes_the_check_of_the_gpu(monkeypatch):
    """The emitted source, run in float64 and rounded to float32, is within every bound; what is wrong is not."""
    monkeypatch.setattr(operations, "N", 16)
    monkeypatch.setattr(operations, "M", 1024)
    measured = list(operations.cases("cpu"))
    assert {case.name for case in measured} == set(OPS)
    zeros = torch.zeros(operations.M, operations.N, dtype=torch.float64)
    for case in measured:
        result = dry_run(case.program, zeros, case.operands)[0].float()
        record = operations.compare(case, result, result)
        assert record["ulp"] <= 0.5 and not record["beyond"] and not record["mismatches"], (case.name, record)
    case = next(case for case in measured if case.name == "exp")
    result = dry_run(case.program, zeros, case.operands)[0].float()
    assert operations.compare(case, result * (1 + 2**-20), result)["beyond"] > 2
    record = operations.compare(case, result.nan_to_num(1.0), result)
    assert record["mismatches"] and len(record["examples"]) == operations.SHOWN
    record = operations.compare(case, result, result.nan_to_num(1.0))  # where Inductor is not right, eager is
    assert record["as_eager"] and not record["mismatches"]


def test_the_kernels_that_are_measured_compile():
    """The widest, and one of each kind; on a GPU they all have to."""
    wanted = {("fma", torch.float32), ("where", torch.bool), ("floordiv", torch.int8), ("remainder", torch.int32)}
    measured = [case for case in operations.cases("cpu") if (case.name, case.dtype) in wanted]
    assert len(operations.compiled(measured, KernelStore(), workers=2)) == len(measured)


def test_inductor_makes_a_kernel_of_each_op_that_is_measured(monkeypatch, h200):
    monkeypatch.setattr(operations, "N", 16)
    monkeypatch.setattr(operations, "M", 1024)
    measured = [case for case in operations.cases("cpu") if case.dtype == torch.float32]
    torch._dynamo.reset()
    results = operations.by_inductor(measured)
    assert {(result.shape, result.dtype) for result in results} == {((1024, 16), torch.float32)}
    assert len(results) == len(measured)
    assert h200.code[-1].count("async_compile.triton(") > len(measured) - 5  # some are each other's, as mul and mul_rn


@pytest.fixture(scope="module")
def results():
    return operations.measure()


@pytest.mark.gpu
@pytest.mark.xdist_group("what `results` needs minutes for, in one process")
@pytest.mark.parametrize("name", OPS)
def test_an_op_on_a_gpu(results, name):
    for dtype, record in results["ops"][name].items():
        assert record["compared"], dtype
        assert not record["beyond"], f"{dtype}: {record['ulp']} ulp at {record['at']}"
        assert not record["mismatches"], f"{dtype}: {record['mismatches']} special values: {record['examples']}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tile", "transposed", "row", "column", "scalar"])
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_on_a_gpu(name, kind, inductor_config, decisions):
    """Against float64, where nothing that a kernel rounds decides: the product is of small integers."""
    dtype, function = OPERANDS[name]
    size = {"tile": (272, 528), "transposed": (528, 272), "row": (528,), "column": (272, 1), "scalar": (1,)}[kind]
    operand = torch.randint(0, 2 if dtype == torch.bool else 9, size, device="cuda").to(dtype)
    if dtype.is_signed and dtype != torch.bool:
        operand = (operand.float() - 4).to(dtype)
    x, w = (torch.randint(-2, 3, size, device="cuda").to(BF16) for size in ((272, 64), (528, 64)))

    def run(x, w, o):
        return function(F.linear(x, w), o.t() if kind == "transposed" else o)

    with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
        result = torch.compile(run, dynamic=False)(x, w, operand)
    exact = run(*map(widened, (x, w, operand))).to(result.dtype)
    assert any(record["fused"] for record in decisions()), [record["refusals"] for record in decisions()]
    torch.testing.assert_close(result, exact, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_all_bits_of_an_int32_arrive_on_a_gpu(inductor_config, decisions):
    operand = torch.randint(-(2**31), 2**31, (256, 512), device="cuda").to(torch.int32)
    x, w = torch.zeros(256, 64, device="cuda", dtype=BF16), torch.zeros(512, 64, device="cuda", dtype=BF16)
    for tensor in (operand, operand[0].clone(), operand[:, :1].clone(), operand[0, :1].clone()):
        torch._dynamo.reset()
        for shift in (0, 8, 16, 24):
            def run(x, w, o, shift=shift):
                return F.linear(x, w) + ((o >> shift) & 255).to(torch.bfloat16)

            with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():
                assert torch.equal(torch.compile(run, dynamic=False)(x, w, tensor), run(x, w, tensor))
    assert any(record["fused"] for record in decisions())
