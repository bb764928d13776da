"""The occupancy model: how long a kernel configuration takes on one GPU, from how it fills the machine.

A GEMM's tiles are computed in waves, one tile a multiprocessor at a time. A wave lasts about as long as the slowest
of three streams: the tensor cores' arithmetic, the tiles of A and B out of the L2 cache (blocks of a cluster share
theirs), and the reads of shared memory by the warp groups. Each tile then pays for its epilogue, part of which a
pingpong kernel hides behind the next tile. In all it takes no less than the memory traffic. Part of that is what is
read again: the larger of A and B does not stay in the cache, so it matters whether those blocks that read the same tile
of it are one cluster. Where streams compete, they are combined by a p-norm, which lies a little above the largest.

The formula is an occupancy argument of the usual kind (tiles, waves, and the roofline of Williams et al., 2009). The
constants are fitted (`bench.fit`) to the times of every configuration on 96 problems on an H200 (`bench.candidates`).
The model ranks candidates; it does not predict a time. Another architecture gets the same constants, with the rates of
its datasheet in place of Hopper's (`model_of`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram, OperandKind
from .kernel import Candidate
from .spaces import SPACES
from .targets import Target


@dataclass(frozen=True)
class OccupancyModel:
    """The constants of one GPU. Rates are per multiprocessor and microsecond, times in microseconds.

    flops: multiplications and additions of 16-bit numbers (of TF32, with twice the bits, half as many). l2_bytes and
    shared_bytes: bytes out of the L2 cache and out of shared memory. epilogue_us and tile_operand_us: per element of
    the product, and more for each tile operand. hidden: the part of the epilogue that pingpong hides. tile_us: per
    wave. launch_us: once. memory_bytes: bytes a microsecond that the whole GPU moves, and saturation: how many times
    over the multiprocessors could saturate that. reread: the part of the larger operand that comes from memory again
    for each further cluster that reads it.
    stream_norm and memory_norm: the p of the norms that combine the streams, and computing with memory.
    tensor_memory: accumulators lie in a memory of their own, so one instruction takes 128 rows of a tile instead of 64,
    and the epilogue of a tile runs beside the arithmetic of the next, as with pingpong.
    """

    multiprocessors: int
    flops: float
    l2_bytes: float
    shared_bytes: float
    epilogue_us: float
    tile_operand_us: float
    hidden: float
    tile_us: float
    launch_us: float
    memory_bytes: float
    saturation: float
    reread: float
    stream_norm: float
    memory_norm: float
    tensor_memory: bool = False

    def us(self, problem: Problem, candidate: Candidate, program: EpilogueProgram) -> float:
        """The modelled time of `candidate` with `program` as its epilogue.

        One that splits K is a skinny kernel: it keeps every multiprocessor reading, and computes beside that.
        """
        m, n = (problem.n, problem.m) if candidate.swap_ab else (problem.m, problem.n)
        itemsize = problem.dtype.itemsize
        tile_m, tile_n = candidate.tile_m, candidate.tile_n
        cluster = candidate.cluster_m * candidate.cluster_n
        clusters_m = math.ceil(math.ceil(m / tile_m) / candidate.cluster_m)
        clusters_n = math.ceil(math.ceil(n / tile_n) / candidate.cluster_n)
        clusters = clusters_m * clusters_n
        waves = math.ceil(clusters / (self.multiprocessors // cluster))

        arithmetic = 2 * tile_m * tile_n * problem.k / (self.flops * torch.bfloat16.itemsize / itemsize)
        loaded = (tile_m / candidate.cluster_n + tile_n / candidate.cluster_m) * problem.k * itemsize / self.l2_bytes
        # Each group of rows reads all of the tile of B; where two warp groups share the columns, both read all of A.
        groups = math.ceil(tile_m / (128 if self.tensor_memory else 64))
        by_columns = not candidate.pingpong and (tile_m == 320 or (tile_m == 192 and tile_n > 128))
        shared = ((1 + by_columns) * tile_m + groups * tile_n) * problem.k * itemsize / self.shared_bytes
        tiles = sum(operand.kind is OperandKind.TILE for operand in program.operands)
        # A further store is taken to cost what reading a tile does: nothing was fitted to one.
        passes = tiles + len(program.stores) - 1
        epilogue = tile_m * tile_n * (self.epilogue_us + passes * self.tile_operand_us)
        hidden = self.hidden * epilogue if candidate.pingpong or self.tensor_memory else 0.0
        streams = _norm(self.stream_norm, arithmetic, loaded, shared)
        computing = waves * (streams + epilogue - hidden + self.tile_us) + hidden

        stored = sum(store.dtype.itemsize for store in program.stores) + tiles * itemsize
        if candidate.split_k > 1:
            return self.launch_us + (problem.input_bytes + problem.m * problem.n * stored) / self.memory_bytes
        larger, readers = (m, clusters_n) if m > n else (n, clusters_m)
        again = self.reread * larger * problem.k * itemsize * (readers - 1)
        traffic = problem.input_bytes + again + problem.m * problem.n * stored
        busy = min(1.0, self.saturation * min(clusters * cluster, self.multiprocessors) / self.multiprocessors)
        return self.launch_us + _norm(self.memory_norm, computing, traffic / (self.memory_bytes * busy))


def _norm(p: float, *values: float) -> float:
    return sum(value**p for value in values) ** (1 / p)


HOPPER = OccupancyModel(
    multiprocessors=132,
    flops=6.45e6,
    l2_bytes=131e3,
    shared_bytes=329e3,
    epilogue_us=5.03e-5,
    tile_operand_us=10.6e-5,
    hidden=0.718,
    tile_us=1.29,
    launch_us=9.22,
    memory_bytes=3.61e6,
    saturation=8.31,
    reread=0.391,
    stream_norm=4.34,
    memory_norm=4.45,
)
"""Fitted on an H200 (132 multiprocessors, bfloat16). An H100 differs in memory alone. Most of launch_us is what was
written back of the cache in those measurements, which makes no difference to a ranking."""

_REACHED = 0.75
"""The part of the datasheet's memory bandwidth that `HOPPER.memory_bytes` is on an H200."""


@functools.lru_cache(maxsize=None)
def model_of(target: Target) -> OccupancyModel:
    """The model of `target`: the fitted one where a GPU was there to fit it to, else one made of the datasheet."""
    if target.measured:
        return HOPPER
    return replace(
        HOPPER,
        multiprocessors=target.multiprocessors,
        flops=target.dense_tflops * 1e6 / target.multiprocessors,
        memory_bytes=_REACHED * target.copy_tb_s * 1e6,
        tensor_memory=SPACES[target.arch].tensor_memory,
    )
