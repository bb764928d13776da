"""Trial: the first run of a kernel, in a process of its own.

A kernel that hangs, reads where nothing is or writes where something else is does that in a process that can be
killed, on tensors that are watched. It is banned then, and nothing of the process that compiles a model is lost. A
kernel that ends, but is not what the reference gives, is refused with a sample of what it gave.

Where no second process can use the GPU (its compute mode may say so), kernels are tried in this one, with a warning.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence

import torch

from ..fusion.reasons import Reason, Refusal
from .compiler import CompiledKernel
from .store import KernelStore
from .trial_worker import answer as answer_here
from .worker import Message, Worker, start

logger = logging.getLogger("nvgemm_fusion")

START_LIMIT_S = 120.0
"""Starting takes 2 to 4 seconds, most of them the import of torch and the making of a CUDA context."""
TIME_LIMIT_S = 20.0
"""A trial takes less than a tenth of a second; one on tensors that fill the GPU, a few seconds."""
IDLE_S, UNUSED_S = 15.0, 180.0
"""A process is ended so long after its last trial, or after it was prepared and then not asked (in between, Inductor
times its own kernels). It holds half a gigabyte of the GPU, its CUDA context, which the model may want."""

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of a tensor: its size and strides, and where in its buffer it starts, in elements."""


class Trial:
    """Tries kernels on one device ("cuda:0"), one at a time. Safe to use from several threads.

    module: what the process runs; another one than `trial_worker` is for tests.
    """

    def __init__(self, device: torch.device, module: str = "nvgemm_fusion.lowering.trial_worker") -> None:
        self.device, self._module = device, module
        self._worker: Worker | None = None
        self._end: threading.Timer | None = None
        self._is_ready = self._is_alone = False
        self._passed: set[tuple[str, tuple[Layout, ...]]] = set()
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Starts the process, if there is none, without waiting for it."""
        with self._lock:
            if self._is_alone:
                return
            if self._worker is None or not self._worker.alive:
                self._worker, self._is_ready = start(self._module, [str(self.device)]), False
            self._end_in(UNUSED_S)

    def run(self, kernel: CompiledKernel, layouts: Sequence[Layout], store: KernelStore) -> Refusal | None:
        """Runs `kernel` once, on random tensors of these `layouts` (those of a launcher's arguments), and says what is
        wrong with it: `wrong result`, `run error`, or `not measured` where there is no room for the tensors.

        What hangs, ends the process, leaves the GPU unusable or writes beside its outputs is banned in `store`. What
        has passed is not tried again on the same layouts by this object.
        """
        key = kernel.spec.key, tuple(layouts)
        with self._lock:
            if key in self._passed:
                return None
            answer = self._ask(
                {
                    "spec": kernel.spec.to_json(),
                    "library": None if kernel.path is None else str(kernel.path),
                    "layouts": layouts,
                }
            )
            if answer["ok"]:
                self._passed.add(key)
                return None
            refusal = Refusal(Reason(answer.get("reason", Reason.RUN_ERROR)), answer["error"])
            if answer.get("harmful", True):
                self.close()
                store.ban(kernel.spec, refusal)
            return refusal

    def _ask(self, request: Message) -> Message:
        if self._is_alone:
            return answer_here(request, self.device)
        self.prepare()
        if not self._is_ready:
            started = self._worker.ask({}, START_LIMIT_S)
            if not started["ok"]:
                self.close()
                self._is_alone = True
                logger.warning("kernels for %s run first in this process: %s", self.device, started["error"])
                return self._ask(request)
            self._is_ready = True
        answer = self._worker.ask(request, TIME_LIMIT_S)
        self._end_in(IDLE_S)
        return answer

    def close(self) -> None:
        """Ends the process. `run` starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.kill()

    def _end_in(self, seconds: float) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = threading.Timer(seconds, self.close)
        self._end.daemon = True
        self._end.start()


@functools.lru_cache(maxsize=None)
def shared_trial(device: torch.device) -> Trial:
    """The trial of this process on `device`, which has an index."""
    return Trial(device)
