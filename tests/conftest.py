"""What the tests share: a cache folder of their own, the virtual device, and the mark for those that need a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hypothesis
import pytest
import torch

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_configure(config):
    # A machine with other work is slow, and not wrong.
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=too_slow)
    hypothesis.settings.load_profile("suite")
    # Kernels compiled by tests stay out of the user's cache, and are shared by the processes of one run.
    root = Path(os.environ.get("NVGEMM_FUSION_TEST_CACHE", "/tmp/nvgemm_fusion_tests"))
    os.environ.setdefault("NVGEMM_FUSION_CACHE_DIR", str(root / f"torch{torch.__version__}"))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs an SM90 GPU"))


@pytest.fixture
def inductor_config():
    """`torch._inductor.config`, with the settings of a test undone afterwards."""
    import torch._inductor.config as config

    with config.patch(
        max_autotune_gemm=True,
        max_autotune_gemm_backends="ATEN,TRITON",
        nvgemm_epilogue_fusion=True,
        nvgemm_fusion_cache=False,
        nvgemm_fusion_candidates=2,
        fx_graph_cache=False,  # a graph that another run has compiled is not decided again
        shape_padding=False,  # whether it pays is measured, so what a graph looks like would change from run to run
    ):
        yield config
    torch._dynamo.reset()


@pytest.fixture
def decisions(tmp_path, inductor_config):
    """A function that gives the decision records logged so far in this test."""
    path = tmp_path / "decisions.jsonl"
    with inductor_config.patch(nvgemm_fusion_log=str(path)):
        yield lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def h200(inductor_config):
    """The virtual H200."""
    from nvgemm_fusion.scheduler_hooks.virtual_device import virtual_device

    with virtual_device("H200") as device, torch.no_grad():
        yield device


@pytest.fixture
def instant_kernels(monkeypatch):
    """Kernels "compile" at once, to nothing: for tests of what is decided and written rather than of the compilers."""
    from concurrent.futures import Future

    from nvgemm_fusion.lowering.compiler import CompiledKernel
    from nvgemm_fusion.scheduler_hooks import alternatives, choices

    class InstantCompiler:
        def expect(self, spec):
            pass

        def prepare(self, spec):
            pass

        def submit(self, spec):
            future = Future()
            future.set_result(CompiledKernel(spec, Path(os.devnull), 0.0))
            return future

    compiler = InstantCompiler()
    for module in (alternatives, choices):
        monkeypatch.setattr(module, "shared_compiler", lambda workers: compiler)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The kernel calls written into generated code, in order; `kernel_calls.buffers` has the tensors of the graph's
    inputs by the names that Inductor gives them, once the compiled function has run on the virtual device."""
    from nvgemm_fusion.scheduler_hooks.kernel_call import KernelCall

    class Calls(list):
        buffers: dict = {}

    calls = Calls()
    write, run = KernelCall.write, torch.fx.Interpreter.run

    def run_and_note(interpreter, *inputs, **options):
        placeholders = [node.name for node in interpreter.module.graph.nodes if node.op == "placeholder"]
        calls.buffers = dict(zip(placeholders, inputs))
        return run(interpreter, *inputs, **options)

    monkeypatch.setattr(KernelCall, "write", lambda call: (calls.append(call), write(call))[1])
    monkeypatch.setattr(torch.fx.Interpreter, "run", run_and_note)
    return calls


@pytest.fixture
def checked_graphs(h200, instant_kernels, inductor_config, monkeypatch):
    """With every graph that runs, what was generated for it runs on the CPU in float64, and must give what the graph
    itself does. Regions are fused by force. The list holds the kernel calls of each graph that was compared."""
    from nvgemm_fusion.bench.generated_code import run_on_cpu
    from nvgemm_fusion.bench.numerics import relaid, tensors, widened
    from nvgemm_fusion.fusion.reference import converted
    from torch._inductor import compile_fx

    compile_graph, compared = compile_fx._compile_fx_inner, []

    class InFloat64(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is torch.ops.prims.convert_element_type.default and args[1].is_floating_point:
                if args[1].itemsize == 1:
                    return converted(args[0], args[1]).double()
                args = args[0], torch.float64  # Inductor's kernels do not round on their way, either
            return super().call_function(target, args, kwargs)

    def compile_and_check(graph, inputs, **options):
        run = compile_graph(graph, inputs, **options)
        source = h200.code[-1]

        def run_and_check(values):
            given = list(values)
            results = run_on_cpu(source, given)
            if results is not None:
                expected = tensors(InFloat64(graph).run(*(relaid(tensor, widened) for tensor in given)))
                for result, exact in zip(results, expected, strict=True):
                    torch.testing.assert_close(result, exact, rtol=1e-9, atol=1e-9, equal_nan=True)
                compared.append([line for line in source.splitlines() if line.lstrip().startswith("nvgemm_")])
            return run(values)

        run_and_check._boxed_call = True
        return run_and_check

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", compile_and_check)
    with inductor_config.patch(nvgemm_fusion_force=True, nvgemm_fusion_candidates=1):
        yield compared
