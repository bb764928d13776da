"""The op vocabulary of epilogue programs: one row an op, and the only place where an op is declared.

A row holds the name, the arity, the rule for the result's dtype and the torch reference. Capture maps the names
of Inductor's ops to rows, emitters map rows to kernel source; a test fails when a row has no reference or no
emission. The NaN rules are Inductor's: `maximum`, `minimum` and `relu` let a NaN through.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

CONSTANT = "constant"
TO_DTYPE = "to_dtype"


def _first(*dtypes: torch.dtype) -> torch.dtype:
    return dtypes[0]


def _second(*dtypes: torch.dtype) -> torch.dtype:
    return dtypes[1]


def _boolean(*dtypes: torch.dtype) -> torch.dtype:
    return torch.bool


@dataclass(frozen=True)
class Op:
    """One op: how many values it takes, what it yields, and how torch computes it.

    `result` maps the dtypes of the inputs to the dtype of the result. `reference` takes tensors (broadcastable
    against each other) and must work in float32 and in float64.
    """

    name: str
    arity: int
    result: Callable[..., torch.dtype]
    reference: Callable[..., torch.Tensor]


_ROWS = [
    # arithmetic
    Op("add", 2, _first, operator.add),
    Op("sub", 2, _first, operator.sub),
    Op("mul", 2, _first, operator.mul),
    Op("div", 2, _first, torch.true_divide),
    Op("neg", 1, _first, operator.neg),
    Op("abs", 1, _first, torch.abs),
    Op("maximum", 2, _first, torch.maximum),
    Op("minimum", 2, _first, torch.minimum),
    Op("relu", 1, _first, torch.relu),
    # transcendental
    Op("sigmoid", 1, _first, torch.sigmoid),
    Op("tanh", 1, _first, torch.tanh),
    Op("exp", 1, _first, torch.exp),
    Op("erf", 1, _first, torch.erf),
    Op("sqrt", 1, _first, torch.sqrt),
    Op("rsqrt", 1, _first, torch.rsqrt),
    # comparison and selection
    Op("lt", 2, _boolean, operator.lt),
    Op("le", 2, _boolean, operator.le),
    Op("gt", 2, _boolean, operator.gt),
    Op("ge", 2, _boolean, operator.ge),
    Op("eq", 2, _boolean, operator.eq),
    Op("ne", 2, _boolean, operator.ne),
    Op("where", 3, _second, torch.where),
]

OPS: dict[str, Op] = {row.name: row for row in _ROWS}
"""Every op that takes values and yields one. A constant and a conversion (`CONSTANT`, `TO_DTYPE`) carry data of
their own, so they stand in `program.Instruction` rather than in this table."""
