"""KernelCompiler: compiles kernels in parallel processes, through the store.

The workers are forked from one process of `compile_worker`, since the compilers' imports take seconds. They are forked
when first needed and kept for the life of this process. A worker that dies over a candidate, or that does not answer
in time, costs this one, and is replaced with the next request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..fusion.reasons import Reason, Refusal
from .cublaslt import CUBLASLT
from .kernel import KernelSpec
from .store import KernelStore
from .worker import Nursery, Worker

TIME_LIMIT_S = 240.0
"""Compiling takes 1 to 4 seconds. The rest is for machines with many more processes than cores, since what is late is
banned."""


@dataclass(frozen=True)
class CompiledKernel:
    """A library that can be loaded, and the seconds that compiling it took (0 when it was in the store). No file
    where torch has the kernel."""

    spec: KernelSpec
    path: Path | None
    seconds: float


class KernelCompiler:
    """At most `workers` compilations at a time, each in a process of its own. See `allow` to change that.

    `submitted` and `finished` count requests, for whoever shows progress.
    """

    def __init__(self, store: KernelStore, workers: int) -> None:
        self.store = store
        self._limit, self._threads = workers, _threads(workers)
        # No GPU: a compile needs none, and a process with a CUDA context would cost device memory. And no threads of
        # numpy's, which would not survive a fork.
        environment = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
        self._nursery = Nursery("nvgemm_fusion.lowering.compile_worker", environment)
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        self._running: dict[str, Future] = {}
        self._prepared: dict[str, Future] = {}
        self.submitted = 0
        self.finished = 0
        atexit.register(self.close)

    def allow(self, workers: int) -> None:
        """Has at most `workers` compilations run at a time from now on. What was submitted before goes on as it was."""
        with self._lock:
            if workers != self._limit:
                self._threads.shutdown(wait=False)
                self._limit, self._threads = workers, _threads(workers)

    def expect(self, spec: KernelSpec | None = None) -> None:
        """Starts the imports of the compilers, which take seconds, when `spec` is not in the store; without one, when
        nothing is."""
        is_missing = self.store.is_empty() if spec is None else self._find(spec) is None
        if is_missing:
            with contextlib.suppress(OSError):  # which is a reason when something is to be compiled
                self._nursery.start()

    def prepare(self, spec: KernelSpec) -> None:
        """Compiles `spec` for a later `submit`, whose answer then says how long that took."""
        future = self.submit(spec)
        with self._lock:
            self._prepared[spec.key] = future

    def submit(self, spec: KernelSpec) -> Future[CompiledKernel | Refusal]:
        """Compiles `spec`, or finds it in the store. Asking twice at a time compiles once."""
        with self._lock:
            future = self._prepared.pop(spec.key, None) or self._running.get(spec.key)
            if future is None:
                future = self._running[spec.key] = self._threads.submit(self._answer, spec)
                self.submitted += 1
        return future

    def compile(self, specs: Sequence[KernelSpec]) -> list[CompiledKernel | Refusal]:
        """All of `specs`, in order."""
        # Begun in an order of its own in each process, so that several which want the same share the work.
        begun = {spec: self.submit(spec) for spec in random.Random(os.getpid()).sample(specs, len(specs))}
        return [begun[spec].result() for spec in specs]

    def close(self) -> None:
        """Ends the worker processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self._workers:
                worker.kill()
        self._nursery.close()

    def _answer(self, spec: KernelSpec) -> CompiledKernel | Refusal:
        try:
            return self._compile(spec)
        finally:
            with self._lock:  # before the answer is out: who asks again, because the library is gone, gets a new one
                del self._running[spec.key]
                self.finished += 1

    def _compile(self, spec: KernelSpec) -> CompiledKernel | Refusal:
        found = self._find(spec)
        if found is not None:
            return found
        # Of several processes that want it, as in data-parallel training, one compiles it, and the others find it then.
        with self.store.lock(spec.key, TIME_LIMIT_S):
            found = self._find(spec)
            return self._compile_anew(spec) if found is None else found

    def _find(self, spec: KernelSpec) -> CompiledKernel | Refusal | None:
        found = self.store.find(spec)
        if isinstance(found, Refusal):
            return found
        if found is not None or spec.candidate.provider == CUBLASLT:
            return CompiledKernel(spec, found, 0.0)
        return None

    def _compile_anew(self, spec: KernelSpec) -> CompiledKernel | Refusal:
        try:
            target = self.store.temporary()
        except OSError as error:
            return Refusal(Reason.COMPILE_ERROR, f"nowhere to write the kernel: {error}")
        try:
            worker = self._take()
        except OSError as error:
            target.unlink(missing_ok=True)
            return Refusal(Reason.COMPILE_ERROR, f"no process to compile in: {error}")
        try:
            answer = worker.ask({"spec": spec.to_json(), "library": str(target)}, TIME_LIMIT_S)
            if not answer["ok"]:
                refusal = Refusal(Reason.COMPILE_ERROR, answer["error"])
                if answer.get("hung"):  # the next process would wait as long
                    self.store.ban(spec, refusal)
                return refusal
            path = self.store.put(spec, target, {"seconds": answer["seconds"]})
            return CompiledKernel(spec, path, answer["seconds"])
        except OSError as error:
            return Refusal(Reason.COMPILE_ERROR, f"cannot keep the kernel: {error}")
        finally:
            target.unlink(missing_ok=True)
            self._give_back(worker)

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                self._workers.remove(worker)
        worker = self._nursery.worker()  # which may wait for the imports
        with self._lock:
            self._workers.append(worker)
        return worker

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
            else:
                self._workers.remove(worker)


def _threads(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, workers), thread_name_prefix="nvgemm-compile")


_compiler: KernelCompiler | None = None
_compiler_lock = threading.Lock()


def shared_compiler(workers: int | None = None) -> KernelCompiler:
    """The compiler of this process over the default store. `workers` counts from now on; without it, who has said it
    last, or 1."""
    global _compiler
    with _compiler_lock:
        if _compiler is None or _compiler.store.directory != KernelStore().directory:
            _compiler = KernelCompiler(KernelStore(), workers or 1)
        elif workers is not None:
            _compiler.allow(workers)
    return _compiler
