"""KernelStore: compiled kernels on disk, shared by any number of processes.

A kernel is two files, `<key>.so` and `<key>.json`. The second is written last and holds the SHA-256 of the first: a
library without it, or with another content, is not there. Both are written under a temporary name and renamed. An
entry that does not hold is dropped with a warning and compiled again.

The libraries together stay below a limit (`size_limit`): those that were not used for longest are removed, whoever made
them. When a library was last used is the time of its last modification, which `find` sets. A ban is a file of its own,
`<key>.banned.json`, that nothing but `clear` removes and no `put` replaces: were it a matter of the description, it
would be lost when another process removes the kernel, or compiles it, just then.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from ..fusion.reasons import Reason, Refusal
from .kernel import KernelSpec

logger = logging.getLogger("nvgemm_fusion")

DIRECTORY_VARIABLE = "NVGEMM_FUSION_CACHE_DIR"
LIMIT_VARIABLE = "NVGEMM_FUSION_CACHE_MB"

DEFAULT_LIMIT_MB = 2048
"""Some 40,000 kernels."""

FREE_PART = 10
"""When room is made, one part in so many of the limit is free afterwards."""

SCAN_PART = 20
"""A process looks at the folder again when it has put one part in so many of the limit."""

STALE_AFTER_S = 3600.0
"""The age at which a temporary file, or a lock, is nobody's: compiling ends after `compiler.TIME_LIMIT_S`."""


def default_directory() -> Path:
    """`$NVGEMM_FUSION_CACHE_DIR`, else the user's cache folder.

    `$TORCHINDUCTOR_CACHE_DIR` does not count: Inductor sets it by itself, to a temporary folder, once it runs.
    """
    return Path(os.environ.get(DIRECTORY_VARIABLE) or platformdirs.user_cache_dir("nvgemm_fusion"))


def size_limit() -> int | None:
    """How many bytes of kernels are kept, as `$NVGEMM_FUSION_CACHE_MB` says; None where it is 0 or less: any number."""
    megabytes = _megabytes(os.environ.get(LIMIT_VARIABLE, ""))
    return megabytes * 1_000_000 if megabytes > 0 else None


