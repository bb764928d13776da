"""Candidates: the kernel configurations that could compute a problem, and the best N of them.

First legality (what the kernels on SM90 can do at all), then rank. The rank is nvMatmulHeuristics' estimate for
(tile, cluster), in both orientations. A hand-kept supplement comes first where the model has been seen to be wrong
(see `SUPPLEMENT`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram
from ..fusion.reasons import Reason, Refusal
from .heuristics import estimates
from .kernel import Candidate
from .providers import OPERATORS, QUACK
from .targets import Target

_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
_TILES_N = (16, 32, 64, 80, 96, 128, 160, 192, 208, 224, 256)
_ACCUMULATOR_REGISTERS = 208
"""32-bit accumulator registers a thread may hold; with more, the epilogue spills."""

SUPPLEMENT = (
    # (M at most, configurations), measured on an H200: ../shared/MEASURED.md and bench/results.
    (64, (Candidate(QUACK, 128, 16, swap_ab=True), Candidate(QUACK, 128, 32, swap_ab=True))),
    (512, (Candidate(QUACK, 128, 256, 2, 1, swap_ab=True), Candidate(QUACK, 128, 128, 2, 1))),
    (1 << 62, (Candidate(QUACK, 128, 192, 2, 1, pingpong=True), Candidate(QUACK, 128, 256, 2, 1))),
)
"""What to try before the model's own order, by M: it does not know pingpong, and rates swapped operands alike."""


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

    A program that is the identity also gets the plain kernels of the Operator API.
    """
    if problem.target != target.arch or target.arch != "sm_90a":
        return Refusal(Reason.TARGET, target.name)
    ranked: dict[Candidate, float] = {}
    for swap_ab in (False, True):
        for estimate in estimates(problem, target, swap_ab):
            for pingpong in (True, False):
                candidate = Candidate(
                    QUACK,
                    estimate.tile_m,
                    estimate.tile_n,
                    estimate.cluster_m,
                    estimate.cluster_n,
                    pingpong,
                    swap_ab,
                )
                if is_legal(candidate) and _fits(candidate, problem):
                    ranked[candidate] = estimate.us
    preferred = next(configurations for most, configurations in SUPPLEMENT if problem.m <= most)
    ordered = [candidate for candidate in preferred if _fits(candidate, problem)]
    # Several variants share an estimate. Pingpong hides the epilogue once a multiprocessor computes several tiles.
    several = problem.m * problem.n > 128 * 128 * target.multiprocessors
    ordered += sorted(ranked, key=lambda c: (ranked[c], c.pingpong != several, c.swap_ab, str(c)))
    if limit is None:
        ordered += _all(problem)
    quack = list(dict.fromkeys(ordered))[:limit]
    if not program.is_identity:
        return quack or Refusal(Reason.NO_CANDIDATE)
    plain = _operator_candidates(problem, ranked)[:limit]
    # The two providers share the places, so that neither is left out by a small limit.
    mixed = [c for pair in itertools.zip_longest(quack, plain) for c in pair if c is not None]
    return mixed[:limit] or Refusal(Reason.NO_CANDIDATE)


def _fits(candidate: Candidate, problem: Problem) -> bool:
    """Not more than twice as large as the product along either axis: the rest of such a tile is wasted."""
    m, n = (problem.n, problem.m) if candidate.swap_ab else (problem.m, problem.n)
    smallest_m, smallest_n = 64, 16
    return (candidate.tile_m <= max(2 * m, smallest_m) and candidate.tile_n <= max(2 * n, smallest_n)) or (
        candidate.tile_m == smallest_m and candidate.tile_n == smallest_n
    )


def _all(problem: Problem) -> list[Candidate]:
    """Every legal configuration of QuACK that fits the problem."""
    return [
        candidate
        for tile_m, tile_n, cluster, pingpong, swap_ab in itertools.product(
            (64, 128, 192, 256), _TILES_N, _CLUSTERS, (False, True), (False, True)
        )
        if is_legal(candidate := Candidate(QUACK, tile_m, tile_n, *cluster, pingpong, swap_ab))
        and _fits(candidate, problem)
    ]


def _operator_candidates(problem: Problem, ranked: dict[Candidate, float]) -> list[Candidate]:
    """The Operator API's SM90 kernels in the order of the same estimates, unknown ones last."""
    tiles = itertools.product((64, 128), (64, 128, 256), ((1, 1), (1, 2), (2, 1), (2, 2)))
    found = [Candidate(OPERATORS, tile_m, tile_n, *cluster) for tile_m, tile_n, cluster in tiles]
    fitting = [candidate for candidate in found if _fits(candidate, problem)]
    return sorted(fitting, key=lambda c: ranked.get(replace(c, provider=QUACK), float("inf")))
