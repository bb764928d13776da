"""A wheel built from the tree, used without the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # a copy: building leaves things behind
    shutil.copytree(ROOT, tree, ignore=lambda _, names: {n for n in names if n[0] == "." or n.endswith("-info")})
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(tree)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_it_holds_every_module_and_nothing_else(unpacked):
    folders = ("fusion", "lowering", "scheduler_hooks", "bench")
    kinds = (".py", ".jinja", ".css", ".js")
    expected = {p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).glob("*") if p.suffix in kinds}
    inside = unpacked / "nvgemm_fusion"
    assert {path.relative_to(inside) for path in inside.glob("**/*") if path.is_file()} == expected


def test_it_works_without_the_tree(unpacked, tmp_path):
    script = (
        "import torch, torch._inductor.config as config, nvgemm_fusion.fusion.program as program\n"
        "from importlib.metadata import entry_points\n"
        "assert not config.nvgemm_epilogue_fusion\n"
        "modules = [point.module for point in entry_points(group='torch.backends')]\n"
        "assert 'nvgemm_fusion.scheduler_hooks.autoload' in modules\n"
        "print(program.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(unpacked))
