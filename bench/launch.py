"""Host time of a call: one of our kernels against one of Inductor's Triton kernels with as many arguments.

    python -m nvgemm_fusion.bench.launch [OUTPUT]       (default: bench/results/h200-launch.json)

Two compiled functions of three tensors run one kernel each: a GEMM with its bias and activation inside, and a pointwise
kernel. All that Dynamo and the wrapper do for them is alike, so what they differ by is the launch. Beside them stands
the launcher by itself. Calls are enqueued and not waited for, in batches that the queue of the GPU holds, in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from ..fusion.decision import Timing
from ..lowering.compiler import CompiledKernel, shared_compiler
from ..lowering.kernel import Candidate, KernelSpec
from ..lowering.launcher import bind
from ..lowering.packages import versions
from ..lowering.providers import QUACK
from ..lowering.targets import current_target
from .layers import Gemm, program
from .side_by_side import FORCED

RESULTS = Path(__file__).parent / "results" / "h200-launch.json"
BATCH, ROUNDS = 200, 40
M, N, K = 64, 512, 128


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes the result."""
    arguments = sys.argv[1:] if arguments is None else arguments
    output = Path(arguments[0]) if arguments else RESULTS
    x, w, b = (torch.randn(*size, device="cuda").bfloat16() for size in ((M, K), (N, K), (N,)))
    tiles = [torch.randn(M, N, device="cuda").bfloat16() for _ in range(3)]
    fused = torch.compile(lambda x, w, b: F.relu(F.linear(x, w, b)), dynamic=False, options=FORCED)
    pointwise = torch.compile(lambda x, w, b: F.relu(x * w + b), dynamic=False)
    launch, result = _launcher(), torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    calls = {
        "compiled_fused": lambda: fused(x, w, b),
        "compiled_pointwise": lambda: pointwise(*tiles),
        "launcher_alone": lambda: launch(x, w.t(), b, result),
    }
    with torch.no_grad():
        timings = _host_times(list(calls.values()))
    measured = {name: {"us": timing.us, "spread": timing.spread} for name, timing in zip(calls, timings, strict=True)}
    measured = {name: {key: round(us, 3) for key, us in of.items()} for name, of in measured.items()}
    ratio = measured["compiled_fused"]["us"] / measured["compiled_pointwise"]["us"]
    about = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "batch": BATCH, "rounds": ROUNDS}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**measured, "ratio": round(ratio, 4), **about}, indent=1) + "\n", encoding="utf-8")
    for name, of in measured.items():
        print(f"{name:20} {of['us']:7.2f} us a call, spread {of['spread']:.2f}")


def _launcher() -> Callable[..., None]:
    """A kernel with bias and GELU, bound."""
    target = current_target()
    spec = KernelSpec.of(Gemm(N, K, "bias_gelu").problem(M), Candidate(QUACK, 64, 64), program("bias_gelu"), target)
    compiled = shared_compiler(1).compile([spec])[0]
    if not isinstance(compiled, CompiledKernel):
        raise RuntimeError(str(compiled))
    return bind(compiled)


def _host_times(calls: Sequence[Callable[[], object]]) -> list[Timing]:
    """Microseconds of host time a call, for each of `calls`."""
    rounds: list[list[float]] = [[] for _ in calls]
    for number in range(ROUNDS + 1):
        for call, samples in zip(calls, rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            elapsed = time.perf_counter() - start
            if number:  # the first round compiles
                samples.append(elapsed / BATCH * 1e6)
    torch.cuda.synchronize()
    return [Timing.of(samples) for samples in rounds]


if __name__ == "__main__":
    main()
