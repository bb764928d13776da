"""Shared memory: how many stages of A and B a kernel of QuACK's on SM90 has beside its epilogue.

The library counts the same (`quack.gemm_sm90.GemmSm90._compute_stages`), but only when it compiles; a test compares
the two. A kernel with a single stage waits for itself: its loads for the next step along K wait until the stage is
free, which it is only after the product of that step has begun. Of 80 TF32 kernels tried on an H200 the ten with one
stage hung, and no other.
"""

from __future__ import annotations

import math

from ..fusion.program import EpilogueProgram, OperandKind
from .kernel import Candidate
from .targets import TARGETS

CAPACITY_BYTES = TARGETS["H100"].shared_bytes_per_block
"""The same on every GPU of SM90."""
STEP_BYTES = 128
"""Of a row of A or of B in one stage, whatever their dtype."""
BARRIER_BYTES = PADDING_BYTES = 1024
LEAST_STAGES = 2
MOST_LOADED, MOST_STORED, MOST_STORED_NARROW = 4, 2, 4
"""Parts of the tile that are loaded ahead, and that wait to be stored; more of those where a part is narrow."""
NARROW = 16


def has_room(candidate: Candidate, program: EpilogueProgram) -> bool:
    """Whether `candidate` with `program` as epilogue has the stages that it needs."""
    return stages(candidate, program) >= LEAST_STAGES


def stages(candidate: Candidate, program: EpilogueProgram) -> int:
    """How many stages there are. Not positive where the epilogue alone takes too much."""
    part_m, part_n = _part(candidate, program.stores[0].dtype.itemsize)
    size, parts = part_m * part_n, candidate.tile_m * candidate.tile_n // (part_m * part_n)
    loaded, vectors = 0, 0
    for operand in program.operands:
        if operand.kind is OperandKind.TILE:
            loaded += operand.dtype.itemsize
        elif operand.kind in (OperandKind.ROW, OperandKind.COLUMN):
            # A kernel of the transposed product has its rows where the product has its columns.
            is_along_n = (operand.kind is OperandKind.ROW) != candidate.swap_ab
            vectors += (candidate.tile_n if is_along_n else candidate.tile_m) * operand.dtype.itemsize
    stored = sum(store.dtype.itemsize for store in program.stores)
    epilogue = vectors + size * (
        loaded * min(parts, MOST_LOADED)
        + stored * min(parts, MOST_STORED_NARROW if part_n <= NARROW else MOST_STORED)
    )
    is_plain = not loaded and not vectors and len(program.stores) == 1
    left = CAPACITY_BYTES - BARRIER_BYTES - (0 if is_plain else PADDING_BYTES) - epilogue
    return left // ((candidate.tile_m + candidate.tile_n) * STEP_BYTES)


def _part(candidate: Candidate, store_bytes: int) -> tuple[int, int]:
    """The rows and columns of a tile that pass through the epilogue at a time."""
    tile_m, tile_n = candidate.tile_m, candidate.tile_n
    # Warp groups side by side along N where the rows do not divide among them.
    is_split_along_m = not candidate.pingpong and (tile_m in (128, 256) or (tile_m == 192 and tile_n <= 128))
    if is_split_along_m:
        return math.gcd(192 if tile_m == 192 else 128, tile_m), math.gcd(32, tile_n)
    return 64, math.gcd(64 if store_bytes == 1 else 32, tile_n)
