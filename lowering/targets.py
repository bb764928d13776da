"""Targets: the GPUs that kernels are compiled for, with the figures that ranking and modelling need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..fusion.reasons import Reason, Refusal


@dataclass(frozen=True)
class Target:
    """One GPU model.

    arch: the compiler's name of the architecture; heuristics_name: the member of nvMatmulHeuristics'
    `NvMatmulHeuristicsNvidiaGpu`. dense_tflops: bfloat16 matrix rate, and copy_tb_s: copy bandwidth counting bytes
    read and written, both as measured on random data where the project has such a GPU, else from the datasheet.
    """

    name: str
    capability: tuple[int, int]
    arch: str
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int
    heuristics_name: str
    dense_tflops: float
    copy_tb_s: float

    def max_active_clusters(self, cluster_size: int) -> int:
        """How many clusters of `cluster_size` blocks can be resident, one block a multiprocessor. An upper bound:
        a GPU whose processing clusters are uneven holds fewer. On a real GPU the driver is asked instead."""
        return self.multiprocessors // cluster_size


TARGETS = {
    target.name: target
    for target in (
        Target("H100", (9, 0), "sm_90a", 132, 80 << 30, 50 << 20, 232448, "H100_SXM", 800.0, 3.0),
        Target("H200", (9, 0), "sm_90a", 132, 141 << 30, 60 << 20, 232448, "H200_SXM", 790.0, 4.3),
    )
}


def current_target() -> Target | Refusal:
    """The target of the current CUDA device, matched by name and then by compute capability."""
    capability = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    same = [target for target in TARGETS.values() if target.capability == capability]
    if not same:
        return Refusal(Reason.TARGET, f"{name}, compute capability {capability[0]}.{capability[1]}")
    return next((target for target in same if target.name in name), same[0])
