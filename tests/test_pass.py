"""From a compiled function to generated code, on the virtual H200: what is fused, what is not and why."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import types

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.fusion.program import OperandKind
from nvgemm_fusion.fusion.reasons import Refusal

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("h200", "instant_kernels")


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


X, W, BIAS, TILE = randn(64, 32), randn(128, 32), randn(128), randn(64, 128)


def long_chain(value, tile):
    """More operations than Inductor computes twice, so the result is a buffer of its own."""
    for _ in range(4):
        value = torch.sigmoid(value.clamp(-2, 2) * tile + 0.125) * 1.5 - tile
    return torch.tanh(value)


def reasons(record):
    return [refusal["reason"] for refusal in record["refusals"]]


def test_one_call_computes_gemm_and_epilogue(h200, decisions):
    torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
    (record,) = decisions()
    assert record["fused"] and record["alternatives"][record["chosen"]]["status"] == "modelled"
    code = h200.code[-1]
    call = code[code.index("def call") : code.index("return (")]
    assert call.count("nvgemm_") == 1
    assert call.count("empty_strided_cuda(") == 1, "the product must not be allocated"
    assert "extern_kernels" not in call and "triton_" not in call
    assert code.count("load_kernel(") == 1 and "from nvgemm_fusion.lowering.launcher import load_kernel" in code


@pytest.mark.parametrize("backends", ["ATEN", "TRITON", "ATEN,TRITON,NVGEMM"])
def test_any_list_of_backends_will_do(h200, inductor_config, decisions, backends):
    with inductor_config.patch(max_autotune_gemm_backends=backends):
        torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
    assert decisions()[0]["fused"] and "nvgemm_" in h200.code[-1]


def test_the_generated_module_is_valid_python(h200):
    torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b)))(X, W, BIAS)
    compile(h200.code[-1], "generated", "exec")


@pytest.mark.parametrize("shape", [(1,), (128,), (64, 1), (64, 128)], ids=str)
def test_what_a_kernel_reads_is_there_until_it_is_called(h200, inductor_config, shape):
    """Also a bias of one element, which Inductor expands for its templates and hands to ATen as it is."""
    with inductor_config.patch(nvgemm_fusion_force=True, max_autotune_gemm_backends="ATEN"):
        torch.compile(lambda x, w, o: F.linear(x, w) + (o >> 8).to(BF16))(X, W, torch.ones(shape, dtype=torch.int32))
    before, _, call = h200.code[-1].partition("def call")[2].partition("    nvgemm_")
    buffers = re.findall(r"\bbuf\d+", call.splitlines()[0])
    assert len(buffers) == 2 and not [name for name in buffers if f"del {name}" in before]


def test_the_same_kernel_is_loaded_once(h200, inductor_config):
    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(lambda x, w, v: (F.relu(F.linear(x, w)), F.relu(F.linear(x, v))))(X, W, randn(256, 32))
    assert h200.code[-1].count("load_kernel(") == 1
    assert h200.code[-1].count("nvgemm_") >= 3


def test_the_record_says_everything(decisions):
    torch.compile(lambda x, w, r: F.silu(F.linear(x, w)) * r)(X, W, TILE)
    (record,) = decisions()
    assert record["problem"]["m"] == 64 and record["problem"]["target"] == "sm_90a"
    assert record["digest"] in record["programs"]
    assert {a["backend"] for a in record["alternatives"]} == {"ATEN", "TRITON", "NVGEMM"}
    operators = [operator for node in record["nodes"] for operator in node["operators"]]
    assert {"mm", "silu", "mul"} <= set(operators)
    assert any("test_pass.py" in line and "F.silu" in line for node in record["nodes"] for line in node["source"])
    assert record["versions"]["torch"] == torch.__version__ and record["target"] == "H200"
    assert record["edges"] == [[node["name"] for node in record["nodes"]]]
    assert all(a["us"] is not None or a["reason"] for a in record["alternatives"])
    assert record["speedup"] > 1


def test_a_norm_behind_a_residual_is_timed_on_both_sides(decisions, monkeypatch):
    """Stock: product, then one kernel of addition and norm. Ours: the sum, then a kernel of the norm alone."""
    from nvgemm_fusion.scheduler_hooks import alternatives
    from nvgemm_fusion.scheduler_hooks.workload import grouped

    kernels, modelled = {}, alternatives._with_modelled_time

    def note(contest, entrant):
        _, after = contest.separate(entrant.region)
        groups = grouped([contest.nodes[name] for name in after])
        kernels.setdefault(entrant.alternative.fused, [len(group.get_nodes()) for group in groups])  # of the first GEMM
        return modelled(contest, entrant)

    monkeypatch.setattr(alternatives, "_with_modelled_time", note)

    def block(x, w, v, r):
        kept = F.linear(x, w) + r
        return kept, F.linear(F.rms_norm(kept, (128,)), v)

    # With three dimensions, since Inductor makes one addmm of a product and an addition with two.
    torch.compile(block)(X.view(4, 16, 32), W, randn(128, 128), TILE.view(4, 16, 128))
    first = decisions()[0]
    (addition,) = [node["name"] for node in first["nodes"][1:]]
    assert kernels[()] == [3] and kernels[(addition,)] == [2], kernels
    assert {len(a["separate"]) for a in first["alternatives"]} == {3, 2}


def test_swiglu_fuses_into_one_of_the_two(decisions):
    torch.compile(lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v))(X, W, randn(128, 32))
    first, second = decisions()
    assert first["fused"] and not second["fused"]
    assert reasons(second) == ["taken"]


def test_two_gemms_that_read_each_other_do_not_wait_forever(h200, decisions):
    """Both pointwise nodes read both products; only one of them may go into an epilogue."""

    def function(x, w, v, t):
        a, b = F.linear(x, w), F.linear(x, v)
        return (torch.relu(a) * b) @ t.t(), (torch.tanh(b) * a) @ t.t()

    torch.compile(function)(X, W, randn(128, 32), TILE)
    assert len(decisions()) == 4
    compile(h200.code[-1], "generated", "exec")


def test_a_residual_in_front_of_a_norm_stays_with_the_norm(decisions):
    torch.compile(lambda x, w, r: F.rms_norm(F.linear(x, w) + r, (128,)))(X, W, TILE)
    (record,) = decisions()
    assert not record["fused"] and set(reasons(record)) <= {"not pointwise", "reader fuses", "not convex"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w, r: F.linear(x, w).view(8, 8, 128).transpose(0, 1).relu().contiguous(), "index pattern"),
        (lambda x, w, r: F.relu(F.linear(x, w)).roll(4, 0), "index pattern"),
        (lambda x, w, r: F.relu(F.linear(x, w)[:, ::2]) + 1, "index pattern"),
        (lambda x, w, r: F.relu(F.linear(x, w)[8:]) + 1, "index pattern"),
        (lambda x, w, r: torch.special.bessel_j0(F.linear(x, w).float()), "unsupported op"),
        (lambda x, w, r: F.linear(x, w).to(torch.int64) + 1, "dtype"),
        (lambda x, w, r: F.linear(x, w).double() * 2, "dtype"),
        (lambda x, w, r: F.softmax(F.linear(x, w), -1), "not pointwise"),
        (lambda x, w, r: (lambda y: (F.relu(y), y.sum()))(F.linear(x, w)), "reader fuses"),
        (lambda x, w, r: (lambda a: (a.sum(0), a.sum(1)))(long_chain(F.linear(x, w), r)), "reader fuses"),
        (lambda x, w, r: F.relu(F.linear(x, w)) + r[:, 1:129], "alignment"),
        (lambda x, w, r: F.relu(F.linear(x, w)) + r[:, 0:256:2], "layout"),
    ],
)
def test_left_alone_with_a_reason(decisions, inductor_config, function, reason):
    tile = randn(64, 256) if reason in ("alignment", "layout") else TILE
    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(function)(X, W, tile)
    records = decisions()
    assert records and not any(record["alternatives"][record["chosen"]]["fused"] for record in records)
    assert reason in [r for record in records for r in reasons(record)]


def test_a_value_that_is_read_at_another_element_ends_the_region(decisions, inductor_config):
    def function(x, w, r):
        a = long_chain(F.linear(x, w), r)
        return a, torch.exp(a + a.t())

    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(function)(X, randn(64, 32), randn(64, 64))
    (record,) = decisions()
    assert "index pattern" in reasons(record) and len(record["alternatives"][record["chosen"]]["fused"]) < 3
    assert "read at another element" in str(record["refusals"])


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((randn(64, 32, dtype=torch.float64), randn(128, 32, dtype=torch.float64)), "dtype"),
        ((randn(64, 32, dtype=torch.float32), randn(128, 32, dtype=torch.float32)), "dtype"),
        ((randn(64, 36), randn(128, 36)), "alignment"),
        ((randn(64, 33)[:, 1:], randn(128, 32)), "alignment"),
        ((randn(3, 64, 32), randn(3, 128, 32)), "unsupported op"),
    ],
)
def test_gemms_that_get_no_candidates(decisions, inputs, reason):
    torch.compile(lambda x, w: torch.relu(x @ w.mT))(*inputs)
    assert [r for record in decisions() for r in reasons(record)] == [reason]


def test_symbolic_shapes_are_stock(h200, decisions):
    torch.compile(lambda x, w: torch.relu(x @ w.t()), dynamic=True)(X, W)
    (record,) = decisions()
    assert reasons(record) == ["symbolic shape"] and "nvgemm_" not in h200.code[-1]


def test_empty_sizes_are_stock(h200, decisions):
    torch.compile(lambda x, w: torch.relu(x @ w.t()))(randn(0, 32), W)
    assert "nvgemm_" not in h200.code[-1]


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64, torch.int64], ids=str)
def test_a_number_on_the_cpu_is_passed_with_each_call(h200, kernel_calls, inductor_config, decisions, dtype):
    """The virtual device moves every tensor to the GPU, so the graph is made by hand: a 0-d CPU tensor as scale."""
    from nvgemm_fusion.scheduler_hooks.virtual_device import DEVICE, lower
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        x, w = torch.empty(64, 32, dtype=BF16, device=DEVICE), torch.empty(32, 128, dtype=BF16, device=DEVICE)
        inputs = [x, w, torch.empty((), dtype=dtype)]
        graph = make_fx(lambda x, w, s: (torch.relu(x @ w) * s,), decomposition_table=select_decomp_table())(*inputs)
    with V.set_debug_handler(DebugContext()), inductor_config.patch(nvgemm_fusion_force=True):
        lower(h200, graph, inputs)
    (record,) = decisions()
    if dtype == torch.int64:
        assert reasons(record) == ["dtype"]
        return
    (call,) = kernel_calls
    assert [operand.kind for operand in call.spec.program.operands] == [OperandKind.NUMBER]
    assert "s_1" in h200.code[-1] and record["fused"]


def test_a_python_number_that_changes_is_not_baked_in(h200, inductor_config, decisions):
    x, w = randn(64, 32), randn(128, 32)
    with inductor_config.patch(nvgemm_fusion_force=True):
        compiled = torch.compile(lambda x, w, s: torch.relu(F.linear(x, w)) * s)
        for number in (0.5, 0.7, 0.9):
            compiled(x, w, number)
    once, changing = decisions()  # Dynamo takes the first one for a constant, and checks that it stays
    assert "constant(0.5)" in str(once["programs"])
    assert "o0: number" in str(changing["programs"]) and "constant" not in str(changing["programs"])
    assert once["fused"] and changing["fused"]


def test_a_gemm_of_a_tensor_with_itself(h200, inductor_config, decisions):
    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(lambda x: torch.relu(x @ x))(randn(64, 64))
    assert decisions()[0]["fused"]


def test_outputs_planned_into_a_concatenation_are_left_alone(h200, inductor_config, decisions):
    """Inductor lets many producers write straight into the result of a cat, which they alias."""
    with inductor_config.patch(nvgemm_fusion_force=True):
        torch.compile(lambda x, *ws: torch.cat([F.relu(F.linear(x, w)) for w in ws], 1))(
            X, *(randn(16 * (i + 1), 32) for i in range(9))
        )
    assert [reasons(record) for record in decisions()] == [["mutation"]] * 9
    assert "nvgemm_" not in h200.code[-1]


def test_what_stock_computes_in_the_same_kernel_counts_on_both_sides(decisions):
    """Stock draws the random numbers in the kernel that uses them; fused, they need a kernel of their own."""
    torch.compile(lambda x, w: F.linear(x, w) * torch.rand(64, 128))(X, W)
    (record,) = decisions()
    random = {name for a in record["alternatives"] for name in a["separate"]} - {n["name"] for n in record["nodes"]}
    assert len(random) == 1
    assert all(random <= set(alternative["separate"]) for alternative in record["alternatives"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b, r: F.gelu(F.linear(x, w, b)),
        lambda x, w, b, r: F.linear(x, w) * torch.rand_like(r),
        lambda x, w, b, r: ((y := F.linear(x, w) * r), F.rms_norm(y, (128,))),
    ],
    ids=["after", "beside", "reduction"],
)
def test_inductor_generates_the_kernels_of_each_alternative(function, h200, decisions, monkeypatch):
    """On a GPU they would be compiled and timed; a scheduler under construction lacks what later ones need for it."""
    from nvgemm_fusion.scheduler_hooks import alternatives, fusion_pass, workload

    generated = []

    def contenders(contest):
        def compile_kernel(nodes):
            generated.append(contest.node.scheduler.generate_kernel_code_from_nodes(nodes, benchmark_kernel=True))
            return None, None

        found = alternatives.contenders(contest)
        with monkeypatch.context() as patch:
            patch.setattr(contest.node.scheduler, "compile_kernel", compile_kernel, raising=False)
            patch.setattr(workload, "_compile", lambda future, module: None)
            started = workload.Workload(contest).prepare(found)
        assert found and not [of for of in started if isinstance(of, Refusal)]
        return found

    monkeypatch.setattr(fusion_pass, "contenders", contenders)
    torch.compile(function)(X, W, BIAS, TILE)
    assert decisions()[0]["chosen"] is not None and all("triton" in code for code in generated) and generated


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x, w, r: F.relu(F.linear(x, w)) * r, True),
        (lambda x, w, r: (F.linear(x, w) * r).to(torch.float8_e4m3fn), False),
        (lambda x, w, r: ((y := F.linear(x, w)), (y * r).to(torch.float8_e4m3fn)), True),
    ],
    ids=["as much", "less", "product, too"],
)
def test_templates_wait_with_a_region_that_writes_no_less(function, waits, h200, decisions, monkeypatch):
    from nvgemm_fusion.scheduler_hooks import alternatives, fusion_pass

    entrants = []
    contenders = alternatives.contenders
    monkeypatch.setattr(fusion_pass, "contenders", lambda contest: entrants.extend(contenders(contest)) or entrants)
    torch.compile(function)(X, W, TILE)
    fused = [of for of in entrants if of.alternative.backend.value == "TRITON" and of.region is not None]
    assert fused and {of.waits for of in fused} == {waits}
    assert not [of for of in entrants if of not in fused and of.waits]


def test_inductor_compiles_only_the_kernels_that_do_not_wait(monkeypatch):
    from nvgemm_fusion.scheduler_hooks import alternatives

    prepared = []
    alone, fused = types.SimpleNamespace(waits=False), types.SimpleNamespace(waits=True)
    monkeypatch.setattr(alternatives, "current_virtual_device", lambda: None)
    monkeypatch.setattr(alternatives, "_timed_stock", lambda contest: [alone, fused])
    monkeypatch.setattr(alternatives, "Workload", lambda contest: types.SimpleNamespace(prepare=prepared.extend))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    contest = types.SimpleNamespace(node=types.SimpleNamespace(get_device=lambda: None), programs={None: "GEMM"})
    alternatives.compile_stock_ahead(contest)
    assert prepared == [alone]
    assert alternatives._prepared_stock(contest)[0] == [alone, fused]


@pytest.mark.parametrize("number", [0, 1], ids=["gemm", "reader"])
def test_what_the_program_places_itself_is_left_alone(number, h200, decisions, monkeypatch):
    from nvgemm_fusion.scheduler_hooks import torch_versions

    monkeypatch.setattr(torch_versions, "is_placed", lambda node: node.get_name() == f"op{number}")
    torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
    (record,) = decisions()
    assert not record["fused"] and "placed" in reasons(record)


def test_a_node_is_placed_by_a_stream_or_a_memory_pool():
    from nvgemm_fusion.scheduler_hooks.torch_versions import is_placed

    def node(*operations):
        parts = [types.SimpleNamespace(node=operation) for operation in operations]
        return types.SimpleNamespace(get_nodes=lambda: parts)

    def operation(**answers):
        return types.SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})

    somewhere = operation(get_stream_idx=None, get_mempool=None)
    assert not is_placed(node(None, operation(), somewhere))
    assert is_placed(node(somewhere, operation(get_stream_idx=0)))
    assert is_placed(node(operation(get_stream_idx=None, get_mempool=(0, 1))))


@pytest.mark.parametrize(
    ("dtype", "casts", "fused"), [(BF16, False, False), (torch.float32, False, True), (BF16, True, True)], ids=str
)
def test_an_operand_is_not_rounded_that_stock_does_not_round(inductor_config, decisions, dtype, casts, fused):
    """More operations than Inductor puts into one loop: stock fuses the two loops, and what passes between them stays
    in a register. A kernel of ours would read it from memory."""

    def function(x, w, r, t):
        for _ in range(16):
            t = torch.sin(t) * 1.1 + r
        return F.linear(x, w) * t

    with inductor_config.patch(emulate_precision_casts=casts, nvgemm_fusion_force=True):
        torch.compile(function)(X, W, BIAS.to(dtype), TILE.to(dtype))
    (record,) = decisions()
    assert record["fused"] == fused
    assert fused or "rounds more" in reasons(record)


def test_a_users_pass_is_still_called(inductor_config, decisions):
    seen = []

    def users_pass(nodes):
        seen.append([node.get_name() for node in nodes])
        return nodes

    with inductor_config.patch(_pre_fusion_custom_pass=users_pass):
        torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
        assert inductor_config._pre_fusion_custom_pass is users_pass
        torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) - r)(X, W, TILE)
    assert len(seen) == 2 and all(record["fused"] for record in decisions())


def test_training_graphs_compile(decisions):
    w = W.clone().requires_grad_()
    with torch.enable_grad():
        torch.compile(lambda x, w, b: F.relu(F.linear(x, w, b)))(X, w, BIAS).sum().backward()
    assert w.grad.shape == W.shape
    assert {record["graph"].endswith("_backward") for record in decisions()} == {False, True}


def test_a_failure_of_ours_costs_a_warning_and_nothing_else(h200, decisions, monkeypatch, caplog):
    from nvgemm_fusion.scheduler_hooks import fusion_pass

    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(fusion_pass, "contenders", broken)
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        result = torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
    torch.testing.assert_close(result, F.relu(F.linear(X, W)) * TILE)
    assert "left op0 to Inductor" in caplog.text and "nvgemm_" not in h200.code[-1]


def test_all_kernels_compile_before_the_first_gemm_is_decided(h200, inductor_config, decisions, monkeypatch, caplog):
    from nvgemm_fusion.scheduler_hooks import alternatives, fusion_pass, tuning

    events, compiler, contenders = [], alternatives.shared_compiler(1), fusion_pass.contenders
    monkeypatch.setattr(compiler, "prepare", lambda spec: events.append(spec.program.digest), raising=False)
    names = {"compile_stock_ahead": "kernels", "time_stock_ahead": "times"}
    for name, what in names.items():
        note = functools.partial(lambda what, contest, *_: events.append((what, contest.node.get_name())), what)
        monkeypatch.setattr(fusion_pass, name, note)
    monkeypatch.setattr(fusion_pass, "contenders", lambda contest: (events.append("contest"), contenders(contest))[1])

    def compiled():
        torch.compiler.reset()
        events.clear()
        with inductor_config.patch(nvgemm_fusion_cache=True):
            torch.compile(lambda x, w, v, b: F.relu(F.silu(F.linear(x, w, b)) @ v))(X, W, W.contiguous(), BIAS)
        return events

    *stock, _, _ = compiled()[-6:]
    assert events[-2:] == ["contest", "contest"] and len(set(events)) >= 9
    first, second = sorted(name for what, name in stock if what == "times")
    # All times before the first kernel that this process may compile; and see the pass for why the last comes first.
    assert stock == [("times", second), ("times", first), ("kernels", first), ("kernels", second)]
    assert len([record for record in decisions() if record["fused"]]) == 2
    # What was decided before is not compiled again, and what goes wrong here goes no further.
    monkeypatch.setattr(tuning, "is_known", lambda contest: True)
    assert compiled() == ["contest", "contest"]
    monkeypatch.setattr(fusion_pass, "compile_ahead", lambda contest, _: 1 / 0)
    monkeypatch.setattr(tuning, "is_known", lambda contest: False)
    assert compiled() == [*stock, "contest", "contest"]
    assert caplog.text.count("are not compiled ahead") == 2


def test_no_kernel_is_compiled_for_nodes_that_another_gemm_takes(h200, decisions, monkeypatch):
    from nvgemm_fusion.scheduler_hooks import alternatives

    prepared, compiler = [], alternatives.shared_compiler(1)
    monkeypatch.setattr(compiler, "prepare", lambda spec: prepared.append(spec.program.digest), raising=False)
    torch.compile(lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v))(X, W, W + 1)
    gate, up = decisions()
    assert gate["fused"] and not up["fused"]
    assert len(set(prepared)) == 2  # silu(gate) * up, and the product alone; not silu(gate) * up with up as the product


def test_when_no_kernel_compiles_stock_runs(h200, decisions, monkeypatch):
    from concurrent.futures import Future

    from nvgemm_fusion.fusion.reasons import Reason, Refusal
    from nvgemm_fusion.scheduler_hooks import alternatives

    class Broken:
        def submit(self, spec):
            future = Future()
            future.set_result(Refusal(Reason.COMPILE_ERROR, "planted"))
            return future

    monkeypatch.setattr(alternatives, "shared_compiler", lambda workers: Broken())
    torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
    (record,) = decisions()
    assert not record["fused"] and "nvgemm_" not in h200.code[-1]
    assert "compile error" in {a["reason"] for a in record["alternatives"]}


def test_inductor_knows_times_of_all_choices_when_it_knows_those_of_its_own(monkeypatch):
    """For it looks up all of them, and compiles all where one is missing."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    cache, keys = get_algorithm_selector_cache(), []
    (add_candidates,) = (f for f in cache.preprocessing_fns if f.__module__.startswith("nvgemm_fusion"))

    def spied(choices):
        found = add_candidates(choices)
        keys.append(([choice.hash_key() for choice in choices], [choice.hash_key() for choice in found]))
        return found

    others = [f for f in cache.preprocessing_fns if f is not add_candidates]
    monkeypatch.setattr(cache, "preprocessing_fns", [*others, spied])
    torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) * r)(X, W, TILE)
    ((stock, all_of_them),) = keys
    assert len(all_of_them) > len(stock) and set(all_of_them) == set(stock)
