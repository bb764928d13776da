"""What stock Inductor fuses: a count of the Triton templates that it generates with an epilogue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

STOCK = {
    "nvgemm_epilogue_fusion": False,
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
    # A template is then fused wherever that is legal, and not where it was timed to pay.
    "benchmark_epilogue_fusion": False,
}
"""Entries of Inductor's configuration with which it fuses all that it can."""


@dataclass
class TemplateCount:
    """Triton templates generated, and those of them with an epilogue."""

    templates: int = 0
    fused: int = 0


@contextlib.contextmanager
def template_count() -> Iterator[TemplateCount]:
    """Counts what is generated inside the block."""
    from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling

    count, generate = TemplateCount(), CUDACombinedScheduling.codegen_template

    def generate_and_count(scheduling: Any, template: Any, epilogue: Sequence[Any], *rest: Any, **options: Any) -> Any:
        count.templates += 1
        count.fused += bool(epilogue)
        return generate(scheduling, template, epilogue, *rest, **options)

    with mock.patch.object(CUDACombinedScheduling, "codegen_template", generate_and_count):
        yield count