@functools.lru_cache(maxsize=None)  # a wrong value is warned of once, and not with each kernel
def _megabytes(value: str) -> int:
    try:
        return int(value or DEFAULT_LIMIT_MB)
    except ValueError:
        logger.warning("%s has to be a whole number, not %r: it stays %d", LIMIT_VARIABLE, value, DEFAULT_LIMIT_MB)
        return DEFAULT_LIMIT_MB


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that others read: whole, or not at all. Raises OSError when the disk refuses."""
    # Not of `tempfile`: what that makes, nobody else can read, and this may be a file that people pass on.
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with staged.open("xb") as file:
            file.write(content)
        os.replace(staged, path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


class KernelStore:
    """The kernels under one folder. Cheap to construct; touches the disk only when asked for something."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or default_directory()) / "kernels"
        self._unscanned = math.inf  # bytes put here since this object last looked at the folder, which it never has

    def find(self, spec: KernelSpec) -> Path | Refusal | None:
        """The library of `spec`, if it is there and whole; or why it must not be used (see `ban`).

        Another process may remove the file at any time. Whoever loads it has to ask again when it is gone.
        """
        path, description, ban = self._paths(spec.key)
        is_banned = ban.exists()
        if not is_banned and not description.exists():
            return None
        try:
            content = json.loads((ban if is_banned else description).read_text(encoding="utf-8"))
            # In a description, too: that is where bans stood before they had a file of their own.
            if "banned" in content:
                return _ban_in(content)
            expected = content["sha256"]
            if hashlib.sha256(path.read_bytes()).hexdigest() == expected:
                with contextlib.suppress(OSError):  # on a disk that takes no writes, nothing is removed, either
                    os.utime(path)
                return path
            problem = "its library has another content"
        except FileNotFoundError:  # removed since we looked
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error) or type(error).__name__
        if is_banned:  # for whatever reason
            return Refusal(Reason.WRONG_RESULT, f"{ban} cannot be read: {problem}")
        logger.warning("ignored the cached kernel %s: %s; it is compiled again", path, problem)
        _remove(path)
        return None

    @contextlib.contextmanager
    def lock(self, name: str, limit_s: float) -> Iterator[None]:
        """Held by one process at a time for each `name`. A courtesy and no guarantee: where the disk has no locks, or
        the other holds it for longer than `limit_s`, this goes on without."""
        path = self.directory / f"{name}.lock"
        lock = filelock.FileLock(path, timeout=limit_s)
        with contextlib.suppress(OSError, NotImplementedError):  # its Timeout is an OSError, too
            self.directory.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            yield
        finally:
            if lock.is_locked:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                lock.release()

    def temporary(self) -> Path:
        """A new empty file in the folder of the store, for `put`. Raises OSError when it cannot be made."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(suffix=".so.tmp", dir=self.directory)
        os.close(descriptor)
        return Path(name)

    def put(self, spec: KernelSpec, compiled: Path, facts: dict[str, Any]) -> Path:
        """Moves `compiled` (from `temporary`) in as the library of `spec`, with `facts` beside it for people. Others
        are removed when the limit asks for it.

        Raises OSError when the disk refuses.
        """
        path, description, _ = self._paths(spec.key)
        machine_code = compiled.read_bytes()
        content = {"sha256": hashlib.sha256(machine_code).hexdigest(), "spec": spec.to_json(), **facts}
        os.replace(compiled, path)
        write_atomically(description, json.dumps(content).encode())
        self._unscanned += len(machine_code)
        with contextlib.suppress(OSError):  # the kernel is kept, even if nothing can be removed for it
            self._make_room(path)
        return path

    def ban(self, spec: KernelSpec, why: Refusal) -> None:
        """Keeps `spec` from being used or compiled again, until the store is cleared. A full disk is no error."""
        path, _, ban = self._paths(spec.key)
        content = {"banned": why.reason.value, "detail": why.detail, "spec": spec.to_json()}
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(ban, json.dumps(content).encode())
            _remove(path)

    def bans(self) -> list[tuple[KernelSpec, Refusal]]:
        """What must not be used, and why. A ban that cannot be read is left out here, and holds all the same."""
        found = []
        for path in sorted(self.directory.glob("*.banned.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                content = json.loads(path.read_text(encoding="utf-8"))
                found.append((KernelSpec.from_json(content["spec"]), _ban_in(content)))
        return found

    def is_empty(self) -> bool:
        """Whether no kernel is here, or none that can be seen."""
        with contextlib.suppress(OSError):
            return next(self.directory.glob("*.so"), None) is None
        return True

    def size(self) -> tuple[int, int]:
        """How many kernels there are, and their bytes. Raises OSError when the disk refuses."""
        libraries = self._libraries()
        return len(libraries), sum(size for _, size, _ in libraries)

    def clear(self) -> int:
        """Removes all kernels and bans; returns how many there were. Raises OSError when the disk refuses."""
        libraries = list(self.directory.glob("*.so"))
        # Descriptions first: without its own, a library is not there.
        for path in (*self.directory.glob("*.json"), *self.directory.glob("*.lock"), *libraries):
            path.unlink(missing_ok=True)
        return len(libraries)

    def _make_room(self, newest: Path) -> None:
        """Removes the libraries that were not used for longest, if there are too many, and what killed processes left.

        `newest` stays, however small the limit is. A scan reads the whole folder. So it comes with the first put of a
        process (there may be no second one), and then only after a fixed share of the limit: the larger the folder may
        get, the more is put between two scans. Processes do not count what others put, so each may carry the folder
        beyond the limit by that share, until its next scan.
        """
        limit = size_limit()
        if self._unscanned < (math.inf if limit is None else limit // SCAN_PART):
            return
        self._unscanned = 0
        for path in (*self.directory.glob("*.tmp"), *self.directory.glob("*.lock")):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - STALE_AFTER_S:
                    path.unlink()
        libraries = self._libraries()
        total = sum(size for _, size, _ in libraries)
        if limit is None or total <= limit:
            return
        for _, size, path in sorted(libraries):
            if total <= limit - limit // FREE_PART:
                break
            # One that another process has removed meanwhile was counted, too.
            if path != newest and _remove(path):
                total -= size

    def _libraries(self) -> list[tuple[int, int, Path]]:
        """When each library was last used (in nanoseconds), its bytes and its path."""
        libraries = []
        for path in self.directory.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = path.stat()
                libraries.append((status.st_mtime_ns, status.st_size, path))
        return libraries

    def _paths(self, key: str) -> tuple[Path, Path, Path]:
        """A library, its description, and its ban."""
        return self.directory / f"{key}.so", self.directory / f"{key}.json", self.directory / f"{key}.banned.json"


def _ban_in(content: dict[str, Any]) -> Refusal:
    return Refusal(Reason(content["banned"]), str(content["detail"]))


def _remove(path: Path) -> bool:
    """Removes a library with its description, or says that it cannot be removed. One that is not there is no error."""
    try:
        path.with_suffix(".json").unlink(missing_ok=True)  # first, since a library without it is not there
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
