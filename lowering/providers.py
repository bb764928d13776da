"""Providers: where kernels come from, and how a spec becomes a library.

    quack       `quack.epilogue.frontend.gemm_epilogue`: GEMMs with an epilogue function, for every space of `spaces`
                (on SM90 with float32 operands, too: `tf32`)
    operators   `cutlass.operators` (the CUTLASS Operator API): NVIDIA's plain GEMMs for SM90; no epilogue
    skinny      our own, for at most 8 rows (`skinny`)

Both compile to an object file, which becomes a library of one function in the TVM-FFI calling convention. It takes
torch tensors of any size (of the class compiled for), checks them, and launches on the current stream:

    quack       function(A, B, D, None, (*operands, *further stores, None, None), scheduler, None, None, None)
    operators   function(A, B, D)
    skinny      function(A, B, (*operands, *stores))

with A (M, K), B (K, N), D (M, N); A and B change places in a kernel with swapped operands. See `launcher` for the
scheduler's tuple.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import linecache
import os
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..fusion.problem import ALIGNMENT_BYTES
from ..fusion.program import Major, OperandKind
from .emit import CARRIERS, DSL_TYPES, FUNCTION_NAME, carrier, emit, operand_name, store_name
from .kernel import KernelSpec
from .library import EXPORTED_NAME, link
from .shared_memory import LEAST_STAGES
from .spaces import SPACES

QUACK = "quack"
OPERATORS = "operators"
SKINNY = "skinny"

FAKE_SIZE = 512
"""Any multiple of every tile serves: sizes are not compiled in."""


def import_compilers() -> None:
    """Imports all that compiling takes, which is seconds of it."""
    os.environ["QUACK_CACHE_ENABLED"] = "0"  # ours is keyed by program and versions, and one copy is enough
    for name in ("cutlass.operators", "quack.epilogue.frontend", "quack.gemm_runtime.host"):
        importlib.import_module(name)


def compile_kernel(spec: KernelSpec, path: str) -> None:
    """Compiles `spec` and writes the library `path`. Raises whatever the compiler raises."""
    import_compilers()
    _set_architecture(spec.arch)
    compiling = {QUACK: _compile_quack, OPERATORS: _compile_operators, SKINNY: _compile_skinny}
    compiled = compiling[spec.candidate.provider](spec)
    import cutlass.cute.runtime

    with tempfile.TemporaryDirectory(prefix="nvgemm_fusion_") as folder:
        compiled.export_to_c(object_file_path=f"{folder}/kernel.o", function_name=EXPORTED_NAME)
        link(f"{folder}/kernel.o", path, cutlass.cute.runtime.find_runtime_libraries(enable_tvm_ffi=True))


def _set_architecture(arch: str) -> None:
    """Has the compilers compile for `arch`. They read the environment once, and a process may compile for several."""
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["QUACK_ARCH"] = arch.removeprefix("sm_").rstrip("af")
    from cutlass.cutlass_dsl import CuTeDSL
    from quack import cute_dsl_utils

    dsl = CuTeDSL._get_dsl()
    dsl.envar.arch = arch
    # A kernel that can run here would be loaded as well, which takes a tenth of the time; ours is exported.
    dsl._runtime_can_run_compiled = lambda *_: False
    cute_dsl_utils._get_device_capacity_cached.cache_clear()
    cute_dsl_utils.get_compile_target_capacity.cache_clear()


def _compile_quack(spec: KernelSpec) -> Any:
    import quack.gemm_runtime.host
    from quack.cute_dsl_utils import torch2cute_dtype_map
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecLoad, RowVecLoad, Scalar, TileLoad

    _allow_tf32(spec)
    _want_two_stages()
    # Only the launch needs the number, but the library asks the driver for it while it builds its launch plan.
    quack.gemm_runtime.host.get_max_active_clusters = lambda cluster_size: spec.max_active_clusters

    pins, operands, numbers = {}, {}, {}
    for index, operand in enumerate(spec.program.operands):
        name, dtype = operand_name(index), carrier(operand)
        # Pinned, because the library would infer the kind from the shape, which is ambiguous when M == N.
        pins[name] = {
            OperandKind.TILE: TileLoad,
            OperandKind.ROW: RowVecLoad,
            OperandKind.COLUMN: ColVecLoad,
            OperandKind.SCALAR: functools.partial(Scalar, dtype=torch2cute_dtype_map[dtype]),
            OperandKind.NUMBER: functools.partial(Scalar, dtype=torch2cute_dtype_map[dtype]),
        }[operand.kind](name)
        if operand.kind is OperandKind.NUMBER:
            numbers[name] = 1.0  # any value: that it is no tensor has it passed with each launch
            continue
        shape = {
            OperandKind.TILE: (FAKE_SIZE, FAKE_SIZE),
            OperandKind.ROW: (FAKE_SIZE,),
            OperandKind.COLUMN: (FAKE_SIZE,),
            OperandKind.SCALAR: (1,),
        }[operand.kind]
        operands[name] = shape, dtype, operand.major
    outputs = [(store_name(i), store) for i, store in enumerate(spec.program.stores)][1:]
    candidate, space = spec.candidate, SPACES[spec.arch]
    function = _epilogue_function(spec) if space.lanes == 1 else _lane_by_lane(_epilogue_function(spec))
    epilogue = gemm_epilogue(ops=pins, outputs=tuple(name for name, _ in outputs))(function)
    tensors = {name: _fake(*description) for name, description in operands.items()}
    tensors |= {name: _fake((FAKE_SIZE, FAKE_SIZE), CARRIERS[store.dtype], store.major) for name, store in outputs}
    store = spec.program.stores[0]
    plan = epilogue.gemm(
        _fake((FAKE_SIZE, FAKE_SIZE), spec.dtype, spec.a_major),
        _fake((FAKE_SIZE, FAKE_SIZE), spec.dtype, spec.b_major),
        _fake((FAKE_SIZE, FAKE_SIZE), CARRIERS[store.dtype], store.major),
        epi_args={**tensors, **numbers},
        tile_M=space.library_tile_m(candidate),
        tile_N=candidate.tile_n,
        cluster_M=candidate.cluster_m,
        cluster_N=candidate.cluster_n,
        pingpong=candidate.pingpong,
        is_dynamic_persistent=space.dynamic,
        swap_ab=candidate.swap_ab,
        b_kn=True,
        _launch=False,
    )
    return plan.compiled_fn


@functools.lru_cache(maxsize=None)
def _want_two_stages() -> None:
    """Has QuACK refuse a kernel for SM90 whose epilogue leaves shared memory for only one stage of A and B.

    Such kernels hang. `candidates` leaves them out by a count of its own (`shared_memory`); this is the library's.
    """
    from quack.gemm_sm90 import GemmSm90

    settle = GemmSm90._setup_attributes

    @functools.wraps(settle)
    def checked(gemm: Any, *arguments: Any) -> None:
        settle(gemm, *arguments)
        if gemm.ab_stage < LEAST_STAGES:
            raise ValueError("the epilogue leaves no room for two stages of A and B")

    GemmSm90._setup_attributes = checked


def _allow_tf32(spec: KernelSpec) -> None:
    """Before the first kernel, whatever its dtype: the library keeps one class for an epilogue. What the module is made
    of are no public names of the libraries, so without them it is float32 alone that cannot be compiled."""
    try:
        from . import tf32

        tf32.enable()
    except (ImportError, AttributeError):
        if spec.dtype == torch.float32:
            raise


def _compile_operators(spec: KernelSpec) -> Any:
    import cutlass.cute as cute
    import cutlass.operators

    if not spec.program.is_identity:
        raise ValueError("the Operator API has no SM90 kernel with an epilogue")
    store, candidate = spec.program.stores[0], spec.candidate
    arguments = cutlass.operators.GemmArguments(
        A=_fake((FAKE_SIZE, FAKE_SIZE), spec.dtype, spec.a_major),
        B=_fake((FAKE_SIZE, FAKE_SIZE), spec.dtype, spec.b_major),
        out=_fake((FAKE_SIZE, FAKE_SIZE), store.dtype, store.major),
        accumulator_type=torch.float32,
    )
    wanted = (candidate.tile_m, candidate.tile_n), (candidate.cluster_m, candidate.cluster_n)
    for operator in cutlass.operators.get_operators(arguments, target_sm=spec.arch.removeprefix("sm_")):
        design = operator.metadata.design
        if (tuple(design.tile_shape[:2]), tuple(design.cluster_shape[:2])) == wanted:
            break
    else:
        raise ValueError(f"the Operator API has no kernel {candidate}")
    # Compiled from the operator's kernel rather than by `operator.compile`, which asks the driver for the number of
    # clusters and wants the stream as an argument.
    tensors = [operand.tensor.compile_time_tensor for operand in (arguments.A, arguments.B, arguments.out)]
    return cute.compile[cute.GPUArch(spec.arch), cute.EnableTVMFFI(True)](
        operator.impl,
        *tensors,
        spec.max_active_clusters,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _compile_skinny(spec: KernelSpec) -> Any:
    import cutlass
    import cutlass.cute as cute

    from .skinny import VECTOR, SkinnyGemm

    def strides(major: Major, multiple: int = 1) -> tuple[Any, int] | tuple[int, Any]:
        leading = cute.sym_int64(divisibility=multiple)
        return (leading, 1) if major is Major.ROW else (1, leading)

    def tensor(dtype: torch.dtype, shape: tuple[Any, ...], stride: tuple[Any, ...], alignment: int = 0) -> Any:
        alignment = alignment or dtype.itemsize
        return cute.runtime.make_fake_tensor(_dsl_type(dtype), shape, stride, assumed_align=alignment)

    program, candidate = spec.program, spec.candidate
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
    a = tensor(spec.dtype, (m, k), strides(spec.a_major, VECTOR), ALIGNMENT_BYTES)
    b = tensor(spec.dtype, (k, n), strides(spec.b_major, VECTOR), ALIGNMENT_BYTES)
    rest: list[Any] = []
    for operand in program.operands:
        dtype = carrier(operand)
        if operand.kind is OperandKind.NUMBER:
            rest.append(cutlass.Float32(1.0))
        elif operand.kind is OperandKind.SCALAR:
            address_space = cute.AddressSpace.gmem
            rest.append(cute.runtime.make_ptr(_dsl_type(dtype), 0, address_space, assumed_align=dtype.itemsize))
        elif operand.kind is OperandKind.TILE:
            rest.append(tensor(dtype, (m, n), strides(operand.major)))
        else:
            rest.append(tensor(dtype, (n if operand.kind is OperandKind.ROW else m,), (1,)))
    rest += [tensor(CARRIERS[store.dtype], (m, n), strides(store.major)) for store in program.stores]
    gemm = SkinnyGemm(
        candidate.tile_m,
        candidate.split_k,
        _epilogue_function(spec),
        {operand_name(i): operand.kind for i, operand in enumerate(program.operands)},
        [store_name(i) for i in range(len(program.stores))],
    )
    return cute.compile[cute.GPUArch(spec.arch), cute.EnableTVMFFI(True)](
        gemm, a, b, tuple(rest), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    )


def _dsl_type(dtype: torch.dtype) -> Any:
    import cutlass

    return getattr(cutlass, DSL_TYPES[dtype])


def _epilogue_function(spec: KernelSpec) -> Any:
    """The emitted function, as of a module without a file. The compiler reads its source, as `inspect` finds it."""
    source = emit(spec.program)
    name = f"nvgemm_epilogue_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        module, path = ModuleType(name), f"<{name}>"
        linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
        exec(compile(source, path, "exec"), module.__dict__)
        sys.modules[name] = module
    return getattr(sys.modules[name], FUNCTION_NAME)


def _lane_by_lane(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`function` of one element as a function of two: what the library calls on SM100, where two float32 lanes share
    an instruction. Ours are computed one after the other, since a selection or a root has no such instruction."""

    @functools.wraps(function)  # the library reads the names of the operands off it
    def lanes(acc: Any, **operands: Any) -> dict[str, Any]:
        if not isinstance(acc, tuple):  # a fragment of odd size comes element by element
            return function(acc, **operands)
        low, high = (
            function(
                acc[lane],
                **{name: value[lane] if isinstance(value, tuple) else value for name, value in operands.items()},
            )
            for lane in (0, 1)
        )
        return {name: (low[name], high[name]) for name in low}

    return lanes


class _Fake(torch.Tensor):
    """A tensor without memory to compile against, which says of itself that it is on a GPU.

    One of a FakeTensorMode could say so, too, but makes each process import Dynamo, which takes longer than a kernel.
    """

    is_cuda = True


def _fake(shape: tuple[int, ...], dtype: torch.dtype, major: Major = Major.ROW) -> torch.Tensor:
    if major is Major.COLUMN and len(shape) == 2:
        return _fake(shape[::-1], dtype).t()
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Fake)
