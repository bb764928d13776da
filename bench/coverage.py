"""Coverage: how many GEMMs of real architectures can be fused, by us and by stock Inductor, and why not the others.

    python -m nvgemm_fusion.bench.coverage [OUTPUT]     (default: bench/results/coverage.json)

Each architecture of `architectures` is compiled on the virtual H200, for inference and for a training step, twice:
stock with Triton templates, which fuses wherever it legally can; and ours, which fuses by force wherever that is legal.
It counts what can be fused; whether fusing pays is another question, which needs a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.progress import track
from rich.table import Table

from ..fusion import log
from ..fusion.reasons import Reason
from ..lowering.packages import versions
from ..scheduler_hooks.stock_fusions import STOCK, template_count
from ..scheduler_hooks.virtual_script import virtual_gpu
from .architectures import ARCHITECTURES, Architecture
from .terminal import console

TARGET = "H200"
MODES = ("inference", "training")
OURS = {
    "nvgemm_epilogue_fusion": True,
    "nvgemm_fusion_force": True,
    "nvgemm_fusion_cache": False,
    "nvgemm_fusion_candidates": 1,
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
}
NO_POINTWISE_READER = {Reason.NO_READER.value, Reason.NOT_POINTWISE.value}
DEFAULT_OUTPUT = Path(__file__).parent / "results" / "coverage.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table and writes the rows."""
    arguments = sys.argv[1:] if arguments is None else arguments
    output = Path(arguments[0]) if arguments else DEFAULT_OUTPUT
    todo = [(architecture, mode) for architecture in ARCHITECTURES for mode in MODES]
    terminal = console()
    rows = [row_of(*pair) for pair in track(todo, "compiling", console=terminal, transient=True)]
    terminal.print(table_of(rows))
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {"target": f"virtual {TARGET}", "versions": versions(), "rows": rows}
    output.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def row_of(architecture: Architecture, mode: str) -> dict[str, Any]:
    """One row: what can be fused in one architecture, for inference or for a training step."""
    with template_count() as stock:
        _compile(architecture, mode, STOCK)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        _compile(architecture, mode, {**OURS, "nvgemm_fusion_log": str(path)})
        records = list(log.read(path))
    reasons = Counter(reason for record in records for reason in {r["reason"] for r in record["refusals"]})
    return {
        "model": architecture.name,
        "mode": mode,
        "gemms": len(records),
        "with_pointwise_reader": sum(map(_has_pointwise_reader, records)),
        "fused_stock": stock.fused,
        "fused": sum(_is_fused(record) for record in records),
        "reasons": dict(reasons.most_common()),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for a terminal, and their sums."""
    figures = ("gemms", "with_pointwise_reader", "fused_stock", "fused")
    table = Table(title=f"GEMMs whose pointwise readers can be fused (virtual {TARGET})")
    for heading in ("model", "", "GEMMs", "with a pointwise reader", "fused by stock", "fused by us", "why not"):
        table.add_column(heading, justify="right" if heading.startswith(("GEMMs", "with", "fused")) else "left")
    for row in rows:
        why = ", ".join(f"{reason} {count}" for reason, count in row["reasons"].items())
        table.add_row(row["model"], row["mode"], *(str(row[figure]) for figure in figures), why)
    table.add_section()
    table.add_row("all", "", *(str(sum(row[figure] for row in rows)) for figure in figures), "")
    return table


def _compile(architecture: Architecture, mode: str, settings: dict[str, Any]) -> None:
    """Compiles one architecture on the virtual device: a forward pass, or also a backward one."""
    torch.manual_seed(0)
    with virtual_gpu(TARGET, settings), torch.device("cuda"):
        model, arguments = architecture.build()
        model = model.to(torch.bfloat16).train(mode == "training")
        arguments = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in arguments.items()
        }
        with torch.set_grad_enabled(mode == "training"):
            result = torch.compile(model, dynamic=False)(**arguments)[0]
            if mode == "training":
                result.float().square().mean().backward()


def _is_fused(record: dict[str, Any]) -> bool:
    """Whether a kernel of ours computes a node (and not a Triton template, which takes part in the contest, too)."""
    return record["fused"] and bool(record["alternatives"][record["chosen"]]["fused"])


def _has_pointwise_reader(record: dict[str, Any]) -> bool:
    """Whether something pointwise reads the product, be it in the largest region or refused. Of a GEMM that got no
    candidates, nobody looked."""
    refused = {refusal["reason"] for refusal in record["refusals"]} - NO_POINTWISE_READER
    return record["problem"] is not None and (len(record["nodes"]) > 1 or bool(refused))


if __name__ == "__main__":
    main()
