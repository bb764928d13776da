"""The page of operations, `docs/operations.md`, written from the tables of ops, sources and operands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..fusion.ops import BOOL, FLOAT, INTEGER, INTEGER_DTYPES, OPS
from ..fusion.program import dtype_name
from ..lowering.emit import CARRIERS
from ..lowering.expressions import ERRORS
from ..lowering.spaces import SPACES
from ..scheduler_hooks.capture import INDUCTOR_NAMES, OTHER_REASONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operations.md"
RESULTS = ROOT / "bench" / "results" / "h200-operations.json"

KINDS = {FLOAT: "float32", INTEGER: "integers", BOOL: "bool"}

_HEAD = """\
# Operations

What an epilogue can compute. `python -m nvgemm_fusion.bench.operations --page` writes this page from the tables in
`fusion/ops.py` and `lowering/expressions.py`; `python -m nvgemm_fusion.bench.operations` measures, on a GPU.

## Values

float16, bfloat16 and float8 are computed in float32, as in Inductor's Triton kernels. Integers (up to 32 bits:
{integers}) are computed in their own dtype and wrap around in it.

## Operands

An operand is a tile (M, N), a row (N), a column (M) or a scalar, of a dtype of its own; or a float on the CPU, which is
passed with each launch:

| operand | loaded as |
| --- | --- |
{operands}

## Operations by name

The largest error is the distance from the correctly rounded result, in units of its last place (ulp), as documented for
the instructions that are used; it holds where the result is a normal number. The measured one is the distance from the
exact result, so half an ulp of it is the rounding itself{with_what}.
Special values come out as Inductor's own kernels give them{as_eager}.

QuACK's kernels run every one of them ({architectures}); the kernels of the CUTLASS Operator API have no
epilogue on Hopper. A name in brackets is Inductor's.

| operation | values | largest error, ulp | documented in | measured on an H200, ulp |
| --- | --- | --- | --- | --- |
"""

_TAIL = """
What Inductor makes of these goes in, too: clamp, powers with a fixed exponent, torch's activations, addcmul, lerp,
logaddexp, `masked_fill`, conversions to and from integers and float8, and so on.

## What is refused

| operation | reason |
| --- | --- |
{refused}

A refused operation stays in a kernel of Inductor's, and the reason is in the log.
"""

_REFUSED = {
    "random numbers (`load_seed`, `rand`, `randn`, `randint64`) inside the reader": "unsupported op",
    "`lgamma`, `erfinv`, `hypot`, `nextafter`, `ldexp`, `frexp`, Bessel functions, polynomials": "unsupported op",
    "the bits of a value as another dtype (`to_dtype_bitcast`), inline assembly": "unsupported op",
    "scans and sorts": "not pointwise",
    "scatter and atomic additions": "mutation, atomic",
    "int64 and float64, as an operand, a conversion or a result": "dtype",
    "an int16 operand or result": "dtype",
}


def page() -> str:
    """The page as it should be."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None
    with_what = f" (torch {results['torch']}, {results['gpu']})" if results else ""
    records = results["ops"].items() if results else ()
    eager = [f"`{name}`" for name, of in records if any(record["as_eager"] for record in of.values())]
    as_eager = f", or as eager torch does where that is something else (here: {', '.join(eager)})" if eager else ""
    about_places = ", ".join(f"`{name}`" for name in OTHER_REASONS)
    refused = {f"where something is read, unless it is a broadcast ({about_places})": "index pattern", **_REFUSED}
    return (
        _HEAD.format(
            integers=", ".join(map(dtype_name, INTEGER_DTYPES)),
            operands="\n".join(f"| {dtype_name(a)} | {_loaded(a, b)} |" for a, b in CARRIERS.items()),
            architectures=", ".join(SPACES),
            with_what=with_what,
            as_eager=as_eager,
        )
        + "\n".join(_rows(results["ops"] if results else {}))
        + "\n"
        + _TAIL.format(refused="\n".join(f"| {what} | {reason} |" for what, reason in refused.items()))
    )


def _rows(measured: dict[str, Any]) -> Iterator[str]:
    inductor = {name: other for other, name in INDUCTOR_NAMES.items()}
    for name, op in OPS.items():
        title = f"{name} ({inductor[name]})" if name in inductor else name
        values = ", ".join(KINDS[kind] for kind in op.takes)
        error = ERRORS[name]
        bound = f"{error.ulp:g}" + (f" + {error.grows:g} abs(x)" if error.grows else "")
        yield f"| {title} | {values} | {bound} | {error.source} | {_measured(measured.get(name))} |"


def _measured(records: dict[str, Any] | None) -> str:
    if records is None:
        return "not measured yet"
    wrong = ", ".join(dtype for dtype, record in records.items() if record["beyond"] or record["mismatches"])
    return f"{max(record['ulp'] for record in records.values()):.2f}" + (f" (wrong: {wrong})" if wrong else "")


def _loaded(dtype: object, carrier: object) -> str:
    if dtype == carrier:
        return "itself"
    return f"the bits of {dtype_name(carrier)}; a scalar as itself" if dtype.itemsize == 4 else dtype_name(carrier)
