"""The candidates of a problem: legal, ranked, few, and there without the vendor's model."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvgemm_fusion.fusion.problem import GEMM_DTYPES, Problem
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering import heuristics
from nvgemm_fusion.lowering.candidates import candidates
from nvgemm_fusion.lowering.kernel import Candidate
from nvgemm_fusion.lowering.occupancy import HOPPER
from nvgemm_fusion.lowering.providers import OPERATORS, QUACK
from nvgemm_fusion.lowering.spaces import SPACES
from nvgemm_fusion.lowering.targets import TARGETS

H200 = TARGETS["H200"]


def problem_of(m, n, k, dtype=torch.bfloat16, a_major=Major.ROW, b_major=Major.COLUMN, target="sm_90a"):
    return Problem(m, n, k, dtype, a_major, b_major, target)


def identity():
    return ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])[0]


def relu():
    builder = ProgramBuilder()
    return builder.build([Store(builder.op("relu", ACCUMULATOR), torch.bfloat16)])[0]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [(9, 14336, 4096), (16, 14336, 4096), (256, 4096, 4096), (4096, 4096, 14336)])
def test_as_many_as_asked_for_and_none_twice(size, limit):
    found = candidates(problem_of(*size), H200, relu(), limit)
    assert len(found) == limit == len(set(found))
    assert all(candidate.provider == QUACK and SPACES["sm_90a"].is_legal(candidate) for candidate in found)


def test_no_limit_means_all():
    found = candidates(problem_of(512, 512, 512), H200, relu(), None)
    assert len(found) > 100 and set(candidates(problem_of(512, 512, 512), H200, relu(), 5)) <= set(found)


def test_a_plain_product_also_gets_the_vendors_kernels():
    found = candidates(problem_of(4096, 4096, 4096), H200, identity(), 6)
    assert [candidate.provider for candidate in found].count(OPERATORS) == 2


@given(st.integers(1, 8192), st.integers(1, 16384), st.integers(1, 16384), st.sampled_from(GEMM_DTYPES))
def test_every_problem_has_candidates(m, n, k, dtype):
    found = candidates(problem_of(m, n, k, dtype), H200, relu(), 5)
    assert isinstance(found, list) and found
    assert all(HOPPER.us(problem_of(m, n, k, dtype), candidate, relu()) > 0 for candidate in found)


def test_decode_gets_small_tiles():
    best = candidates(problem_of(16, 14336, 4096), H200, relu(), 1)[0]
    assert min(best.tile_m, best.tile_n) <= 64


def test_the_vendors_first_choice_has_a_place():
    problem = problem_of(4096, 4096, 4096)
    first = heuristics.estimates(problem, H200)[0]
    assert any(
        (c.tile_m, c.tile_n, c.cluster_m, c.cluster_n)
        == (first.tile_m, first.tile_n, first.cluster_m, first.cluster_n)
        for c in candidates(problem, H200, relu(), 5)
    )


@pytest.mark.parametrize("a_major", Major)
@pytest.mark.parametrize("b_major", Major)
@pytest.mark.parametrize("swap_ab", [False, True])
def test_the_vendors_model_answers_for_every_layout(a_major, b_major, swap_ab):
    estimates = heuristics.estimates(problem_of(2048, 1024, 4096, a_major=a_major, b_major=b_major), H200, swap_ab)
    assert estimates and list(estimates) == sorted(estimates, key=lambda estimate: estimate.us)


def test_without_the_vendors_model_there_are_candidates(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", None)
    for function in (heuristics._model, heuristics.estimates):
        function.cache_clear()
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        assert len(candidates(problem_of(1024, 1024, 1024), H200, relu(), 5)) == 5
        candidates(problem_of(1024, 1024, 2048), H200, relu(), 5)
    assert caplog.text.count("ranked without nvMatmulHeuristics") == 1
    for function in (heuristics._model, heuristics.estimates):
        function.cache_clear()


def test_another_target_is_refused():
    refusal = candidates(problem_of(64, 64, 64, target="sm_80"), H200, relu(), 5)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.TARGET


@pytest.mark.parametrize(
    ("candidate", "legal"),
    [
        (Candidate(QUACK, 128, 208, pingpong=True), True),
        (Candidate(QUACK, 128, 256, pingpong=True), False),
        (Candidate(QUACK, 256, 208), True),
        (Candidate(QUACK, 256, 256), False),
        (Candidate(QUACK, 64, 24), False),
        (Candidate(QUACK, 256, 64, pingpong=True), False),
        (Candidate(QUACK, 128, 128, 4, 2), False),
    ],
    ids=str,
)
def test_legality(candidate, legal):
    assert SPACES["sm_90a"].is_legal(candidate) is legal
