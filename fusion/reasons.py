"""Why something was not fused, not measured or not chosen: one enum, and the sentence a person reads.

A question such as "can this go into an epilogue?" is answered with the thing asked for or with a `Refusal`, never
with an exception: refusing is a result like any other, and ends up in the log.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(str, enum.Enum):
    """The value is the word in the log; `sentence` says it to a person."""

    sentence: str

    def __new__(cls, word: str, sentence: str) -> Reason:
        member = str.__new__(cls, word)
        member._value_ = word
        member.sentence = sentence
        return member

    # about the GEMM
    NO_CANDIDATE = "no candidate", "no kernel configuration of any provider can run this problem"
    TARGET = "target", "no provider has kernels for this GPU"
    VERSION = "version", "measured with other versions of torch or of the kernels' packages"
    DTYPE = "dtype", "a dtype that the kernels do not take"
    DEVICE = "device", "an operand is not on the GPU"
    LAYOUT = "layout", "a tensor is neither row- nor column-major"
    ALIGNMENT = "alignment", "a tensor does not start, or does not repeat, at a multiple of 16 bytes"
    TOO_LARGE = "too large", "a tensor has more elements than the kernels' 32-bit indices reach"
    SYMBOLIC_SHAPE = "symbolic shape", "a size is not known when the graph is compiled"
    EMPTY = "empty", "a size is zero"
    PLACED = "placed", "the program runs this on a stream, or keeps it in a memory pool, that it names itself"

    # about the nodes after it
    NO_READER = "no reader", "nothing pointwise reads the product"
    READER_FUSES = "reader fuses", "Inductor computes the result in the kernel that reads it: nothing would be saved"
    NOT_POINTWISE = "not pointwise", "a reader is a reduction, a template or an external kernel"
    UNSUPPORTED_OP = "unsupported op", "an operation that the epilogue language does not have"
    INDEX_PATTERN = "index pattern", "a reader walks over another space than the product's rows and columns"
    ATOMIC = "atomic", "a reader adds atomically"
    MUTATION = "mutation", "a reader changes or aliases one of its inputs"
    NOT_CONVEX = "not convex", "a path leaves the region and comes back"
    ROUNDS_MORE = "rounds more", "an operand that Inductor's kernel computes itself would be rounded to memory"
    TAKEN = "taken", "the reader already belongs to the epilogue of another GEMM"

    # about an alternative
    COMPILE_ERROR = "compile error", "the kernel did not compile"
    RUN_ERROR = "run error", "the kernel did not run"
    WRONG_RESULT = "wrong result", "the kernel's result differs from the reference"
    SLOWER = "slower", "another alternative is faster"
    NOT_SEPARATED = "not separated", "faster than stock by less than the spread, so stock stays"
    NOT_MEASURED = "not measured", "the stopwatch cannot run this alternative by itself"


def described(error: Exception, limit: int = 500) -> str:
    """An exception as the detail of a refusal: its type and message, cut at `limit` characters."""
    return f"{type(error).__name__}: {error}"[:limit]


@dataclass(frozen=True)
class Refusal:
    """`reason`, and what exactly (a name, an op, a dtype) in `detail`. False, so that `if not found:` reads well."""

    reason: Reason
    detail: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.explanation}"

    @property
    def explanation(self) -> str:
        """What exactly, or in general where nobody said."""
        return self.detail or self.reason.sentence
