"""Where else a decision goes: into torch's structured trace, which `tlparse` shows, and into Dynamo's counters."""

from __future__ import annotations

from torch._dynamo.utils import counters
from torch._logging import trace_structured

from .decision import Decision
from .log import to_line

ARTIFACT = "nvgemm_fusion_decision"
PREFIX = "nvgemm_fusion_"


def publish(decision: Decision) -> None:
    """Adds the decision to the trace (if one is written) and counts it in `counters["inductor"]`:

    nvgemm_fusion_fused, nvgemm_fusion_unfused or nvgemm_fusion_left_alone; nvgemm_fusion_refused_REASON for each
    reason why not more was fused; nvgemm_fusion_from_cache.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"{ARTIFACT}_{decision.gemm}", "encoding": "json"},
        payload_fn=lambda: to_line(decision).decode(),
    )
    outcome = "left_alone" if decision.choice is None else "fused" if decision.fused else "unfused"
    names = [outcome, *(f"refused_{refusal.reason.value.replace(' ', '_')}" for refusal in decision.refusals)]
    for name in [*names, *(["from_cache"] if decision.from_cache else [])]:
        counters["inductor"][PREFIX + name] += 1
