"""The pytest plugin: decisions as something that a test can hold on to.

    from nvgemm_fusion.bench.pytest_plugin import assert_fused, assert_snapshot

    def test_the_mlp_is_fused(fusion_log):
        torch.compile(mlp)(x)                      # on the CPU: without a Hopper GPU, the virtual H200 decides
        assert_fused(fusion_log, ops=["gelu"])
        assert_snapshot(fusion_log, "tests/golden/mlp.txt")

Loaded by pytest in every project of its environment, so nothing heavy is imported before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .selection import Selection

UPDATE_OPTION = "--update-fusion-snapshots"
_updating = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that writes snapshots anew."""
    parser.getgroup("nvgemm-fusion").addoption(
        UPDATE_OPTION, action="store_true", help="write the snapshots of fusion decisions instead of comparing"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Notes whether snapshots are to be written."""
    global _updating
    _updating = config.getoption(UPDATE_OPTION)


class FusionLog(Sequence):
    """The decision records of a test so far, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: Any) -> Any:
        return self._records()[index]

    def __len__(self) -> int:
        return len(self._records())

    def __str__(self) -> str:
        return "\n".join(map(summary, self)) or "no GEMM was compiled"

    def _records(self) -> list[dict[str, Any]]:
        from ..fusion import log

        return list(log.read(self.path)) if self.path.exists() else []


@pytest.fixture
def fusion_log(tmp_path: Path) -> Iterator[FusionLog]:
    """The decisions of what the test compiles. The flag is on and GEMMs are autotuned during the test; on a machine
    without a Hopper GPU they are decided for a virtual H200, on CPU tensors."""
    from ..scheduler_hooks.recording import recording

    path = tmp_path / "fusion_log.jsonl"
    with recording(path):
        yield FusionLog(path)


def assert_fused(log: Iterable[dict[str, Any]], gemm: str | None = None, ops: Iterable[str] = ()) -> None:
    """Fails unless a GEMM was fused with all of `ops` (names of ATen operators, such as "gelu") in its epilogue.

    gemm: which one, as its name in the log ("buf0") or its size with * for any ("256x*x4096"); None: any.
    """
    wanted = set(ops)
    shape = Selection.of(shape=gemm).shape if gemm is not None and "x" in gemm else None
    candidates = [
        record
        for record in log
        if gemm is None or record["gemm"] == gemm or (shape is not None and _has_size(record, shape))
    ]
    if any(record["fused"] and wanted <= _inside(record) for record in candidates):
        return
    which = "a GEMM" if gemm is None else f"GEMM {gemm}"
    what = f" with {', '.join(sorted(wanted))}" if wanted else ""
    pytest.fail(f"{which} was to be fused{what}, and was not. Decided was:\n{log}", pytrace=False)


def assert_snapshot(log: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Compares what was decided with the text file `path`, leaving out what changes from run to run: names, times,
    versions. A missing file fails; `--update-fusion-snapshots` writes it."""
    path, text = Path(path), "\n\n".join(map(snapshot, log)) + "\n"
    if _updating:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        pytest.fail(f"no snapshot {path}: run pytest {UPDATE_OPTION}", pytrace=False)
    assert text == path.read_text(encoding="utf-8"), f"if this is right: pytest {UPDATE_OPTION}"


def snapshot(record: dict[str, Any]) -> str:
    """One decision as it stands in a snapshot."""
    lines = [_size(record)]
    lines += [f"  node: {', '.join(node['operators'])}" for node in record["nodes"]]
    lines += [f"  not fused further: {refusal['reason']}" for refusal in record["refusals"]]
    choice = None if record["chosen"] is None else record["alternatives"][record["chosen"]]
    if choice is not None:
        lines.append(f"  chosen: {choice['backend']}, {len(choice['fused'])} of {len(record['nodes']) - 1} nodes fused")
        program = record["programs"].get(choice["epilogue"], {"readable": ""})
        lines += [f"    {line}" for line in program["readable"].splitlines()]
    return "\n".join(lines)


def summary(record: dict[str, Any]) -> str:
    """One decision in a line."""
    why = "; ".join(f"{refusal['reason']}: {refusal['detail']}" for refusal in record["refusals"])
    what = f"fused with {', '.join(sorted(_inside(record)))}" if record["fused"] else "not fused"
    return f"{record['gemm']} {_size(record)}: {what}" + (f" ({why})" if why else "")


def _inside(record: dict[str, Any]) -> set[str]:
    """The ATen operators that the chosen kernel computes."""
    if record["chosen"] is None:
        return set()
    names = set(record["alternatives"][record["chosen"]]["fused"]) | {record["nodes"][0]["name"]}
    return {operator for node in record["nodes"] if node["name"] in names for operator in node["operators"]}


def _size(record: dict[str, Any]) -> str:
    problem = record["problem"]
    if problem is None:
        return "no candidates"
    return f"{problem['m']}x{problem['n']}x{problem['k']} {problem['dtype']}"


def _has_size(record: dict[str, Any], shape: tuple[int | None, ...]) -> bool:
    problem = record["problem"]
    return problem is not None and all(size in (None, problem[axis]) for size, axis in zip(shape, "mnk"))
