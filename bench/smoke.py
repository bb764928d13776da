"""Four graphs at three sizes on a real GPU, side by side with stock, checked against float64.

    python -m nvgemm_fusion.bench.smoke [OUTPUT]        (default: bench/results/h200-smoke.json)

All times of a record are taken side by side in one process: those of the graph compiled with the flag on (what was
chosen), with everything fused by force, unfused (ATen's GEMM and Inductor's pointwise kernel), as stock
`ATEN,TRITON` compiles it, and eager. An error ratio is the error against float64 over that of the unfused form.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..fusion import log
from ..lowering.packages import installed_versions
from .graphs import GRAPHS, Graph
from .numerics import error
from .side_by_side import ATEN, FORCED, FRESH, STOCK, compiled, timed

SIZES = ((16, 14336, 4096), (256, 14336, 4096), (4096, 14336, 4096))
DEFAULT_OUTPUT = Path(__file__).parent / "results" / "h200-smoke.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the records. Exits with 1 when a result is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    output = Path(arguments[0]) if arguments else DEFAULT_OUTPUT
    records = []
    print("graph          M   chosen   forced  unfused    stock    eager  err  forced  choice")
    for size in SIZES:
        for graph in GRAPHS:
            record = measure(graph, *size)
            records.append(record)
            print(
                f"{graph.name:10} {size[0]:5} {record['us_chosen']:8.1f} {record['us_forced']:8.1f}"
                f" {record['us_best_unfused']:8.1f} {record['us_stock']:8.1f} {record['us_eager']:8.1f}"
                f"  {record['error_ratio']:.2f} {record['error_ratio_forced']:.2f}"
                f"  {record['chosen_backend']} {record['chosen_candidate']} fused={record['fused']}",
                flush=True,
            )
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if any(max(record["error_ratio"], record["error_ratio_forced"]) > 1.1 for record in records):
        sys.exit(1)


def measure(graph: Graph, m: int, n: int, k: int) -> dict[str, Any]:
    """One record: `graph` at (M, N, K) in bfloat16."""
    torch.manual_seed(0)
    inputs = graph.inputs(m, n, k)
    exact = graph.function(*(tensor.double() for tensor in inputs))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "log.jsonl")
        chosen = compiled(graph.function, inputs, {**FRESH, "nvgemm_fusion_log": path})
        (decision,) = log.read(path)
    forms = {
        "chosen": chosen,
        "forced": compiled(graph.function, inputs, FORCED),
        "best_unfused": compiled(graph.function, inputs, ATEN),
        "stock": compiled(graph.function, inputs, STOCK),
        "eager": graph.function,
    }
    with torch.no_grad():
        errors = {name: error([form(*inputs)], [exact]) for name, form in forms.items()}
        times = timed(forms, inputs)
    choice = decision["alternatives"][decision["chosen"]]
    return {
        "graph": graph.name,
        "m": m,
        "n": n,
        "k": k,
        "dtype": "bfloat16",
        "chosen_backend": choice["backend"],
        "chosen_candidate": choice["candidate"],
        "fused": decision["fused"],
        **{f"us_{name}": round(timing.us, 2) for name, timing in times.items()},
        **{f"spread_{name}": round(timing.spread, 2) for name, timing in times.items()},
        "error_ratio": round(errors["chosen"] / errors["best_unfused"], 4),
        "error_ratio_forced": round(errors["forced"] / errors["best_unfused"], 4),
        "decision": decision,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "versions": installed_versions(),
    }


if __name__ == "__main__":
    main()
