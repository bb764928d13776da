"""The house: who may import whom, how long a file is, and that what is installed is what is here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW = {
    "fusion": set(),
    "lowering": {"fusion"},
    "scheduler_hooks": {"fusion", "lowering"},
    "bench": {"fusion", "lowering", "scheduler_hooks"},
}
MODULES = sorted(path for folder in BELOW for path in (ROOT / folder).glob("**/*.py"))


def imports_of(path):
    """The absolute names of everything that a module imports, wherever in it."""
    package = ["nvgemm_fusion", path.parent.name]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_go_down(path):
    folder = path.parent.name
    for name in imports_of(path):
        if folder != "scheduler_hooks":
            assert not name.startswith("torch._inductor"), f"{folder} imports {name}"
        if name.startswith("nvgemm_fusion."):
            assert name.split(".")[1] in BELOW[folder] | {folder}, f"{folder} imports {name}"
        if folder == "fusion":
            assert not name.startswith(("quack", "cutlass", "triton", "rich")), f"{folder} imports {name}"


def imported_at_once(path):
    """The packages that a module imports when it is imported, the standard library's aside."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        yield from {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_each_library_is_looked_for_before_it_is_imported():
    from nvgemm_fusion.lowering.packages import LIBRARIES

    found = [set(imported_at_once(path)) for path in MODULES if path.parent.name != "bench"]
    compiling = {"cutlass"}  # a module of kernels is imported where these are compiled
    torchs_own = {"torch", "triton", "sympy"}
    assert set.union(*(names for names in found if not names & compiling)) - torchs_own == set(LIBRARIES)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_can_be_read_at_one_sitting(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400 and max(map(len, lines), default=0) <= 120
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "says what it is for"


@pytest.mark.parametrize("folder", BELOW)
def test_the_map_of_a_folder_names_its_modules(folder):
    page = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")), clean=False)
    listed = {line.split()[0] for line in page.splitlines() if line.startswith("    ")}
    assert {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"} == listed


def test_only_the_launcher_is_named_in_generated_code():
    """What a cached module imports has to stay where it is."""
    from nvgemm_fusion.lowering.launcher import load_kernel

    assert load_kernel.__module__ == "nvgemm_fusion.lowering.launcher"
    assert "nvgemm_fusion.lowering.launcher" in (ROOT / "scheduler_hooks" / "kernel_call.py").read_text()
