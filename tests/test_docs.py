"""The README and the pages under docs/: every command they show runs, every file they name is there.

A block of Python whose first line is a comment with a file's name is that file, for the commands of its page.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.bench.command import app
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\s*- run: |\s*run: )?((?:nvgemm-fusion|pytest) .*)$", re.MULTILINE)
WITHOUT_A_GPU = {"nvgemm-fusion doctor": 1}
"""The exit codes of commands that find something missing here."""


def blocks(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(page):
    """The commands of a page in order, without the comments behind them."""
    for language, text in blocks(page):
        if language in ("", "sh", "yaml"):
            yield from (line.partition(" #")[0].strip() for line in COMMAND.findall(text))


@pytest.fixture
def workspace(tmp_path, monkeypatch, inductor_config, instant_kernels):
    """A folder with what the pages take for granted: logs and a tuning file. Kernels compile at once, and of our suite
    there are two graphs."""
    from nvgemm_fusion.bench import regression_graphs
    from nvgemm_fusion.lowering.tuning import TuningStore, write_file
    from nvgemm_fusion.scheduler_hooks.recording import recording
    from test_tuning import entry_of

    graphs = regression_graphs.graphs
    monkeypatch.setattr(regression_graphs, "graphs", lambda: itertools.islice(graphs(), 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16()
    with recording(tmp_path / "decisions.jsonl"), torch.no_grad():
        for function in (F.relu, torch.tanh, lambda product: F.softmax(product, -1)):
            torch.compile(lambda x, w, function=function: function(F.linear(x, w)))(x, w)
    for name in ("main.jsonl", "branch.jsonl", "baseline.check.jsonl"):
        shutil.copy("decisions.jsonl", name)
    write_file(tmp_path / "h200.json", [entry_of()])
    TuningStore().merge([entry_of()])
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=lambda page: page.name)
def test_every_command_runs(page, workspace):
    for language, text in blocks(page):
        name = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and name:
            (workspace / name[1]).write_text(text, encoding="utf-8")
    if page.name == "github-actions.md":
        CliRunner().invoke(app, ["regress", "record", "-o", "baseline.json"])
    for command in commands(page):
        program, *arguments = shlex.split(os.path.expandvars(command))
        if program == "pytest":
            result = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], capture_output=True, text=True)
            assert result.returncode == 0, f"{command}\n{result.stdout}"
        else:
            result = CliRunner().invoke(app, arguments)
            expected = 0 if torch.cuda.is_available() else WITHOUT_A_GPU.get(command, 0)
            assert result.exit_code == expected, f"{command}\n{result.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python(page):
    for language, text in blocks(page):
        if language == "python":
            compile(text, page.name, "exec")


def test_every_command_has_a_page():
    from typer.main import get_command

    for name in get_command(app).commands:
        assert (ROOT / "docs" / f"{name}.md").exists() and f"docs/{name}.md" in PAGES[0].read_text(encoding="utf-8")
