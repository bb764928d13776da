"""Skinny: a GEMM for products of at most 8 rows, as in decoding, which read all of B and do next to nothing with it.

A kernel of tiles leaves much of a GPU idle there: 4096 columns in tiles of 64 are 64 blocks for 132 multiprocessors.
Here a block computes 16 or 32 columns, its warps share K between them, and each thread loads 16 bytes at a time from B,
many of them at once, right into the registers that the tensor core reads. Nothing passes through shared memory but the
partial sums of the warps.

What makes that possible is that a sum over K may be taken in any order. The instruction (mma.m16n8k16) wants elements
of K from each thread that do not lie side by side; a thread takes eight that do, of A and of B alike. The product is
computed transposed: the columns of B are the rows of the instruction, and the rows of A its 8 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyG2ROp, L2PrefetchSize, warp

from ..fusion.program import OperandKind

ROWS, COLUMNS, DEPTH = 16, 8, 16
"""What the instruction computes: 16 columns of B by 8 rows of A, over 16 elements of K."""
VECTOR = 8
"""Elements of A or B that a thread loads at a time: 16 bytes."""
LANES, QUAD = 32, 4
"""Threads of a warp; those of them that read the same column of B."""
IN_FLIGHT = 16
"""Vectors of B that a thread asks for at once."""
PADDING = 4
"""Elements between the rows of partial sums, so that the threads of a warp write to different banks."""


class SkinnyGemm:
    """D (M, N) = epilogue(A (M, K) @ B (K, N)): M at most 8, K a multiple of 8, A row- and B column-major, of 16 bits.

    columns: of B a block, 16 or a multiple of it. split_k: in how many parts a block takes K, a warp each. epilogue:
    from the accumulator and the operands of one element, by name, to what is stored of it, by name. operands: the kind
    of each by its name, and stores: the names, in the order of the arguments.
    """

    def __init__(
        self,
        columns: int,
        split_k: int,
        epilogue: Callable[..., dict[str, Any]],
        operands: Mapping[str, OperandKind],
        stores: Sequence[str],
    ) -> None:
        self.columns, self.split_k, self.threads = columns, split_k, LANES * split_k
        self.epilogue, self.operands, self.stores = epilogue, dict(operands), tuple(stores)
        self.instructions = columns // ROWS
        self.lines = 2 * self.instructions  # columns of B that a thread reads
        self.steps = IN_FLIGHT // self.lines  # vectors of each that it asks for at once

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, rest: tuple, stream: Any) -> None:
        """Launches. a: (M, K). b: (K, N). rest: the operands, then the outputs (M, N) as tensors. Of the operands a
        tile (M, N), a row (N) and a column (M) are tensors, a scalar is a pointer, and a number itself."""
        blocks = cute.ceil_div(b.shape[1], self.columns)
        self.kernel(a, b, rest).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, rest: tuple) -> None:
        """One block."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        part, lane = thread // LANES, thread % LANES
        group, quad = lane // QUAD, lane % QUAD
        first = block * self.columns
        last_row, last_column = a.shape[0] - 1, b.shape[1] - 1
        cute.arch.griddepcontrol_wait()

        # What lies beyond the product is read as its last row or column; what comes of that is not stored.
        elements = []
        for number in cutlass.range_constexpr(0, COLUMNS * self.columns, self.threads):
            row, column = (number + thread) // self.columns, first + (number + thread) % self.columns
            known = self.known(rest, cutlass.min(row, last_row), cutlass.min(column, last_column))
            elements.append((row, column, known))  # asked for now, used at the end

        lines_of_b = [
            _vectors(b[None, cutlass.min(first + ROWS // 2 * line + group, last_column)])
            for line in range(self.lines)
        ]
        line_of_a = _vectors(a[cutlass.min(group, last_row), None])
        sums = cute.make_rmem_tensor((QUAD, self.instructions, 1), Float32)
        sums.fill(0.0)
        slab = QUAD * self.steps
        vectors = a.shape[1] // VECTOR
        whole = vectors // slab
        for number in cutlass.range(part, whole, self.split_k):
            self.accumulate(sums, line_of_a, lines_of_b, number * slab + quad, vectors, False)
        if vectors % slab != 0 and whole % self.split_k == part:
            self.accumulate(sums, line_of_a, lines_of_b, whole * slab + quad, vectors, True)
        # Not earlier: the blocks of the kernel that follows would wait in the place of our own. (At the start, the five
        # products of a decoder layer of Llama 3.1 8B take 130 us in a row on an H200 instead of 115.)
        cute.arch.griddepcontrol_launch_dependents()

        pitch = self.columns + PADDING
        partial = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((COLUMNS, self.columns, self.split_k), stride=(pitch, 1, pitch * COLUMNS)), 16
        )
        for number in cutlass.range_constexpr(self.instructions):
            for value in cutlass.range_constexpr(QUAD):
                column = ROWS * number + ROWS // 2 * (value // 2) + group
                partial[2 * quad + value % 2, column, part] = sums[value, number, 0]
        cute.arch.sync_threads()
        for row, column, known in elements:
            if row <= last_row and column <= last_column:
                total = Float32(0.0)
                for each in cutlass.range_constexpr(self.split_k):
                    total += partial[row, column - first, each]
                results = self.epilogue(total, **known)
                for name, output in zip(self.stores, rest[len(self.operands) :]):
                    output[row, column] = output.element_type(results[name])

    def known(self, rest: Sequence[Any], row: Int32, column: Int32) -> dict[str, Any]:
        """The operands of one element, by name, as the epilogue takes them."""
        read = {
            OperandKind.TILE: lambda operand: Float32(operand[row, column]),
            OperandKind.ROW: lambda operand: Float32(operand[column]),
            OperandKind.COLUMN: lambda operand: Float32(operand[row]),
            OperandKind.SCALAR: lambda operand: operand.load(),
            OperandKind.NUMBER: lambda operand: operand,
        }
        return {name: read[kind](operand) for (name, kind), operand in zip(self.operands.items(), rest)}

    @cute.jit
    def accumulate(
        self,
        sums: cute.Tensor,
        line_of_a: cute.Tensor,
        lines_of_b: list,
        start: Int32,
        vectors: Int32,
        is_last: cutlass.Constexpr[bool],
    ) -> None:
        """Adds what a slab of K gives: `steps` vectors a thread of each line, from vector `start` on. is_last: some of
        them lie behind the end of K, at `vectors`."""
        dtype = line_of_a.element_type
        bits = VECTOR * dtype.width
        load_a = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, invariant=True)
        # A warp reads 64 bytes of a line at a time. The other half comes next, and is in the cache by then.
        prefetch = L2PrefetchSize.SIZE_128B
        load_b = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=bits, l2_prefetch_size=prefetch)
        of_a = cute.make_rmem_tensor((VECTOR, self.steps), dtype)
        of_b = cute.make_rmem_tensor((VECTOR, self.lines, self.steps), dtype)
        if cutlass.const_expr(is_last):
            of_a.fill(0.0)
            of_b.fill(0.0)
        for step in cutlass.range_constexpr(self.steps):
            vector = start + QUAD * step
            if not cutlass.const_expr(is_last) or vector < vectors:
                for line in cutlass.range_constexpr(self.lines):
                    cute.copy(load_b, lines_of_b[line][None, vector], of_b[None, line, step])
                cute.copy(load_a, line_of_a[None, vector], of_a[None, step])
        # As the instruction takes them: two neighbours in K, of both lines of a thread, and the two after them. The
        # other half of a vector is for the next instruction.
        halves = 2, self.steps
        rows = cute.make_layout(
            ((2, 2, 2), self.instructions, halves), stride=((1, VECTOR, 2), 2 * VECTOR, (4, VECTOR * self.lines))
        )
        columns = cute.make_layout(((2, 2), 1, halves), stride=((1, 2), 0, (4, VECTOR)))
        instruction = cute.make_mma_atom(warp.MmaF16BF16Op(dtype, Float32, (ROWS, COLUMNS, DEPTH)))
        seen_b, seen_a = cute.make_tensor(of_b.iterator, rows), cute.make_tensor(of_a.iterator, columns)
        cute.gemm(instruction, sums, seen_b, seen_a, sums)


def _vectors(line: cute.Tensor) -> cute.Tensor:
    """A line that is contiguous as (8, length / 8)."""
    return cute.zipped_divide(line, (VECTOR,))
