"""Worker: a process of our own that answers one request at a time, each within a time limit.

Requests and answers are JSON, a line each, over a socket. Both sides of it stand here: what asks (`Worker`), and what
answers in the process (`serve`). A worker is started with an interpreter of its own (`start`), or forked by a
`Nursery`: a process that has imported what all of its workers need, and does nothing else (`serve_forks`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]
Answering = Callable[[Message], Message]

FORK_LIMIT_S = 120.0
"""Importing the compilers takes 4 seconds; the rest is for machines with many more processes than cores."""
NUMBER_BYTES = 8
"""Of the number of a forked process, on its way to who asked for it."""


class Process(Protocol):
    """What a worker knows of its process. wait: the status with which it ended, None where only its parent knows."""

    def kill(self) -> None: ...

    def wait(self) -> int | None: ...


class Worker:
    """The asking side."""

    def __init__(self, connection: socket.socket, process: Process) -> None:
        self._connection, self._process = connection, process
        self._lines = connection.makefile("r", encoding="utf-8")
        self._is_killed = False

    @property
    def alive(self) -> bool:
        """Whether the process was there a moment ago. Not while it is being asked."""
        if self._is_killed:
            return False
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:  # nothing to be read, not even the end
            return True
        except OSError:
            return False

    def ask(self, request: Message, limit_s: float) -> Message:
        """The answer. When the process dies instead, or is killed after `limit_s`: {"ok": False, "error": ...,
        "hung": whether it was the limit}, and the worker is not `alive`."""
        is_late = threading.Event()
        timer = threading.Timer(limit_s, lambda: (is_late.set(), self.kill()))
        timer.start()
        try:
            self._connection.sendall((json.dumps(request) + "\n").encode())
            line = self._lines.readline()
            if line:
                return json.loads(line)
        except (OSError, ValueError):  # it died while we wrote to it, or while it wrote to us
            pass
        finally:
            timer.cancel()
        self.kill()
        if is_late.is_set():
            error = f"did not end within {limit_s:g} s"
        else:
            status = self._process.wait()
            error = "its process ended" + ("" if status is None else f" with status {status}")
        return {"ok": False, "error": error, "hung": is_late.is_set()}

    def kill(self) -> None:
        """Ends the process, without waiting for that: one whose GPU hangs takes its time."""
        self._is_killed = True
        self._process.kill()
        with contextlib.suppress(OSError):  # wakes who waits for an answer, even if the process cannot be killed
            self._connection.shutdown(socket.SHUT_RDWR)


def start(module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Worker:
    """A worker that runs `python -m module *arguments`, where `serve` is called. It sees the environment of this
    process with `environment` on top."""
    return Worker(*_run(module, arguments, environment))


def serve(answer: Answering, connection: socket.socket | None = None) -> None:
    """Answers the requests that come over `connection` until the other side is gone; by default, over what `start` has
    put in the place of standard input."""
    with connection or socket.socket(fileno=0) as socket_, socket_.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            lines.write(json.dumps(answer(json.loads(line))) + "\n")
            lines.flush()


class Nursery:
    """Forks workers from one process that runs `python -m module`, where `serve_forks` is called.

    The process is started with the first worker, if not before, and again where it is gone. Safe to use from several
    threads.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._module, self._environment = module, environment
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process, if there is none, without waiting for its imports. Raises OSError where it cannot."""
        with self._lock:
            self._start()

    def worker(self) -> Worker:
        """A new worker, once the process has its imports. Raises OSError when there is none after FORK_LIMIT_S."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._start()
            try:
                socket.send_fds(self._connection, [b"+"], [theirs.fileno()])
                number = int.from_bytes(self._connection.recv(NUMBER_BYTES), "big")
                if number == 0:  # the end of what it has to say
                    raise OSError("the process that forks workers ended")
            except OSError:
                self._process.kill()
                self._process.wait()  # the next worker is another one's
                raise
        return Worker(ours, _Forked(number))

    def _start(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._connection, self._process = _run(self._module, (), self._environment)
            self._connection.settimeout(FORK_LIMIT_S)

    def close(self) -> None:
        """Ends the process; the workers go on."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._connection.close()


@dataclass(frozen=True)
class _Forked:
    """The process of a forked worker, by its number."""

    number: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL)

    def wait(self) -> None: ...


def serve_forks(answer: Answering) -> None:
    """Forks a worker for each connection that a `Nursery` sends, until that is gone."""
    gc.freeze()  # what nobody looks through, the workers share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    with socket.socket(fileno=0) as nursery:
        while True:
            message, descriptors, *_ = socket.recv_fds(nursery, 1, 1)
            if not message:
                return
            number = os.fork()
            if number == 0:
                try:
                    nursery.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a worker asks how its linker ended
                    serve(answer, socket.socket(fileno=descriptors[0]))
                finally:
                    os._exit(0)
            os.close(descriptors[0])
            nursery.sendall(number.to_bytes(NUMBER_BYTES, "big"))


def _run(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None
) -> tuple[socket.socket, subprocess.Popen]:
    """A process that runs `module`, and our end of the connection that it has in the place of standard input."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Our package comes with its entry point to every process that imports torch; a worker has no use for it.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **(environment or {})},
        )
    return ours, process
