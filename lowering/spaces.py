"""Spaces: which configurations QuACK's GEMM has on each architecture, and what it is told beside them; and our own's.

    sm_90a    WGMMA; pingpong or cooperative, clusters that share loads
    sm_100a   tcgen05: the accumulator lies in tensor memory, two blocks of a cluster compute as a pair
    sm_120a   warp-level MMA; pingpong or cooperative, blocks by themselves, 99 KB of shared memory

The spaces of SM100 and SM120 are those that the library tunes over itself (`quack.gemm_config`), and of SM120 the
narrower tiles too, for decoding. Each was compiled to machine code with an epilogue; none was ever run here.

Split-K, which QuACK has as well, is left out: its parts wait for one another (1, 2 and 3 of them took 43, 48 and 52 us
for 16 x 14336 x 4096 on an H200), and kernels with swapped operands do not have it. Where few rows leave a GPU waiting,
skinny kernels split K within a block, with the same configurations on each architecture. For 16 and 64 rows two more
ways were tried, and are 1.5 and 4 % slower than the best of QuACK's and ATen's (geometric means over 13 GEMMs,
`bench/results/h200-few-rows.json`): a skinny kernel of 16 rows, and a cluster whose blocks share K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..fusion.program import EpilogueProgram
from . import shared_memory
from .kernel import Candidate

SKINNY_ROWS = 8
"""The most rows of a product for which there are skinny kernels."""
SKINNY_TILES = ((32, 8), (16, 4), (16, 8))
"""The columns of a block and the parts of K, best first. Of 30 such kernels on an H200, over 9 GEMMs at one row, the
best of these was within 1.1 % of the best (geometric mean), and the first alone within 3 %: `h200-skinny.json`."""
_ACCUMULATOR_REGISTERS = 208
"""32-bit accumulator registers a thread may hold on SM90; with more, the epilogue spills."""


@dataclass(frozen=True)
class Space:
    """The configurations of one architecture: those of a grid for which `is_legal` holds.

    tiles_m, tiles_n: rows and columns of a block's tile. clusters: (m, n) blocks that share loads. pingpong: whether
    two warp groups take turns on tiles. vendor_tiles_m, vendor_tiles_n and vendor_clusters: the grid of the plain
    kernels of the Operator API. has_tf32: which of them float32 operands have, too; None where those have no kernel.
    has_room: whether an epilogue fits into shared memory; None where the compiler alone knows.
    dynamic: tiles are handed to blocks by the hardware (cluster launch control), not by a stride.
    paired: with an even cluster_m, two blocks compute one tile of twice the rows, which is how the library counts it.
    lanes: accumulator elements that an epilogue function gets at a time, as a tuple where there are two.
    tensor_memory: the accumulator does not lie in the registers of the warps that compute it.
    """

    tiles_m: tuple[int, ...]
    tiles_n: tuple[int, ...]
    clusters: tuple[tuple[int, int], ...]
    pingpong: tuple[bool, ...]
    is_legal: Callable[[Candidate], bool]
    vendor_tiles_m: tuple[int, ...] = ()
    vendor_tiles_n: tuple[int, ...] = ()
    vendor_clusters: tuple[tuple[int, int], ...] = ()
    has_tf32: Callable[[Candidate], bool] | None = None
    has_room: Callable[[Candidate, EpilogueProgram], bool] | None = None
    dynamic: bool = False
    paired: bool = False
    lanes: int = 1
    tensor_memory: bool = False

    def has(self, candidate: Candidate, dtype: torch.dtype) -> bool:
        """Whether there is a kernel `candidate` for A and B in `dtype`."""
        if dtype == torch.float32 and (self.has_tf32 is None or not self.has_tf32(candidate)):
            return False
        return self.is_legal(candidate)

    def library_tile_m(self, candidate: Candidate) -> int:
        """`tile_m` as the library counts it: of the pair where two blocks compute together."""
        return candidate.tile_m * (2 if self.paired and candidate.cluster_m % 2 == 0 else 1)


def _legal_on_sm90(candidate: Candidate) -> bool:
    tile_m, tile_n = candidate.tile_m, candidate.tile_n
    if candidate.cluster_m * candidate.cluster_n > 4 or tile_n % 16:
        return False
    if candidate.pingpong:  # one warp group a tile
        limit = {64: 256, 128: 208, 192: 128}.get(tile_m, 0)
        return tile_n <= limit
    if tile_m in (192, 320) and tile_n % 32:
        return False
    if tile_n > {64: 256, 128: 256, 192: 256, 256: 256, 320: 160}.get(tile_m, 0):
        return False
    warp_groups = 1 if tile_m == 64 else 2
    return tile_m * tile_n // (warp_groups * 128) <= _ACCUMULATOR_REGISTERS


def _tf32_on_sm90(candidate: Candidate) -> bool:
    """The others abort the compiler. A stage of A and B is as large as that of 16-bit operands (it has half as many
    elements along K), so what fits into shared memory beside it there fits here."""
    if (candidate.tile_m, candidate.tile_n, candidate.pingpong) == (192, 128, False):
        return False
    return candidate.tile_n in (16, 32, 64, 96, 128, 160, 192, 224, 256)


def _legal_on_sm100(candidate: Candidate) -> bool:
    if candidate.pingpong or candidate.cluster_m * candidate.cluster_n > 4 or candidate.tile_n > 256:
        return False
    pair = candidate.cluster_m % 2 == 0
    # A pair's instruction takes columns in steps of 32 (others abort the compiler); 16 of them it takes, too.
    if candidate.tile_n % (32 if pair else 16) and candidate.tile_n != 16:
        return False
    return candidate.tile_m in ((64, 128) if pair else (128,))


def _legal_on_sm120(candidate: Candidate) -> bool:
    tile_m, tile_n = candidate.tile_m, candidate.tile_n
    if candidate.cluster_m * candidate.cluster_n > 1 or tile_m not in (64, 128) or tile_n % 32:
        return False
    # Larger tiles leave no room for two stages of A and B, and pingpong's accumulators lie in half the threads.
    return tile_n <= (160 if candidate.pingpong else 192)


SPACES = {
    "sm_90a": Space(
        tiles_m=(64, 128, 192, 256, 320),
        tiles_n=(16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 208, 224, 256),
        clusters=((1, 1), (2, 1), (1, 2)),
        pingpong=(True, False),
        is_legal=_legal_on_sm90,
        vendor_tiles_m=(64, 128),
        vendor_tiles_n=(64, 128, 256),
        vendor_clusters=((1, 1), (2, 1), (1, 2), (2, 2)),
        has_tf32=_tf32_on_sm90,
        has_room=shared_memory.has_room,
    ),
    "sm_100a": Space(
        tiles_m=(64, 128),
        tiles_n=(16, 32, 64, 128, 160, 192, 224, 256),
        clusters=((1, 1), (2, 1), (1, 2), (2, 2)),
        pingpong=(False,),
        is_legal=_legal_on_sm100,
        dynamic=True,
        paired=True,
        lanes=2,
        tensor_memory=True,
    ),
    "sm_120a": Space(
        tiles_m=(64, 128),
        tiles_n=(32, 64, 128, 160, 192),
        clusters=((1, 1),),
        pingpong=(True, False),
        is_legal=_legal_on_sm120,
        dynamic=True,
    ),
}
"""By the compiler's name of the architecture. SM80 has none: QuACK 0.6.5 declares a GEMM for it (`quack.gemm_sm80`),
whose body raises NotImplementedError, and the Operator API's kernel for SM80 takes no epilogue."""
