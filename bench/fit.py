"""The constants of the occupancy model, fitted to the times of the candidates study; needs no GPU.

    python -m nvgemm_fusion.bench.fit [--steps N] [--seed N] [--half]

A random search from the constants as they stand: a step changes one to three of them, and is kept where it makes the
loss smaller. That is how far the best of the candidates that would be tried is behind the best of all, with what is
beyond 3 % counted on top, and a little of the model's error on the logarithm of the time, where fast configurations
weigh most: it keeps the constants near to what they stand for. With --half every other problem is left out, and what
holds on those is printed, too. A step takes a quarter of a second.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.progress import track

from ..fusion.problem import Problem
from ..fusion.program import EpilogueProgram
from ..lowering.candidates import one_of_a_kind
from ..lowering.kernel import Candidate
from ..lowering.occupancy import HOPPER, OccupancyModel
from .candidates import FAR, LIMIT, RESULTS, every_candidate, problem_of, summary
from .layers import program

FITTED = {
    "flops": math.inf,
    "l2_bytes": math.inf,
    "shared_bytes": math.inf,
    "epilogue_us": math.inf,
    "tile_operand_us": math.inf,
    "hidden": 1.0,
    "tile_us": math.inf,
    "launch_us": math.inf,
    "memory_bytes": math.inf,
    "saturation": math.inf,
    "reread": 1.0,
    "stream_norm": 30.0,
    "memory_norm": 30.0,
}
"""The constants, and how large each may get."""
FAR_WEIGHT = 0.15
ERROR_WEIGHT, FOCUS = 0.05, 8.0
"""The weight of the model's error. In it, a configuration that takes twice the best time counts e^-FOCUS."""
FIRST_STEP, SHRINK, STEPS_A_SIZE = 0.15, 0.6, 300


@dataclass(frozen=True)
class Case:
    """One problem, with the microseconds of each of its candidates."""

    problem: Problem
    epilogue: EpilogueProgram
    us: dict[Candidate, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits, and prints the constants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half", action="store_true", help="leave out every other problem")
    options = parser.parse_args(arguments)
    measured = cases()
    fitted = measured[:: 2 if options.half else 1]
    model = fit(HOPPER, fitted, options.steps, random.Random(options.seed))
    for name in FITTED:
        print(f"{name} = {getattr(model, name):.3g}")
    print("fitted to:", summary([behind(model, case) for case in fitted]))
    if options.half:
        print("left out: ", summary([behind(model, case) for case in measured[1::2]]))


def cases() -> list[Case]:
    """What the study has measured."""
    found = []
    for record in json.loads(RESULTS.read_text(encoding="utf-8"))["records"]:
        problem = problem_of(record)
        names = {str(candidate): candidate for candidate in every_candidate(problem, record["epilogue"])}
        us = {names[name]: time for name, time in record["us"].items() if name in names}
        found.append(Case(problem, program(record["epilogue"]), us))
    return found


def fit(model: OccupancyModel, fitted: Sequence[Case], steps: int, source: random.Random) -> OccupancyModel:
    """The best model that the search comes across."""
    least, size = loss(model, fitted), FIRST_STEP
    for step in track(range(1, steps + 1), "fitting", disable=not sys.stderr.isatty()):
        changed = {
            name: min(FITTED[name], getattr(model, name) * math.exp(source.gauss(0.0, size)))
            for name in source.sample(list(FITTED), source.choice((1, 1, 2, 3)))
        }
        attempt = replace(model, **changed)
        found = loss(attempt, fitted)
        if found < least:
            model, least = attempt, found
        if step % STEPS_A_SIZE == 0:
            size *= SHRINK
    return model


def loss(model: OccupancyModel, fitted: Sequence[Case]) -> float:
    """What the search makes small."""
    shortfalls, squares, weights = [], 0.0, 0.0
    for case in fitted:
        predicted = {candidate: model.us(case.problem, candidate, case.epilogue) for candidate in case.us}
        shortfalls.append(_behind(predicted, case))
        best = min(case.us.values())
        for candidate, us in case.us.items():
            weight = math.exp(-FOCUS * (us / best - 1.0))
            weights += weight
            squares += weight * math.log(predicted[candidate] / us) ** 2
    far = statistics.fmean(max(0.0, shortfall - FAR) for shortfall in shortfalls)
    mean = statistics.fmean(map(math.log, shortfalls))
    return mean + FAR_WEIGHT * far + ERROR_WEIGHT * math.sqrt(squares / weights)


def behind(model: OccupancyModel, case: Case) -> float:
    """The time of the best of the first LIMIT candidates by `model`, over that of the best of all."""
    return _behind({c: model.us(case.problem, c, case.epilogue) for c in case.us}, case)


def _behind(predicted: dict[Candidate, float], case: Case) -> float:
    tried = one_of_a_kind(sorted(predicted, key=predicted.__getitem__))[:LIMIT]
    return min(case.us[candidate] for candidate in tried) / min(case.us.values())


if __name__ == "__main__":
    main()
