"""Runs kernels in a process of its own: `python -m nvgemm_fusion.lowering.trial_worker cuda:0`.

    {}                                                     ->  {"ok": true} as soon as the GPU can be used
    {"spec": {...}, "library": "....so", "layouts": [...]}   ->  {"ok": true}
                                                            or {"ok": false, "reason": ..., "error": ...,
                                                                "harmful": whether it must never run again}

Each tensor lies in the middle of memory whose bytes are known, so that a kernel which writes beside it is found.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._prims_common import compute_required_storage_length

from ..fusion.program import ACCUMULATOR, OperandKind, ProgramBuilder, Store
from ..fusion.reasons import Reason, described
from .compiler import CompiledKernel
from .kernel import KernelSpec
from .launcher import bind
from .library import loader
from .residency import resident_clusters
from .verification import mismatch
from .worker import Message, serve

GUARD_BYTES = 1 << 20
"""On each side of a tensor. A multiple of any alignment, and more than a row of most tiles."""
PATTERN = 0xFF
"""A NaN in each dtype of floats, so that what reads it is wrong, too."""


class GuardedTensor:
    """A random tensor (`tensor`) with a guard on either side. scale: what its floats are multiplied with."""

    def __init__(
        self,
        size: Sequence[int],
        strides: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
    ) -> None:
        elements = compute_required_storage_length(size, strides, offset)
        self._size = elements * dtype.itemsize
        self._bytes = torch.full((self._size + 2 * GUARD_BYTES,), PATTERN, dtype=torch.uint8, device=device)
        buffer = self._bytes[GUARD_BYTES : GUARD_BYTES + self._size].view(dtype)
        if dtype.is_floating_point:
            buffer.copy_(torch.randn(elements, device=device).mul_(scale))
        else:
            buffer.copy_(torch.randint(0, 2, (elements,), device=device))
        self.tensor = torch.as_strided(buffer[offset:], size, strides)

    def is_intact(self) -> bool:
        """Whether both guards are as they were."""
        before, after = self._bytes[:GUARD_BYTES], self._bytes[GUARD_BYTES + self._size :]
        return bool((before == PATTERN).all() and (after == PATTERN).all())


def main() -> None:
    """Serves requests for the device that is named on the command line."""
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a launcher launches there
    ready = _used(device)
    with contextlib.suppress(Exception):  # where this fails, a trial says why
        _warm_up(device)
    serve(lambda request: answer(request, device) if request else ready)


def _warm_up(device: torch.device) -> None:
    """What makes a first trial as long as forty others: the imports of what loads a kernel, cuBLAS, and what the driver
    compiles and loads with the first use of each operation."""
    guarded = [GuardedTensor((64, 64), (64, 1), 0, torch.bfloat16, device) for _ in range(3)]
    product, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
    mismatch(product, [of.tensor for of in guarded])
    for of in guarded:
        of.is_intact()
    if device.type == "cuda":
        resident_clusters(1, torch.cuda.current_device())
    loader()


def answer(request: Message, device: torch.device) -> Message:
    """Tries one kernel."""
    before = _used(device)
    if not before["ok"]:  # which is no fault of the kernel
        return {**before, "reason": Reason.NOT_MEASURED.value, "harmful": False}
    spec = KernelSpec.from_json(request["spec"])
    path = None if request["library"] is None else Path(request["library"])
    try:
        found = _tried(CompiledKernel(spec, path, 0.0), request["layouts"], device)
        return {"ok": True} if found is None else found
    except torch.OutOfMemoryError as error:
        return {"ok": False, "reason": Reason.NOT_MEASURED.value, "error": str(error)[:500], "harmful": False}
    except Exception as error:  # whatever a launch raises; what matters is whether the GPU can still be used
        is_lost = not _used(device)["ok"]
        return {"ok": False, "reason": Reason.RUN_ERROR.value, "error": described(error), "harmful": is_lost}
    finally:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # of a GPU that is lost
                torch.cuda.empty_cache()  # the process that asks measures next, and may need the room


def _tried(kernel: CompiledKernel, layouts: Sequence[Sequence], device: torch.device) -> Message | None:
    """What is wrong with a kernel, in the form of an answer."""
    spec, program = kernel.spec, kernel.spec.program
    wanted = [(spec.dtype, device, 1.0), (spec.dtype, device, layouts[0][0][1] ** -0.5)]  # the product is of order one
    for operand in program.operands:
        wanted.append((operand.dtype, torch.device("cpu") if operand.kind is OperandKind.NUMBER else device, 1.0))
    wanted += [(store.dtype, device, 1.0) for store in program.stores]
    guarded = [GuardedTensor(*layout, *of) for layout, of in zip(layouts, wanted, strict=True)]
    tensors = [of.tensor for of in guarded]
    bind(kernel)(*tensors)
    _wait(device)
    for number, of in enumerate(guarded):
        if not of.is_intact():
            error = f"it writes beside argument {number}"
            return {"ok": False, "reason": Reason.WRONG_RESULT.value, "error": error, "harmful": True}
    found = mismatch(program, tensors)
    if found is None:
        return None
    return {"ok": False, "reason": Reason.WRONG_RESULT.value, "error": found, "harmful": False}


def _used(device: torch.device) -> Message:
    """Whether the device can be used: by using it."""
    try:
        torch.zeros(1, device=device)
        _wait(device)
    except Exception as error:
        return {"ok": False, "error": described(error)}
    return {"ok": True}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
