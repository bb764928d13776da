"""Worker: a process of our own that answers one request at a time, each within a time limit.

Requests and answers are JSON, a line each, on its standard input and output. The two sides of the pipe stand here: what
asks (`Worker`), and what answers in the process (`serve`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class Worker:
    """A process that runs `python -m module *arguments`, where `serve` is called. It sees the environment of this
    process with `environment` on top."""

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._is_killed = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Our package comes with its entry point to every process that imports torch; a worker has no use for it.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **(environment or {})},
        )

    @property
    def alive(self) -> bool:
        return not self._is_killed and self._process.poll() is None

    def ask(self, request: Message, limit_s: float) -> Message:
        """The answer. When the process dies instead, or is killed after `limit_s`: {"ok": False, "error": ...,
        "hung": whether it was the limit}, and the worker is not `alive`."""
        is_late = threading.Event()
        timer = threading.Timer(limit_s, lambda: (is_late.set(), self.kill()))
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
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
            error = f"its process ended with status {self._process.wait()}"
        return {"ok": False, "error": error, "hung": is_late.is_set()}

    def kill(self) -> None:
        """Ends the process, without waiting for that: one whose GPU hangs takes its time."""
        self._is_killed = True
        self._process.kill()
        with contextlib.suppress(OSError):  # what was not written yet cannot be any more
            self._process.stdin.close()


def serve(answer: Callable[[Message], Message]) -> None:
    """Answers requests until standard input ends. What anything prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)
