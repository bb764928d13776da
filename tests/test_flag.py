"""The flag: there after `import torch` alone, cheap, part of the cache key, and without effect when it is off."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

IMPORT_LIMIT_S = 0.030


def python(script, **environment):
    """What a fresh interpreter prints for `script`, and what it says on standard error."""
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr


def test_it_is_there_after_import_torch_alone():
    out, _ = python("import torch, torch._inductor.config as config; print(config.nvgemm_epilogue_fusion)")
    assert out == "False"


def test_inductor_may_be_imported_first():
    script = "import torch._inductor.config as config; print(config.nvgemm_epilogue_fusion, config.nvgemm_fusion_log)"
    assert python(script)[0] == "False None"


def test_environment_variables():
    script = (
        "import torch, torch._inductor.config as config\n"
        "print(config.nvgemm_epilogue_fusion, config.nvgemm_fusion_force, config.nvgemm_fusion_log)"
    )
    out, _ = python(
        script, TORCHINDUCTOR_NVGEMM_EPILOGUE_FUSION="1", TORCHINDUCTOR_NVGEMM_FUSION_LOG="/tmp/decisions.jsonl"
    )
    assert out == "True False /tmp/decisions.jsonl"


@pytest.mark.parametrize(("value", "expected"), [("20", 20), ("", None), ("soon", None), ("-1", None)])
@pytest.mark.parametrize(("name", "default"), [("nvgemm_fusion_benchmark_ms", 150), ("nvgemm_fusion_candidates", 6)])
def test_a_number_in_the_environment(monkeypatch, caplog, name, default, value, expected):
    from nvgemm_fusion.scheduler_hooks import settings

    (setting,) = [setting for setting in settings.SETTINGS if setting.name == name]
    monkeypatch.setenv(f"TORCHINDUCTOR_{name.upper()}", value)
    assert settings._default(setting) == {"default": expected or default}
    assert ("whole number" in caplog.text) == (value in ("soon", "-1"))


def test_it_is_an_entry_like_any_other():
    import torch._inductor.config as config

    with config.patch(nvgemm_epilogue_fusion=True):
        assert config.nvgemm_epilogue_fusion
        with config.patch({"nvgemm_epilogue_fusion": False}):
            assert not config.nvgemm_epilogue_fusion
        assert config.nvgemm_epilogue_fusion
    assert not config.nvgemm_epilogue_fusion
    config.nvgemm_epilogue_fusion = True
    config.nvgemm_epilogue_fusion = False
    for candidates in (10, None):
        torch.compile(lambda x: x + 1, options={"nvgemm_epilogue_fusion": True, "nvgemm_fusion_candidates": candidates})


def test_it_is_in_the_cache_key():
    import torch._inductor.config as config
    from torch._inductor.codecache import FxGraphHashDetails

    def details():
        return FxGraphHashDetails(torch.fx.symbolic_trace(lambda x: x), [], {}, []).inductor_config

    off = details(), config.get_hash()
    with config.patch(nvgemm_epilogue_fusion=True):
        on = details(), config.get_hash()
    assert off[0]["nvgemm_epilogue_fusion"] is False and on[0]["nvgemm_epilogue_fusion"] is True
    assert off[1] != on[1]
    # What kernels are made with is in the key as well.
    assert importlib.metadata.version("quack-kernels") is not None
    assert on[0]["nvgemm_fusion_version"].startswith(importlib.metadata.version("nvgemm-epilogue-fusion") + "+")


def test_import_torch_is_hardly_slower():
    """The cost of our entry point, and of torch's search for entry points, over that of `import torch`."""
    script = (
        "import time; start = time.perf_counter(); import torch; loaded = time.perf_counter()\n"
        "torch._import_device_backends(); end = time.perf_counter()\n"
        "import sys; assert any(type(f).__name__ == 'AfterImport' for f in sys.meta_path)\n"
        "print((end - loaded) / (loaded - start), end - loaded)"
    )
    runs = [python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")[0].split() for _ in range(3)]
    ratio, seconds = min((float(ratio), float(seconds)) for ratio, seconds in runs)
    print(f"the entry point takes {1e3 * seconds:.1f} ms, {ratio:.4f} of import torch")
    assert seconds < IMPORT_LIMIT_S
    assert ratio < 0.05


def test_nothing_heavy_is_imported_before_it_is_needed():
    """A compile that has no use for a kernel imports what stock imports (torch 2.15 itself imports cutlass)."""
    script = (
        "import sys, torch\n"
        "assert not any(name.startswith('torch._inductor') for name in sys.modules)\n"
        "torch.compile(lambda x: (x @ x).relu(), options={options})(torch.randn(8, 8))\n"
        "print([name for name in ('quack', 'cutlass', 'nvMatmulHeuristics', 'rich') if name in sys.modules])\n"
    )
    stock, _ = python(script.format(options={}), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert python(script.format(options={"nvgemm_epilogue_fusion": True}))[0] == stock


GRAPHS = """
import json, sys, torch, torch.nn.functional as F
import torch._inductor.config as config
from nvgemm_fusion.scheduler_hooks.virtual_device import virtual_device

def randn(*shape):
    return torch.randn(*shape).to(torch.bfloat16)

def mlp(x, w, v, b, r):
    return F.linear(F.gelu(F.linear(x, w, b)), v)

def norm(x, w, v, b, r):
    return F.rms_norm(F.linear(x, w) + r, (128,))

def gated(x, w, v, b, r):
    return F.silu(F.linear(x, w)) * r

def attention(x, w, v, b, r):
    q, k = F.linear(x, w), F.linear(x, w, b)
    return F.softmax(q @ k.t(), -1) @ r

def train(x, w, v, b, r):
    return F.relu(F.linear(x, w, b)) * r

inputs = randn(64, 32), randn(128, 32), randn(32, 128), randn(128), randn(64, 128)
on = sys.argv[1:] == ["on"]
code = []
with config.patch(max_autotune_gemm=True, max_autotune_gemm_backends="ATEN,TRITON"):
    # What a compilation with the flag on leaves behind is nothing.
    flag = {"nvgemm_epilogue_fusion": True, "nvgemm_fusion_candidates": 1} if on else {}
    with config.patch(flag), virtual_device("H200") as device:
        torch.compile(gated, dynamic=False)(*inputs)
    assert on == ("nvgemm_" in device.code[0])
    for graph in (mlp, norm, gated, attention, train):
        with virtual_device("H200") as device:
            given = [x.clone().requires_grad_(graph is train) for x in inputs]
            result = torch.compile(graph, dynamic=False)(*given)
            if graph is train:
                result.sum().backward()
        code.append(device.code)
print(json.dumps(code))
"""


def test_off_the_code_is_stock_inductors_character_for_character(tmp_path):
    graphs = tmp_path / "graphs.py"
    graphs.write_text(GRAPHS)
    results = {}
    for mode, autoload in (("off", "0"), ("on", "1")):
        environment = {
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        }
        run = subprocess.run(
            [sys.executable, str(graphs), mode], env=environment, capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stderr
        results[mode] = json.loads(run.stdout.splitlines()[-1])
    assert [len(code) for code in results["off"]] == [1, 1, 1, 1, 2]
    assert results["off"] == results["on"]


def test_a_missing_package_is_found_out(monkeypatch):
    from nvgemm_fusion.lowering import packages

    version = importlib.metadata.version

    def without_quack(name):
        if name == "quack-kernels":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_quack)
    found = packages.installed_versions.__wrapped__()  # what is remembered stays right
    assert [name for name, version in found.items() if version is None] == ["quack-kernels"]


def test_a_missing_package_is_named_once_and_stock_compiles(h200, decisions, instant_kernels, monkeypatch, caplog):
    from nvgemm_fusion.scheduler_hooks import choices

    monkeypatch.setattr(choices, "missing_packages", lambda: ["quack-kernels"])
    choices._say_what_is_missing.cache_clear()
    for function in (lambda x, w: torch.relu(x @ w), lambda x, w: torch.tanh(x @ w)):
        torch.compile(function)(torch.randn(64, 32).bfloat16(), torch.randn(32, 64).bfloat16())
    assert caplog.text.count("pip install quack-kernels") == 1
    assert len(h200.code) == 2 and "nvgemm_" not in "".join(h200.code) and not decisions()


def test_without_any_of_the_packages_the_import_hook_is_harmless(tmp_path):
    """A process in which the kernels' packages cannot be imported at all."""
    script = (
        "import sys\n"
        "for name in ('quack', 'cutlass', 'nvMatmulHeuristics', 'tvm_ffi'): sys.modules[name] = None\n"
        "import torch\n"
        "print(torch.compile(lambda x: x.relu() @ x)(torch.eye(4)).sum().item())\n"
    )
    assert python(script)[0] == "4.0"


def test_without_a_library_of_ours_stock_compiles_and_it_is_named_once():
    script = (
        "import sys; sys.modules['msgspec'] = None\n"
        "import torch\n"
        "options = {'nvgemm_epilogue_fusion': True, 'max_autotune_gemm': True}\n"
        "print(torch.compile(lambda x: x.relu() @ x, options=options)(torch.eye(4)).sum().item())\n"
        "import torch._inductor.codegen.cuda_combined_scheduling\n"
    )
    out, err = python(script)
    assert out == "4.0" and err.count("pip install msgspec") == 1 and "Traceback" not in err


def test_a_library_of_ours_that_is_broken_does_not_break_a_compile(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise ImportError('not for this machine')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch\n"
        "options = {'nvgemm_epilogue_fusion': True, 'max_autotune_gemm': True, 'fx_graph_cache': False}\n"
        "for f in (lambda x: x.relu() @ x, lambda x: x.tanh() @ x):\n"
        "    print(torch.compile(f, options=options)(torch.eye(4)).sum().item() > 3)\n"
    )
    out, err = python(script)
    assert out == "True\nTrue" and err.count("epilogue fusion is off") == 1 and "not for this machine" in err


def test_a_missing_library_makes_another_cache_key(monkeypatch):
    from nvgemm_fusion.scheduler_hooks import settings

    complete = settings.version()
    monkeypatch.setattr(settings, "missing_libraries", lambda: ("networkx",))
    assert settings.version() != complete


def test_with_the_flag_off_nothing_is_imported_but_the_flag():
    script = (
        "import sys, torch\n"
        "torch.compile(lambda x: x.relu() @ x, options={'max_autotune_gemm': True})(torch.eye(4))\n"
        "from torch._inductor.codegen.common import device_codegens\n"
        "from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling\n"
        "print(type(device_codegens['cuda'].scheduling(None)) is CUDACombinedScheduling)\n"
        "print(*(name for name in sys.modules if name.startswith('nvgemm_fusion.')))\n"
    )
    out, _ = python(script)
    is_stock, modules = out.splitlines()
    flag = {"autoload", "install", "settings", "torch_versions"}
    ours = {"scheduler_hooks", "lowering", "lowering.packages", *(f"scheduler_hooks.{name}" for name in flag)}
    assert is_stock == "True" and set(modules.split()) == {f"nvgemm_fusion.{name}" for name in ours}


def test_an_unknown_torch_is_left_alone_and_told_once():
    script = (
        "import torch; torch.__version__ = '2.99.0'\n"
        "import torch._inductor.config as config, torch._inductor.select_algorithm\n"
        "print(hasattr(config, 'nvgemm_epilogue_fusion'))"
    )
    out, err = python(script)
    assert out == "False" and err.count("epilogue fusion stays off: torch 2.99.0") == 1


@pytest.mark.parametrize("module", ["choices", "codegen", "measurement", "fusion_pass"])
def test_any_module_of_ours_may_be_what_imports_inductor(module):
    script = (
        f"import torch, nvgemm_fusion.scheduler_hooks.{module}\n"
        "from nvgemm_fusion.scheduler_hooks.install import extension_points\n"
        "print(all(extension_points().values()))"
    )
    assert python(script) == ("True", "")


def test_uninstall_and_install():
    script = (
        "import torch._inductor.config as config, torch._inductor.select_algorithm as selection, sys\n"
        "import torch._inductor.codegen.cuda_combined_scheduling\n"
        "from torch._inductor.codegen.common import device_codegens\n"
        "from nvgemm_fusion.scheduler_hooks.install import install, uninstall\n"
        "def state():\n"
        "    return (hasattr(config, 'nvgemm_epilogue_fusion'), 'cuda' in device_codegens,\n"
        "            len(selection.get_algorithm_selector_cache().preprocessing_fns), len(sys.meta_path))\n"
        "states = [state()]\n"
        "for change in (uninstall, uninstall, install, install):\n"
        "    change(); states.append(state())\n"
        "print(*states, sep='\\n')"
    )
    before, once, twice, again, last = python(script)[0].splitlines()
    assert before == again == last and once == twice != before
    assert once.startswith("(False, ")


@pytest.mark.parametrize("value", ["halide", "pallas"])
def test_other_backends_for_cuda_stay_what_they_are(value):
    import torch._inductor.config as config
    from nvgemm_fusion.scheduler_hooks.codegen import FusionScheduling
    from nvgemm_fusion.scheduler_hooks.install import _scheduling

    with config.patch(cuda_backend=value):
        assert not isinstance(_scheduling(None), FusionScheduling)


def test_inductor_for_the_cpu_is_untouched():
    x = torch.randn(16, 16)
    torch.testing.assert_close(
        torch.compile(lambda x: F.relu(x @ x), options={"nvgemm_epilogue_fusion": True})(x), F.relu(x @ x)
    )


@pytest.mark.parametrize("missing", ["", "flag", "context", "target", "package"])
def test_the_compilers_are_imported_beside_inductor(monkeypatch, inductor_config, missing):
    from nvgemm_fusion.fusion.reasons import Reason, Refusal
    from nvgemm_fusion.lowering import compiler, targets
    from nvgemm_fusion.scheduler_hooks import install

    expected = []
    target = Refusal(Reason.TARGET) if missing == "target" else targets.TARGETS["H200"]
    kernels = types.SimpleNamespace(expect=lambda: expected.append("kernels"))
    monkeypatch.setattr(compiler, "shared_compiler", lambda workers: kernels)
    monkeypatch.setattr(targets, "current_target", lambda: target)
    monkeypatch.setattr(install, "missing_packages", lambda: ["quack-kernels"] * (missing == "package"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: missing != "context")
    with inductor_config.patch(nvgemm_epilogue_fusion=missing != "flag"):
        install._expect_kernels()
    assert expected == ([] if missing else ["kernels"])


@pytest.mark.parametrize("set_where", ["environment", "program"])
def test_they_are_imported_as_soon_as_the_flag_is_known(set_where):
    script = (
        "import sys, torch\n"
        "from nvgemm_fusion.scheduler_hooks import install\n"
        "def expect_kernels():\n"
        "    from torch._inductor import config\n"
        "    print(config.nvgemm_epilogue_fusion, 'torch._inductor.select_algorithm' in sys.modules)\n"
        "install._expect_kernels = expect_kernels\n"
        "import torch._inductor.config as config\n"
        "config.nvgemm_epilogue_fusion = True\n"
        "import torch._inductor.select_algorithm\n"
    )
    environment = {"TORCHINDUCTOR_NVGEMM_EPILOGUE_FUSION": "1"} if set_where == "environment" else {}
    first, second, *_ = python(script, **environment)[0].splitlines()
    assert (first, second) == (f"{bool(environment)} False", "True True")
