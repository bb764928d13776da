"""KernelCompiler: compiles kernels in parallel processes, through the store.

The workers are processes of `compile_worker`, started when first needed and kept for the life of this process (the
compiler's imports take seconds). A worker that dies, or that does not answer in time, costs its one candidate and
is replaced by a new one with the next request.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..fusion.reasons import Reason, Refusal
from .kernel import KernelSpec
from .store import KernelStore

logger = logging.getLogger("nvgemm_fusion")

TIME_LIMIT_S = 120.0
"""Compiling takes 1 to 4 seconds; the first request of a worker adds the import of the compilers."""


@dataclass(frozen=True)
class CompiledKernel:
    """An object file that can be loaded, and the seconds that compiling it took (0 when it was in the store)."""

    spec: KernelSpec
    path: Path
    seconds: float


class KernelCompiler:
    """At most `workers` compilations at a time, each in a process of its own.

    `submitted` and `finished` count requests, for whoever shows progress.
    """

    def __init__(self, store: KernelStore, workers: int) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="nvgemm-compile")
        self._limit = max(1, workers)
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._running: dict[str, Future] = {}
        self.submitted = 0
        self.finished = 0
        atexit.register(self.close)

    def prepare(self, count: int) -> None:
        """Starts up to `count` workers now, so that they have imported their compilers when they are needed."""
        with self._lock:
            while len(self._workers) < min(count, self._limit):
                self._idle.append(self._start())

    def submit(self, spec: KernelSpec) -> Future[CompiledKernel | Refusal]:
        """Compiles `spec`, or finds it in the store. Asking twice at a time compiles once."""
        with self._lock:
            future = self._running.get(spec.key)
            if future is None:
                future = self._running[spec.key] = self._threads.submit(self._answer, spec)
                self.submitted += 1
        return future

    def compile(self, specs: Sequence[KernelSpec]) -> list[CompiledKernel | Refusal]:
        """All of `specs`, in order."""
        return [future.result() for future in [self.submit(spec) for spec in specs]]

    def close(self) -> None:
        """Ends the worker processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self._workers:
                worker.kill()

    def _answer(self, spec: KernelSpec) -> CompiledKernel | Refusal:
        try:
            return self._compile(spec)
        finally:
            with self._lock:  # before the answer is out: who asks again, because the object is gone, gets a new one
                del self._running[spec.key]
                self.finished += 1

    def _compile(self, spec: KernelSpec) -> CompiledKernel | Refusal:
        found = self.store.find(spec)
        if isinstance(found, Refusal):
            return found
        if found is not None:
            return CompiledKernel(spec, found, 0.0)
        try:
            target = self.store.temporary()
        except OSError as error:
            return Refusal(Reason.COMPILE_ERROR, f"nowhere to write the kernel: {error}")
        worker = self._take()
        try:
            answer = worker.ask({"spec": spec.to_json(), "object": str(target)})
            if not answer["ok"]:
                return Refusal(Reason.COMPILE_ERROR, answer["error"])
            path = self.store.put(spec, target, {"seconds": answer["seconds"]})
            return CompiledKernel(spec, path, answer["seconds"])
        except OSError as error:
            return Refusal(Reason.COMPILE_ERROR, f"cannot keep the kernel: {error}")
        finally:
            target.unlink(missing_ok=True)
            self._give_back(worker)

    def _take(self) -> _Worker:
        with self._lock:
            return self._idle.pop() if self._idle else self._start()

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
            else:
                self._workers.remove(worker)

    def _start(self) -> _Worker:
        worker = _Worker()
        self._workers.append(worker)
        return worker


class _Worker:
    """One process of `compile_worker`, asked one thing at a time."""

    def __init__(self) -> None:
        # No GPU: a compile needs none, and a process with a CUDA context would cost device memory.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nvgemm_fusion.lowering.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict) -> dict:
        """The answer, or a failure in the same form when the process dies or takes too long."""
        timer = threading.Timer(TIME_LIMIT_S, self.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            return json.loads(line) if line else {"ok": False, "error": self._end()}
        except (OSError, ValueError):
            return {"ok": False, "error": self._end()}
        finally:
            timer.cancel()

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):  # what was not written yet cannot be any more
            self._process.stdin.close()

    def _end(self) -> str:
        self.kill()
        return f"the compiler's process ended with status {self._process.wait()} (time limit: {TIME_LIMIT_S:.0f} s)"


_compiler: KernelCompiler | None = None
_compiler_lock = threading.Lock()


def shared_compiler(workers: int) -> KernelCompiler:
    """The compiler of this process over the default store. `workers` counts on the first call."""
    global _compiler
    with _compiler_lock:
        if _compiler is None or _compiler.store.directory != KernelStore().directory:
            _compiler = KernelCompiler(KernelStore(), workers)
    return _compiler
