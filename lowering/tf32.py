"""TF32: QuACK's GEMM for Hopper with float32 operands, which the library itself refuses.

It moves their bytes and computes their epilogue as it is; two things are missing. CuTe DSL has no class for the TF32
instruction of a warp group, though its compiler has the instruction; here is one. And QuACK insists on operands of 16
or 8 bits before it looks at anything else; here it is shown the same bytes as 16-bit elements, until it has looked.

The tensor memory accelerator rounds A and B to TF32 (to nearest) while it loads them. The tensor cores alone would
drop the 13 bits that TF32 does not have, which makes every product a little too small.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import cutlass.utils.hopper_helpers
from cutlass import Boolean, Float16, Float32, TFloat32, cute
from cutlass.cute.nvgpu.warpgroup import mma as instructions
from quack.epilogue import frontend
from quack.gemm_sm90 import GemmSm90

INSTRUCTION_K = 8
"""Elements of K that one instruction takes: 32 bytes, as for every dtype."""


def enable() -> None:
    """Has QuACK make its kernels for SM90 of `Tf32Gemm`, which is QuACK's own for all other operands."""
    frontend._SM_BASE[9] = Tf32Gemm


class Tf32Gemm(GemmSm90):
    """QuACK's GEMM for SM90, also for A and B in float32. Both have to be contiguous along K."""

    _operands: tuple[Any, Any] | None = None
    """A and B in float32, once they are known."""

    def rotate_batch_last(self, a: Any, b: Any, *others: Any, **options: Any) -> tuple[Any, ...]:
        """The first thing that QuACK does with the tensors. What it checks afterwards are 16-bit views."""
        a, b, *rest = super().rotate_batch_last(a, b, *others, **options)
        if a.element_type is Float32:
            self._operands = a, b
            self.mma_a_dtype = Float16
            a, b = (cute.recast_tensor(tensor, Float16) for tensor in (a, b))
        return a, b, *rest

    def _setup_attributes(self, *arguments: Any) -> None:
        """What follows the checks: stages, layouts in shared memory and the instruction are those of float32."""
        if self._operands is not None:
            self.mma_a_dtype = self.a_dtype = self.b_dtype = self.a_smem_dtype = self.b_smem_dtype = Float32
            self.a_tma_internal_dtype = self.b_tma_internal_dtype = TFloat32
        super()._setup_attributes(*arguments)

    def _setup_tiled_mma(self) -> None:
        """The instruction, and from it the step along K: 32 elements, 128 bytes, as for every dtype."""
        if self._operands is None:
            super()._setup_tiled_mma()
            return
        with mock.patch.object(cutlass.utils.hopper_helpers, "make_trivial_tiled_mma", _tiled_mma):
            super()._setup_tiled_mma()

    def make_tma_load_atoms_and_tensors(self, a: Any, b: Any, *others: Any, **options: Any) -> tuple[Any, ...]:
        """The loads of A and B: of the tensors themselves."""
        return super().make_tma_load_atoms_and_tensors(*(self._operands or (a, b)), *others, **options)


class _Tf32Op(instructions.MmaOp):
    """wgmma.mma_async.m64nNk8.f32.tf32.tf32: operands of 32 bits in shared memory, both contiguous along K."""

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **_: Any) -> instructions.MmaTraits:
        shape = instructions._pack_shape(self.shape_mnk, loc=loc, ip=ip)
        majors = self.a_major_mode._to_ir(), self.b_major_mode._to_ir()
        dtypes = (dtype.mlir_type for dtype in (self.a_dtype, self.b_dtype, self.acc_dtype))
        atom = instructions._cute_nvgpu_ir.MmaAtomSM90Type.get(
            shape.type.attribute, *majors, *dtypes, self.a_src._to_ir()
        )
        accumulate = Boolean(False).ir_value(loc=loc, ip=ip)
        return instructions.MmaTraits(instructions.make_atom(atom, [accumulate], loc=loc, ip=ip))


def _tiled_mma(
    a_dtype: Any,
    b_dtype: Any,
    a_major: Any,
    b_major: Any,
    accumulator_dtype: Any,
    atoms: tuple[int, int, int],
    tiler_mn: tuple[int, int],
    a_source: Any,
) -> Any:
    """In place of the DSL's function, which knows no TF32: the instruction, and how the warp groups share a tile."""
    shape = (*tiler_mn, INSTRUCTION_K)
    op = _Tf32Op(TFloat32, TFloat32, accumulator_dtype, shape, a_source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), atoms)
