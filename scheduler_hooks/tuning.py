"""A contest that was held before: its winner is taken from disk, and nobody is compiled or timed again."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timezone

from torch._inductor import config
from torch._inductor.ir import ChoiceCaller
from torch._inductor.select_algorithm import TritonTemplateCaller

from ..fusion.decision import Backend, Decision, Status, Timing
from ..fusion.regions import Region, producers
from ..lowering import tuning
from ..lowering.candidates import candidates
from ..lowering.compiler import shared_compiler
from ..lowering.cublaslt import CANDIDATE
from ..lowering.packages import versions
from .alternatives import activation_contenders, backend_of, our_contender, stock_contender
from .contest import Contender, Contest

logger = logging.getLogger("nvgemm_fusion")


def is_known(contest: Contest) -> bool:
    """Whether the same contest is in the store, decided under the same conditions."""
    return _found(contest) is not None


def recall(contest: Contest) -> Contender | None:
    """The winner of the same contest in the store, ready to be applied; None when it has to be held.

    That is also so when the entry names a choice that is not here, or a kernel that is not legal or does not compile.
    """
    entry = _found(contest)
    if entry is None:
        return None
    winner = entry.winner
    regions = list(contest.programs)
    if winner.program is not None and winner.program >= len(regions):
        return None
    region = None if winner.program is None else regions[winner.program]
    entrant = _entrant(contest, region, winner)
    if entrant is None or entrant.alternative.status is Status.FAILED:
        return None
    return replace(entrant, alternative=replace(entrant.alternative, timing=Timing(winner.us, winner.spread)))


def keep(contest: Contest, winner: Contender, decision: Decision) -> None:
    """Puts the outcome of a contest into the store, if its times were measured."""
    regions, alternative = list(contest.programs), winner.alternative
    if alternative.status is not Status.MEASURED or winner.region not in (*regions, None):
        return
    unfused = decision.best_unfused
    entry = tuning.TuningEntry(
        contest=_described(contest),
        winner=tuning.Winner(
            backend=alternative.backend.value,
            name=_name(winner.choice),
            program=None if winner.region is None else regions.index(winner.region),
            candidate=None if winner.call is None else winner.call.spec.candidate,
            us=alternative.timing.us,
            spread=alternative.timing.spread,
        ),
        us_best_unfused=None if unfused is None else unfused.timing.us,
        versions=versions(),
        measured_at=datetime.now(timezone.utc).isoformat(),
    )
    try:
        tuning.TuningStore().put(entry)
    except OSError as error:
        logger.warning("a decision is not kept on disk: %s", error)


def _found(contest: Contest) -> tuning.TuningEntry | None:
    entry = tuning.TuningStore().find(_described(contest))
    return entry if entry is not None and entry.misfit(versions(), contest.target.name) is None else None


def _described(contest: Contest) -> tuning.Contest:
    programs = (captured.program for captured in contest.programs.values())
    return tuning.Contest(
        target=contest.target.name,
        problem=tuning.problem_data(contest.gemm.problem),
        programs=tuple(tuning.ProgramData(program.digest, program.readable()) for program in programs),
        beside=len(producers(contest.graph, contest.node.get_name(), contest.members)) + len(contest.readers),
        backends=tuple(sorted({backend_of(choice).value for choice in contest.node.node.choices})),
        candidates=config.nvgemm_fusion_candidates,
    )


def _entrant(contest: Contest, region: Region | None, winner: tuning.Winner) -> Contender | None:
    if winner.candidate == CANDIDATE:
        return next((entrant for entrant in activation_contenders(contest) if entrant.region == region), None)
    if winner.backend == Backend.NVGEMM.value:
        program = contest.programs[region].program
        legal = candidates(contest.gemm.problem, contest.target, program, None)
        if not isinstance(legal, list) or winner.candidate not in legal:
            return None
        entrant = our_contender(contest, region, winner.candidate)
        return entrant.with_kernel(shared_compiler(config.compile_threads).submit(entrant.call.spec).result())
    for choice in contest.node.node.choices:
        if _name(choice) == winner.name and (region is None or isinstance(choice, TritonTemplateCaller)):
            return stock_contender(contest, region, choice)
    return None


def _name(choice: ChoiceCaller) -> str:
    """How a choice is known from one process to the next: Triton's templates are numbered anew in each."""
    return choice.description if isinstance(choice, TritonTemplateCaller) else choice.name
