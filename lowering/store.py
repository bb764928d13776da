"""KernelStore: compiled kernels on disk, shared by any number of processes.

A kernel is two files, `<key>.o` and `<key>.json`. The second is written last and holds the SHA-256 of the first: an
object without it, or with another content, is not there. Both are written under a temporary name and renamed. An
entry that does not hold is dropped with a warning and compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import platformdirs

from ..fusion.reasons import Reason, Refusal
from .kernel import KernelSpec

logger = logging.getLogger("nvgemm_fusion")

DIRECTORY_VARIABLE = "NVGEMM_FUSION_CACHE_DIR"


def default_directory() -> Path:
    """`$NVGEMM_FUSION_CACHE_DIR`, else the user's cache folder.

    `$TORCHINDUCTOR_CACHE_DIR` does not count: Inductor sets it by itself, to a temporary folder, once it runs.
    """
    return Path(os.environ.get(DIRECTORY_VARIABLE) or platformdirs.user_cache_dir("nvgemm_fusion"))


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

    def find(self, spec: KernelSpec) -> Path | Refusal | None:
        """The object file of `spec`, if it is there and whole; or why it must not be used (see `ban`)."""
        path, description = self._paths(spec.key)
        if not description.exists():
            return None
        try:
            content = json.loads(description.read_text(encoding="utf-8"))
            if "banned" in content:
                return Refusal(Reason(content["banned"]), str(content["detail"]))
            expected = content["sha256"]
            if hashlib.sha256(path.read_bytes()).hexdigest() == expected:
                return path
            problem = "its object file has another content"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error) or type(error).__name__
        logger.warning("ignored the cached kernel %s: %s; it is compiled again", path, problem)
        self.drop(spec)
        return None

    def temporary(self) -> Path:
        """A new empty file in the folder of the store, for `put`. Raises OSError when it cannot be made."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(suffix=".o.tmp", dir=self.directory)
        os.close(descriptor)
        return Path(name)

    def put(self, spec: KernelSpec, compiled: Path, facts: dict[str, Any]) -> Path:
        """Moves `compiled` (from `temporary`) in as the object of `spec`, with `facts` beside it for people.

        Raises OSError when the disk refuses.
        """
        path, description = self._paths(spec.key)
        content = {"sha256": hashlib.sha256(compiled.read_bytes()).hexdigest(), "spec": spec.to_json(), **facts}
        os.replace(compiled, path)
        write_atomically(description, json.dumps(content).encode())
        return path

    def ban(self, spec: KernelSpec, why: Refusal) -> None:
        """Keeps `spec` from being used or compiled again, until the store is cleared. A full disk is no error."""
        path, description = self._paths(spec.key)
        content = {"banned": why.reason.value, "detail": why.detail, "spec": spec.to_json()}
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(description, json.dumps(content).encode())
            path.unlink(missing_ok=True)

    def drop(self, spec: KernelSpec) -> None:
        """Forgets `spec`. An entry that is not there, or cannot be removed, is no error."""
        for path in reversed(self._paths(spec.key)):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                pass

    def size(self) -> tuple[int, int]:
        """How many kernels there are, and their bytes. Raises OSError when the disk refuses."""
        sizes = [path.stat().st_size for path in self.directory.glob("*.o")]
        return len(sizes), sum(sizes)

    def clear(self) -> int:
        """Removes all kernels; returns how many there were. Raises OSError when the disk refuses."""
        objects = list(self.directory.glob("*.o"))
        for path in (*self.directory.glob("*.json"), *objects):  # without its description, an object is not there
            path.unlink(missing_ok=True)
        return len(objects)

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.directory / f"{key}.o", self.directory / f"{key}.json"
