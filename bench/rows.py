"""Rows: the results of a benchmark on file, one row a line, since the file is read by people, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, about: dict[str, Any], name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes `about` and, under `name`, the rows to a JSON file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{{"about": {json.dumps(about)},\n"{name}": [\n{lines}\n]}}\n', encoding="utf-8")
