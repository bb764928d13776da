"""A small MLP and a Llama decoder block with the flag on: what is fused, against what, and is it right.

    make demo        (or: python -m nvgemm_fusion.bench.demo)

On a CUDA GPU of compute capability 9.0 everything is real: times are measured and outputs are compared with
float64. Anywhere else the graphs are lowered for a virtual H200: kernels are compiled to machine code for sm_90a,
every emitted epilogue is compared with the float64 reference on the CPU, and times come from a model.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..fusion import log
from ..lowering.compiler import shared_compiler
from ..lowering.targets import current_target
from ..scheduler_hooks.virtual_device import virtual_device
from .numerics import FLOAT64_LIMIT, epilogue_errors, error
from .table import decision_table
from .terminal import console, print_json

HIDDEN, INTERMEDIATE, TOKENS = 4096, 14336, 256
SETTINGS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "nvgemm_epilogue_fusion": True,
    "nvgemm_fusion_cache": False,
}
TOLERANCE = 2e-2
"""Relative error in the Frobenius norm that a bfloat16 block may have against float64."""


class Mlp(torch.nn.Module):
    """Two linear layers with biases and a tanh GELU between them, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, INTERMEDIATE)
        self.down = torch.nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


def llama_block() -> tuple[torch.nn.Module, Callable[[torch.Tensor], tuple[Any, ...]]]:
    """One decoder layer of Llama 3 8B's shape with random weights, and what it is called with for hidden states."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    shape = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    rotary = LlamaRotaryEmbedding(shape)

    def arguments(x: torch.Tensor) -> dict[str, Any]:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return {"position_embeddings": rotary.to(x.device)(x, positions), "position_ids": positions}

    return LlamaDecoderLayer(shape, layer_idx=0), arguments


def main(as_json: bool = False) -> None:
    """Runs both models and prints a table, or JSON. Exits with 1 when a number is wrong."""
    terminal = Console(stderr=True) if as_json else console()
    real = bool(current_target())
    where = torch.cuda.get_device_name() if real else "virtual H200 (no SM90 GPU here: times are modelled)"
    terminal.print(f"torch {torch.__version__} on {where}")
    block, arguments = llama_block()
    models = (("two-layer MLP with bias and GELU", Mlp(), lambda x: {}), ("Llama decoder block", block, arguments))
    results = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for number, (title, model, arguments) in enumerate(models):
            path = str(Path(folder) / f"{number}.jsonl")
            options = {**SETTINGS, "nvgemm_fusion_log": path}
            with _progress(terminal, title):
                checks = (_on_gpu if real else _on_virtual_device)(model, arguments, options)
            records = list(log.read(path))
            checks = checks if real else list(_check_epilogues(records))
            results.append({"model": title, "decisions": records, "checks": checks})
            if as_json:
                continue
            terminal.print(decision_table(enumerate(records, 1), title))
            for sentence, holds in checks:
                terminal.print(f"  {'[green]right[/green]' if holds else '[red]WRONG[/red]'}: {sentence}")
    if as_json:
        print_json({"torch": torch.__version__, "device": where, "models": results})
    sys.exit(0 if all(holds for result in results for _, holds in result["checks"]) else 1)


def _on_gpu(model: torch.nn.Module, arguments: Callable, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Compiles and runs `model` on the GPU, and compares its output with float64 on the same weights."""
    model = model.to("cuda", torch.bfloat16)
    x = torch.randn(1, TOKENS, HIDDEN, device="cuda").to(torch.bfloat16)
    result = _tensor(torch.compile(model, options=options)(x, **arguments(x)))
    exact = _tensor(model.double()(x.double(), **arguments(x.double())))
    found = error([result], [exact])
    return [(f"output against float64: relative error {found:.1e}", found < TOLERANCE)]


def _on_virtual_device(model: torch.nn.Module, arguments: Callable, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Lowers `model` for the virtual H200."""
    model = model.to(torch.bfloat16)
    x = torch.randn(1, TOKENS, HIDDEN).to(torch.bfloat16)
    with virtual_device("H200"):
        torch.compile(model, options=options)(x, **arguments(x))
    return []


def _check_epilogues(records: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Every epilogue that was emitted, run on the CPU and compared with the reference."""
    for record in records:
        for digest, _, found in epilogue_errors(record):
            compiled = [a for a in record["alternatives"] if a["epilogue"] == digest and a["status"] != "failed"]
            sentence = f"{record['gemm']}: epilogue {digest}, compiled for {len(compiled)} configurations"
            yield sentence, found <= FLOAT64_LIMIT


@contextlib.contextmanager
def _progress(terminal: Console, title: str) -> Iterator[None]:
    """A bar that counts kernels while a model compiles."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} kernels"), TimeElapsedColumn()
    compiler, done = shared_compiler(len(os.sched_getaffinity(0))), threading.Event()
    submitted, finished = compiler.submitted, compiler.finished
    with Progress(*columns, console=terminal, transient=True) as progress:
        task = progress.add_task(f"compiling {title}", total=None)

        def follow() -> None:
            while not done.wait(0.2):
                total = (compiler.submitted - submitted) or None
                progress.update(task, total=total, completed=compiler.finished - finished)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()


def _tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


if __name__ == "__main__":
    main()
