"""End to end: the decoder of Llama 3.1 8B with the flag off and on, in one CUDA graph each.

    python -m nvgemm_fusion.bench.e2e [OUTPUT] [--layers N]     (default: bench/results/h200-e2e.json, 32 layers)

The model is built by `transformers` from a configuration, with random weights. Decoding is one token for each sequence
of a batch over CONTEXT cached ones, prefill is one sequence of 2048 tokens. A decoder layer is compiled once and called
for all layers; what is timed is a replay of the whole stack, the two in turn. All GPUs of the machine are used.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..fusion import log
from ..lowering.packages import versions
from ..scheduler_hooks.stopwatch import Stopwatch
from .gpus import over_gpus
from .numerics import error
from .rows import write_rows
from .side_by_side import FRESH, STOCK, compiled

RESULTS = Path(__file__).parent / "results" / "h200-e2e.json"
CASES = (("prefill", 1, 2048), ("decode", 64, 1), ("decode", 16, 1), ("decode", 1, 1))
"""(what, sequences, tokens of each)."""
CONTEXT = 512
ROUNDS, BUDGET_MS = 60, 20_000
LARGEST_ERROR = 1.1
"""Of the flag on, as a multiple of the flag off, after all layers and against float64."""


class LayerCache:
    """The keys and values of one layer, with room for the token in hand, in the form that `transformers` calls."""

    def __init__(self, sequences: int, heads: int, size: int) -> None:
        self.keys, self.values = (
            torch.randn(sequences, heads, CONTEXT + 1, size, device="cuda").bfloat16() for _ in range(2)
        )
        self.position = torch.tensor([CONTEXT], device="cuda")

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the token and returns all of them: (sequences, heads, tokens, size) each."""
        self.keys.index_copy_(2, self.position, keys)
        self.values.index_copy_(2, self.position, values)
        return self.keys, self.values


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the result. Exits with 1 when a result is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args(arguments)
    todo = [(*case, options.layers) for case in CASES]
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "model": "Llama 3.1 8B", "context": CONTEXT}
    rows: list[dict[str, Any]] = []
    for row in track(over_gpus(measure, todo), "models", len(todo), disable=not sys.stderr.isatty()):
        rows.append(row)
        rows.sort(key=lambda row: (row["what"], row["sequences"]))
        write_rows(options.output, about, "rows", rows)
        print(
            f"{row['what']} {row['sequences']} x {row['tokens']}: off {row['us_off']:.0f}, on {row['us_on']:.0f} us,"
            f" {row['speedup']:.4f}; error ratio {row['error_ratio']:.2f}; {'; '.join(row['choices'])}",
            flush=True,
        )
    sys.exit(1 if any(row["error_ratio"] > LARGEST_ERROR for row in rows) else 0)


def measure(case: tuple[str, int, int, int]) -> dict[str, Any]:
    """The record of one case."""
    what, sequences, tokens, count = case
    torch.manual_seed(0)
    layers, rotary, shape = decoder(count)
    x = torch.randn(sequences, tokens, shape.hidden_size, device="cuda").bfloat16()
    start = CONTEXT if what == "decode" else 0
    positions = torch.arange(start, start + tokens, device="cuda").unsqueeze(0)
    cos, sin = (table.bfloat16() for table in rotary(x, positions))
    size = shape.hidden_size // shape.num_attention_heads
    caches = [LayerCache(sequences, shape.num_key_value_heads, size) if start else None for _ in layers]

    name = "cache" if "cache" in inspect.signature(type(layers[0]).forward).parameters else "past_key_values"

    def layer_forward(layer: torch.nn.Module, x: torch.Tensor, cos: Any, sin: Any, cache: Any) -> torch.Tensor:
        return layer(x, position_embeddings=(cos, sin), **{name: cache})

    first = (layers[0], x, cos, sin, caches[0])
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/log.jsonl"
        off = compiled(layer_forward, first, STOCK)
        on = compiled(layer_forward, first, {**FRESH, "nvgemm_fusion_log": path})
        choices = [_chosen(record) for record in log.read(path)]

    def stack(forward: Callable) -> torch.Tensor:
        y = x
        for layer, cache in zip(layers, caches):
            y = forward(layer, y, cos, sin, cache)
        return y

    with torch.no_grad():
        timings = Stopwatch(ROUNDS, BUDGET_MS).time([lambda: stack(off), lambda: stack(on)])
        results, exact = [stack(forward) for forward in (off, on)], x.double()
        for layer, cache in zip(layers, caches):  # each is wide by itself: all of them would take 56 GB
            wide = copy.deepcopy(layer).double()
            exact = layer_forward(wide, exact, cos.double(), sin.double(), _widened(cache))
    errors = [error([result], [exact]) for result in results]
    return {
        "what": what,
        "sequences": sequences,
        "tokens": tokens,
        "layers": count,
        "us_off": round(timings[0].us, 1),
        "us_on": round(timings[1].us, 1),
        "spread_off": round(timings[0].spread, 1),
        "spread_on": round(timings[1].spread, 1),
        "speedup": round(timings[0].us / timings[1].us, 4),
        "error": [round(of, 6) for of in errors],
        "error_ratio": round(errors[1] / errors[0], 4),
        "choices": choices,
    }


def decoder(count: int) -> tuple[list[torch.nn.Module], torch.nn.Module, Any]:
    """`count` decoder layers of Llama 3.1 8B on the GPU in bfloat16, its rotary embedding, and its configuration."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    shape = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=count,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        # All layers go by the number 0: it is compiled in, and one compiled layer is to serve them all.
        layers = [LlamaDecoderLayer(shape, layer_idx=0).bfloat16().eval() for _ in range(count)]
        return layers, LlamaRotaryEmbedding(shape), shape


def _chosen(record: dict[str, Any]) -> str:
    if record["chosen"] is None:
        return f"{record['gemm']}: stock"
    choice = record["alternatives"][record["chosen"]]
    stock = min((a["us"] for a in record["alternatives"] if a["us"] and a["backend"] != "NVGEMM"), default=0.0)
    m, n, k = (record["problem"][size] for size in "mnk")
    name = f"{choice['backend']} {choice['candidate']}" + " fused" * record["fused"]
    return f"{m}x{n}x{k}: {name}, {choice['us']:.1f} us, the best of torch's {stock:.1f}"


def _widened(cache: LayerCache | None) -> LayerCache | None:
    if cache is not None:
        cache.keys, cache.values = cache.keys.double(), cache.values.double()
    return cache


if __name__ == "__main__":
    main()
