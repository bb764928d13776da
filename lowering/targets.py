"""Targets: the GPUs that kernels are compiled for, with the figures that ranking and modelling need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..fusion.reasons import Reason, Refusal


@dataclass(frozen=True)
class Target:
    """One GPU model.

    arch: the compiler's name of the architecture; heuristics_name: the member of nvMatmulHeuristics'
    `NvMatmulHeuristicsNvidiaGpu`. dense_tflops: bfloat16 matrix rate with float32 accumulation, and copy_tb_s: copy
    bandwidth counting bytes read and written. measured: the project has had a GPU of this architecture; both rates
    are then as measured on random data (on an H200), else from the datasheet, and kernels are compiled but never run.
    """

    name: str
    capability: tuple[int, int]
    arch: str
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int
    threads_per_multiprocessor: int
    heuristics_name: str
    dense_tflops: float
    copy_tb_s: float
    measured: bool

    def max_active_clusters(self, cluster_size: int) -> int:
        """How many clusters of `cluster_size` blocks can be resident, one block a multiprocessor. An upper bound:
        a GPU whose processing clusters are uneven holds fewer. On a real GPU the driver is asked instead."""
        return self.multiprocessors // cluster_size


TARGETS = {
    target.name: target
    for target in (
        Target("H100", (9, 0), "sm_90a", 132, 80 << 30, 50 << 20, 232448, 2048, "H100_SXM", 800.0, 3.0, True),
        Target("H200", (9, 0), "sm_90a", 132, 141 << 30, 60 << 20, 232448, 2048, "H200_SXM", 790.0, 4.3, True),
        # HGX B200, half of its rate with sparsity.
        Target("B200", (10, 0), "sm_100a", 148, 180 << 30, 126 << 20, 232448, 2048, "B200", 2250.0, 8.0, False),
        # "NVIDIA RTX Blackwell GPU architecture", appendix A.
        Target("RTX 5090", (12, 0), "sm_120a", 170, 32 << 30, 96 << 20, 101376, 1536, "RTX_5090", 209.5, 1.79, False),
        # The SXM module with 80 GB.
        Target("A100", (8, 0), "sm_80", 108, 80 << 30, 40 << 20, 166912, 2048, "A100_SXM_80GB", 312.0, 2.04, False),
    )
}


def current_target() -> Target | Refusal:
    """The target of the current CUDA device, matched by name and then by compute capability.

    Refused: no GPU, and one of an architecture that no kernel of ours was ever run on.
    """
    if not torch.cuda.is_available():
        return Refusal(Reason.TARGET, "no CUDA GPU")
    capability = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    same = [target for target in TARGETS.values() if target.capability == capability and target.measured]
    if not same:
        return Refusal(Reason.TARGET, f"{name}, compute capability {capability[0]}.{capability[1]}")
    return next((target for target in same if target.name in name), same[0])
