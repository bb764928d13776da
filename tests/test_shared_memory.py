"""The stages of A and B beside an epilogue: as the library counts them, and kernels without room are no candidates."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.lowering.candidates import candidates
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.providers import QUACK
from nvgemm_fusion.lowering.shared_memory import LEAST_STAGES, has_room, stages
from nvgemm_fusion.lowering.spaces import SPACES
from nvgemm_fusion.lowering.targets import TARGETS
from test_candidates import problem_of

BF16, F32 = torch.bfloat16, torch.float32


def program(dtype, operands=(), stores=1, first=None):
    """The sum of the product and `operands`, kinds of them in `dtype`, and multiples of it."""
    builder = ProgramBuilder()
    value = ACCUMULATOR
    for number, kind in enumerate(operands):
        value = builder.op("add", value, builder.operand(f"{kind.value}{number}", Operand(kind, dtype)))
    found = [Store(value, first or dtype)]
    found += [Store(builder.op("mul", value, builder.constant(float(i + 2))), dtype) for i in range(stores - 1)]
    return builder.build(found)[0]


TILE, ROW, COLUMN, SCALAR = OperandKind.TILE, OperandKind.ROW, OperandKind.COLUMN, OperandKind.SCALAR
PROGRAMS = {
    "plain": program(BF16),
    "plain float32": program(F32),
    "bias": program(BF16, [ROW]),
    "column and scalar": program(F32, [COLUMN, SCALAR]),
    "gated": program(BF16, [TILE, ROW], 2),
    "large": program(F32, [TILE, TILE, ROW, COLUMN], 2),
    "huge": program(F32, [TILE] * 4, 4),
    "quantised": program(BF16, [ROW], first=torch.float8_e4m3fn),
}

LIBRARY = """
import json, sys
from nvgemm_fusion.lowering import providers
from nvgemm_fusion.lowering.kernel import KernelSpec

providers.import_compilers()
from quack.gemm_sm90 import GemmSm90

count = GemmSm90._compute_stages.__func__

class Counted(Exception):
    pass

def counted(cls, *arguments, **options):
    raise Counted(count(cls, *arguments, **options)[0])

GemmSm90._compute_stages = classmethod(counted)

def stages(spec):
    try:
        providers._set_architecture(spec.arch)
        providers._compile_quack(spec)
    except Exception as error:
        while not isinstance(error, Counted):
            error = error.__cause__ or error.__context__
        return error.args[0]

print(json.dumps([stages(KernelSpec.from_json(spec)) for spec in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def configurations():
    """One cluster of each tile, schedule and order of operands."""
    space = SPACES["sm_90a"]
    every = [
        Candidate(QUACK, tile_m, tile_n, 1, 1, pingpong, swap_ab)
        for tile_m in space.tiles_m
        for tile_n in space.tiles_n
        for pingpong in space.pingpong
        for swap_ab in (False, True)
    ]
    return [candidate for candidate in every if space.has(candidate, BF16)]


@pytest.mark.parametrize("name, dtype", [*((name, BF16) for name in PROGRAMS), ("large", F32)], ids=str)
def test_stages_are_counted_as_by_the_library(name, dtype, configurations):
    specs = [
        KernelSpec(candidate, dtype, Major.ROW, Major.COLUMN, PROGRAMS[name], "sm_90a", 132)
        for candidate in configurations[len(name) % 3 :: 3]
        if SPACES["sm_90a"].has(candidate, dtype)
    ]
    said = json.dumps([spec.to_json() for spec in specs])
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY], input=said, stdout=subprocess.PIPE, text=True, check=True
    )
    library = json.loads(done.stdout.splitlines()[-1])
    ours = [stages(spec.candidate, spec.program) for spec in specs]
    assert ours == library, [(str(spec.candidate), *pair) for spec, *pair in zip(specs, ours, library)]


def test_what_has_no_room_is_no_candidate():
    problem, target = problem_of(4096, 4096, 4096, BF16), TARGETS["H200"]
    for dtype in (BF16, F32):
        for name in ("bias", "huge"):
            legal = candidates(problem, target, PROGRAMS[name], None)
            assert all(has_room(candidate, PROGRAMS[name]) for candidate in legal)
    assert len(candidates(problem, target, PROGRAMS["huge"], 5)) == 5
    assert stages(Candidate(QUACK, 256, 192), PROGRAMS["huge"]) < LEAST_STAGES <= stages(
        Candidate(QUACK, 256, 192), PROGRAMS["bias"]
    )
