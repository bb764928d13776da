"""Plots of the suite: how much faster than the best peer, and how far from the roofline.

    python -m nvgemm_fusion.bench.plots [SUITE.json]        writes SUITE-speedup.png and SUITE-roofline.png beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 (the backend has to be chosen first)

from .suite import OURS, RESULTS, is_fused  # noqa: E402

FUSED, UNFUSED = "tab:green", "tab:gray"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws both plots of a suite's results."""
    arguments = sys.argv[1:] if arguments is None else arguments
    path = Path(arguments[0]) if arguments else RESULTS
    results = json.loads(path.read_text(encoding="utf-8"))
    for name, draw in (("speedup", speedup), ("roofline", roofline)):
        figure = draw(results["rows"], results["about"])
        figure.savefig(path.with_name(f"{path.stem}-{name}.png"), dpi=120)
        pyplot.close(figure)


def speedup(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> Any:
    """A bar for each row: the time of the best peer over ours."""
    figure, axes = pyplot.subplots(figsize=(8, 0.2 * len(rows) + 1.5), layout="constrained")
    colours = [FUSED if is_fused(row) else UNFUSED for row in rows]
    axes.barh(range(len(rows)), [row["speedup_best_peer"] - 1 for row in rows], left=1, color=colours)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['model']} {row['layer']}, M = {row['m']}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("time of the best peer / ours (green: with a fused kernel)")
    axes.set_title(f"{about['gpu']}, torch {about['versions']['torch']}, bfloat16", fontsize=9)
    return figure


def roofline(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> Any:
    """A point for each row and form: its time against the least that bytes and operations take."""
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    bound = [row["roofline_us"] for row in rows]
    axes.plot([min(bound), max(bound)], [min(bound), max(bound)], color="black", linewidth=0.8, label="roofline")
    axes.scatter(bound, [row["us"]["ATEN,TRITON"] for row in rows], s=18, marker="x", color=UNFUSED, label="stock")
    axes.scatter(bound, [row["us"][OURS] for row in rows], s=18, color=FUSED, label="ours")
    axes.set(xscale="log", yscale="log", xlabel="roofline, us", ylabel="measured, us")
    axes.set_title(f"{about['gpu']}, torch {about['versions']['torch']}, bfloat16", fontsize=9)
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
