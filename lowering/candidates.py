"""Candidates: the kernel configurations that could compute a problem, and the best N of them.

First legality: what the kernels of the architecture can do at all (`spaces`). Then rank, by the occupancy model
(`occupancy`). The last place goes to the first choice of nvMatmulHeuristics, which knows the hardware in more detail
but not these kernels: of 96 problems measured on an H200, QuACK has kernels for its recommendations in 77. There the
best of its first five is 1.23 times slower than the best of all, in the geometric mean, for want of swapped operands.

A product of few rows gets skinny kernels (`skinny`) before those.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ..fusion.problem import ALIGNMENT_BYTES, Problem
from ..fusion.program import EpilogueProgram, Major
from ..fusion.reasons import Reason, Refusal
from .heuristics import estimates
from .kernel import Candidate
from .occupancy import model_of
from .providers import OPERATORS, QUACK, SKINNY
from .spaces import SKINNY_ROWS, SKINNY_TILES, SPACES, Space
from .targets import Target


def candidates(
    problem: Problem, target: Target, program: EpilogueProgram, limit: int | None
) -> list[Candidate] | Refusal:
    """The best `limit` candidates (all of them for None), best first, for `problem` with `program` as epilogue.

    Skinny kernels, where there are any, get half of the places. Of the others, a program that is the identity gets a
    third from the Operator API; not with float32 operands, for which that has no kernel.
    """
    space = SPACES.get(target.arch)
    if problem.target != target.arch or space is None:
        return Refusal(Reason.TARGET, f"{target.name}: QuACK has no GEMM for {problem.target}")
    if problem.dtype == torch.float32:
        if space.has_tf32 is None:
            return Refusal(Reason.DTYPE, f"{target.name}: QuACK's GEMM takes no float32 there")
        if (problem.a_major, problem.b_major) != (Major.ROW, Major.COLUMN):
            return Refusal(Reason.LAYOUT, "TF32 reads A and B along K only: A has to be row-major, B column-major")
    skinny = _skinny(problem)[: None if limit is None else -(-limit // 2)]
    tiled = tiled_candidates(problem, target, program, None if limit is None else limit - len(skinny))
    return skinny + tiled or Refusal(Reason.NO_CANDIDATE)


def tiled_candidates(problem: Problem, target: Target, program: EpilogueProgram, limit: int | None) -> list[Candidate]:
    """The best `limit` candidates among the kernels of tiles, best first, where `target` has such kernels at all."""
    space, model = SPACES[target.arch], model_of(target)
    ranked = sorted(_quack(problem, space, program), key=lambda candidate: model.us(problem, candidate, program))
    plain = list(_operators(problem, space)) if program.is_identity and problem.dtype != torch.float32 else []
    plain.sort(key=lambda candidate: model.us(problem, candidate, program))
    if limit is None:
        return ranked + plain
    plain = plain[: limit // 3]
    chosen = one_of_a_kind(ranked)[: limit - len(plain)]
    second_opinion = next(_rated(problem, target, space, program), None)
    if second_opinion is not None and second_opinion not in chosen and len(chosen) > 2:
        chosen[-1] = second_opinion
    return chosen + plain


def one_of_a_kind(ranked: list[Candidate]) -> list[Candidate]:
    """The best of each tile and schedule: what differs in clusters or operand order alone tends to tie, and where
    the model is wrong, it is wrong about the tile."""
    kinds: dict[tuple[int, int, bool], Candidate] = {}
    for candidate in ranked:
        kinds.setdefault((candidate.tile_m, candidate.tile_n, candidate.pingpong), candidate)
    return list(kinds.values())


def _rated(problem: Problem, target: Target, space: Space, program: EpilogueProgram) -> Iterator[Candidate]:
    """QuACK's kernels for what nvMatmulHeuristics recommends, in its order (clusters of four have lost each time)."""
    for estimate in estimates(problem, target):
        cluster = estimate.cluster_m, estimate.cluster_n
        for pingpong in space.pingpong:
            candidate = Candidate(QUACK, estimate.tile_m, estimate.tile_n, *cluster, pingpong)
            if cluster in space.clusters and _is_legal(candidate, problem, space, program):
                yield candidate


def _quack(problem: Problem, space: Space, program: EpilogueProgram) -> Iterator[Candidate]:
    """Every legal configuration of QuACK."""
    for tile_m, tile_n, cluster, pingpong, swap_ab in itertools.product(
        space.tiles_m, space.tiles_n, space.clusters, space.pingpong, (False, True)
    ):
        candidate = Candidate(QUACK, tile_m, tile_n, *cluster, pingpong, swap_ab)
        if _is_legal(candidate, problem, space, program):
            yield candidate


def _skinny(problem: Problem) -> list[Candidate]:
    """The skinny kernels that fit the problem, best first."""
    majors = problem.a_major, problem.b_major
    if problem.m > SKINNY_ROWS or problem.dtype.itemsize != 2 or majors != (Major.ROW, Major.COLUMN):
        return []
    if problem.k * problem.dtype.itemsize % ALIGNMENT_BYTES:  # lines of A and B that are padded: the last loads read on
        return []
    return [Candidate(SKINNY, columns, SKINNY_ROWS, swap_ab=True, split_k=parts) for columns, parts in SKINNY_TILES]


def _operators(problem: Problem, space: Space) -> Iterator[Candidate]:
    """The plain kernels of the Operator API that fit the problem."""
    for tile_m, tile_n, cluster in itertools.product(
        space.vendor_tiles_m, space.vendor_tiles_n, space.vendor_clusters
    ):
        candidate = Candidate(OPERATORS, tile_m, tile_n, *cluster)
        if _fits(candidate, problem, space):
            yield candidate


def _is_legal(candidate: Candidate, problem: Problem, space: Space, program: EpilogueProgram) -> bool:
    """Whether QuACK has a kernel `candidate` that fits the problem, and has room for the epilogue."""
    if not space.has(candidate, problem.dtype) or not _fits(candidate, problem, space):
        return False
    return space.has_room is None or space.has_room(candidate, program)


def _fits(candidate: Candidate, problem: Problem, space: Space) -> bool:
    """Not more than twice as large as the product along either axis (or the smallest tile there is)."""
    m, n = (problem.n, problem.m) if candidate.swap_ab else (problem.m, problem.n)
    smallest_n = min(space.tiles_n if candidate.provider == QUACK else space.vendor_tiles_n)
    return candidate.tile_m <= max(2 * m, min(space.tiles_m)) and candidate.tile_n <= max(2 * n, smallest_n)
