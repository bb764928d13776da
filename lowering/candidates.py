"""Candidates: the kernel configurations that could compute a problem, and the best N of them.

First legality: what the kernels on SM90 can do at all. Then rank, by the occupancy model (`occupancy`). The last
place goes to the first choice of nvMatmulHeuristics, which knows the hardware in more detail but not these kernels:
on the problems measured on an H200 its best five were 1.5 times slower than the best, in the geometric mean, for
want of swapped operands, pingpong and small tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram
from ..fusion.reasons import Reason, Refusal
from .heuristics import estimates
from .kernel import Candidate
from .occupancy import HOPPER
from .providers import OPERATORS, QUACK
from .targets import Target

TILES_M = (64, 128, 256)
TILES_N = (16, 32, 64, 96, 128, 160, 192, 208, 256)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
_ACCUMULATOR_REGISTERS = 208
"""32-bit accumulator registers a thread may hold; with more, the epilogue spills."""


def is_legal(candidate: Candidate) -> bool:
    """Whether the SM90 kernels of QuACK exist for this configuration."""
    tile_m, tile_n = candidate.tile_m, candidate.tile_n
    if candidate.cluster_m * candidate.cluster_n > 4 or tile_n % 16:
        return False
    if candidate.pingpong:  # one warp group a tile
        limit = {64: 256, 128: 208, 192: 128}.get(tile_m, 0)
        return tile_n <= limit
    if tile_m not in (64, 128, 192, 256) or tile_n > 256 or (tile_m == 192 and tile_n % 32):
        return False
    warp_groups = 1 if tile_m == 64 else 2
    return tile_m * tile_n // (warp_groups * 128) <= _ACCUMULATOR_REGISTERS


def candidates(
    problem: Problem, target: Target, program: EpilogueProgram, limit: int | None
) -> list[Candidate] | Refusal:
    """The best `limit` candidates (all of them for None), best first, for `problem` with `program` as epilogue.

    A program that is the identity also gets plain kernels of the Operator API, in a third of the places.
    """
    if problem.target != target.arch or target.arch != "sm_90a":
        return Refusal(Reason.TARGET, target.name)
    ranked = sorted(_quack(problem), key=lambda candidate: HOPPER.us(problem, candidate, program))
    plain = sorted(_operators(problem), key=lambda candidate: HOPPER.us(problem, candidate, program))
    plain = plain if program.is_identity else []
    if limit is None:
        return ranked + plain or Refusal(Reason.NO_CANDIDATE)
    plain = plain[: limit // 3]
    chosen = _one_of_a_kind(ranked)[: limit - len(plain)]
    second_opinion = next(_rated(problem, target), None)
    if second_opinion is not None and second_opinion not in chosen and len(chosen) > 2:
        chosen[-1] = second_opinion
    return chosen + plain or Refusal(Reason.NO_CANDIDATE)


def _one_of_a_kind(ranked: list[Candidate]) -> list[Candidate]:
    """The best of each tile and schedule: what differs in clusters or operand order alone tends to tie, and where
    the model is wrong, it is wrong about the tile."""
    kinds: dict[tuple[int, int, bool], Candidate] = {}
    for candidate in ranked:
        kinds.setdefault((candidate.tile_m, candidate.tile_n, candidate.pingpong), candidate)
    return list(kinds.values())


def _rated(problem: Problem, target: Target) -> Iterator[Candidate]:
    """QuACK's kernels for what nvMatmulHeuristics recommends, in its order (clusters of four have lost each time)."""
    for estimate in estimates(problem, target):
        shape = (estimate.tile_m, estimate.tile_n, estimate.cluster_m, estimate.cluster_n)
        for pingpong in (True, False):
            candidate = Candidate(QUACK, *shape, pingpong)
            if shape[2:] in CLUSTERS and is_legal(candidate) and _fits(candidate, problem):
                yield candidate


def _quack(problem: Problem) -> Iterator[Candidate]:
    """Every legal configuration of QuACK that fits the problem."""
    for tile_m, tile_n, cluster, pingpong, swap_ab in itertools.product(
        TILES_M, TILES_N, CLUSTERS, (True, False), (False, True)
    ):
        candidate = Candidate(QUACK, tile_m, tile_n, *cluster, pingpong, swap_ab)
        if is_legal(candidate) and _fits(candidate, problem):
            yield candidate


def _operators(problem: Problem) -> Iterator[Candidate]:
    """The SM90 kernels of the Operator API that fit the problem."""
    for tile_m, tile_n, cluster in itertools.product((64, 128), (64, 128, 256), (*CLUSTERS, (2, 2))):
        candidate = Candidate(OPERATORS, tile_m, tile_n, *cluster)
        if _fits(candidate, problem):
            yield candidate


def _fits(candidate: Candidate, problem: Problem) -> bool:
    """Not more than twice as large as the product along either axis (or the smallest tile there is)."""
    m, n = (problem.n, problem.m) if candidate.swap_ab else (problem.m, problem.n)
    smallest_n = min(TILES_N) if candidate.provider == QUACK else 64
    return candidate.tile_m <= max(2 * m, min(TILES_M)) and candidate.tile_n <= max(2 * n, smallest_n)
