"""Kernels as shared libraries: linked without a GPU, and loaded without their compiler."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason
from nvgemm_fusion.lowering.compiler import KernelCompiler
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.library import link, load
from nvgemm_fusion.lowering.providers import OPERATORS, QUACK
from nvgemm_fusion.lowering.store import KernelStore


@pytest.fixture(scope="module")
def libraries():
    """A kernel of each provider."""
    program, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
    compiler = KernelCompiler(KernelStore(), workers=2)
    specs = [
        KernelSpec(Candidate(provider, 64, 128), torch.bfloat16, Major.ROW, Major.COLUMN, program, "sm_90a", 132)
        for provider in (QUACK, OPERATORS)
    ]
    yield [compiled.path for compiled in compiler.compile(specs)]
    compiler.close()


def test_kernels_are_loaded_without_their_compiler(libraries):
    """And each has a function of its own, though all have the same name."""
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from nvgemm_fusion.lowering import launcher\n"
        "functions = [launcher.load(Path(path)) for path in sys.argv[1:]]\n"
        "said = []\n"
        "for function in functions:\n"
        "    try:\n"
        "        function(None, None, None)\n"
        "    except Exception as error:\n"
        "        said.append(str(error))\n"
        "print(json.dumps([said, [name for name in ('cutlass', 'quack') if name in sys.modules]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, libraries)], stdout=subprocess.PIPE, text=True, check=True
    )
    said, imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == [] and len(said) == 2 and said[0] != said[1]


def test_what_is_no_library_says_so(tmp_path):
    path = tmp_path / "kernel.so"
    path.write_bytes(b"\x7fELF and nothing else")
    with pytest.raises(RuntimeError, match="kernel.so"):
        load(path)


def test_without_a_compiler_the_reason_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    program, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
    spec = KernelSpec(Candidate(QUACK, 64, 64), torch.bfloat16, Major.ROW, Major.COLUMN, program, "sm_90a", 132)
    compiler = KernelCompiler(KernelStore(tmp_path), workers=1)
    refusal = compiler.compile([spec])[0]
    compiler.close()
    assert refusal.reason is Reason.COMPILE_ERROR and "install gcc or clang, or set CC" in refusal.detail


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", "cc -no-such-option"])
def test_a_compiler_that_fails_is_an_error(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises((RuntimeError, OSError), match="cannot link|no-such"):
        link(str(tmp_path / "kernel.o"), str(tmp_path / "kernel.so"), [])
