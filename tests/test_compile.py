"""Kernels compiled to machine code for sm_90a, without a GPU, and what is kept of them on disk."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import pytest
import torch
from nvgemm_fusion.fusion.ops import OPS, kind_of
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, Operand, OperandKind, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering import compiler as compiler_module
from nvgemm_fusion.lowering import kernel as kernel_module
from nvgemm_fusion.lowering import worker as worker_module
from nvgemm_fusion.lowering.compiler import CompiledKernel, KernelCompiler
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.providers import OPERATORS, QUACK, SKINNY
from nvgemm_fusion.lowering.store import KernelStore

SMALL = Candidate(QUACK, 64, 64)


@pytest.fixture(scope="module")
def compiler():
    compiler = KernelCompiler(KernelStore(), workers=2)
    yield compiler
    compiler.close()


@pytest.fixture
def store(tmp_path):
    return KernelStore(tmp_path)


@pytest.fixture
def lone_compiler(store):
    """A compiler over an empty store, with one worker."""
    compiler = KernelCompiler(store, workers=1)
    yield compiler
    compiler.close()


def identity(dtype=torch.bfloat16, major=Major.ROW):
    return ProgramBuilder().build([Store(ACCUMULATOR, dtype, major)])[0]


BRANCHING = {"fmod", "remainder", "pow", "sin", "cos", "tan", "atan2", "erfc", "truncdiv", "floordiv"}
"""Ops of much code. A kernel that has them all compiles in seconds for a 64 x 16 tile, in a minute for 128 x 208."""


def everything(dtype, major, candidate=SMALL):
    """Every op in each kind of value that it takes, each kind of operand, roundings and constants, in one program.

    For a small tile. For a larger one, without those ops that have branches.
    """
    names = set(OPS) if candidate.tile_m * candidate.tile_n <= 64 * 32 else set(OPS) - BRANCHING
    builder = ProgramBuilder()
    operands = [
        builder.operand(kind, Operand(kind, dtype, major if kind is OperandKind.TILE else Major.ROW))
        for kind in OperandKind
        if kind is not OperandKind.NUMBER
    ]
    operands.append(builder.operand(OperandKind.NUMBER, Operand(OperandKind.NUMBER, torch.float32)))
    value = builder.round_to(builder.round_to(ACCUMULATOR, dtype), torch.float8_e4m3fn)
    for operand in operands:
        value = builder.op("add", value, operand)
    for computed in (torch.float32, torch.bool, torch.int8, torch.uint8, torch.int32):
        value, others = builder.convert(value, computed), [builder.convert(o, computed) for o in operands[:2]]
        for name, op in OPS.items():
            if name in names and kind_of(computed) in op.takes:
                inputs = [value, *others][: op.arity]
                if name == "where":
                    inputs = [builder.op("ne", value, others[0]), value, others[1]]
                # Selected, so that what follows does not become a constant.
                result = builder.convert(builder.op(name, *inputs), computed)
                value = builder.op("where", builder.op("eq", value, others[0]), value, result)
    value = builder.round_to(builder.convert(value, torch.float32), torch.float8_e5m2)
    value = builder.op("add", value, builder.constant(0.5))
    return builder.build([Store(value, dtype, major)])[0]


def spec_of(candidate=SMALL, dtype=torch.bfloat16, a_major=Major.ROW, b_major=Major.COLUMN, program=None):
    return KernelSpec(candidate, dtype, a_major, b_major, program or identity(dtype), "sm_90a", 132)


def assert_machine_code(compiled):
    assert isinstance(compiled, CompiledKernel), str(compiled)
    content = compiled.path.read_bytes()
    assert content.count(b"\x7fELF") == 2 and b"sm_90a" in content  # a cubin inside a host object


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("major", Major)
def test_every_op_and_operand_compiles(compiler, dtype, major):
    assert_machine_code(compiler.compile([spec_of(dtype=dtype, program=everything(dtype, major))])[0])


@pytest.mark.parametrize("provider", [QUACK, OPERATORS])
def test_every_layout_compiles(compiler, provider):
    candidate = Candidate(provider, 128, 128)
    specs = [spec_of(candidate, a_major=a, b_major=b) for a in Major for b in Major]
    for compiled in compiler.compile(specs):
        assert_machine_code(compiled)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(QUACK, 128, 208, 1, 1, pingpong=True),
        Candidate(QUACK, 256, 192, 2, 1),
        Candidate(QUACK, 64, 16, 1, 1, pingpong=True, swap_ab=True),
        Candidate(OPERATORS, 128, 256, 2, 1),
    ],
    ids=str,
)
def test_configurations_compile(compiler, candidate):
    program = identity() if candidate.provider == OPERATORS else everything(torch.bfloat16, Major.ROW, candidate)
    assert_machine_code(compiler.compile([spec_of(candidate, program=program)])[0])


@pytest.mark.parametrize(
    "candidate", [Candidate(QUACK, 128, 128), Candidate(QUACK, 64, 16, pingpong=True, swap_ab=True)], ids=str
)
def test_several_stores_of_different_dtypes_and_majors_compile(compiler, candidate):
    builder = ProgramBuilder()
    row = builder.operand("row", Operand(OperandKind.ROW, torch.bfloat16))
    total = builder.op("add", ACCUMULATOR, row)
    stores = [
        Store(ACCUMULATOR, torch.bfloat16),
        Store(total, torch.float16, Major.COLUMN),
        Store(builder.op("relu", total), torch.float32),
    ]
    assert_machine_code(compiler.compile([spec_of(candidate, program=builder.build(stores)[0])])[0])


def test_what_the_compiler_refuses_is_a_reason(compiler):
    for impossible in (
        spec_of(Candidate(OPERATORS, 128, 128), program=everything(torch.bfloat16, Major.ROW)),
        spec_of(Candidate(OPERATORS, 72, 128)),
        spec_of(Candidate(QUACK, 256, 256, pingpong=True)),
    ):
        refusal = compiler.compile([impossible])[0]
        assert isinstance(refusal, Refusal) and refusal.reason is Reason.COMPILE_ERROR and refusal.detail


def test_a_spec_survives_json():
    spec = spec_of(program=everything(torch.float16, Major.COLUMN))
    assert KernelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for change in ({"candidate": {"provider": 1, "colour": 2}}, {"program": {}}, {"dtype": "int3"}, {"a_major": "up"}):
        with pytest.raises(ValueError):
            KernelSpec.from_json(spec.to_json() | change)
    with pytest.raises(ValueError):
        KernelSpec.from_json({})


def test_the_key_depends_on_all_that_is_compiled(monkeypatch):
    specs = [
        spec_of(),
        spec_of(dtype=torch.float16),
        spec_of(a_major=Major.COLUMN),
        spec_of(b_major=Major.ROW),
        spec_of(Candidate(QUACK, 64, 64, swap_ab=True)),
        spec_of(program=identity(torch.float32)),
        spec_of(program=identity(major=Major.COLUMN)),
    ]
    assert len({spec.key for spec in specs}) == len(specs)
    monkeypatch.setattr(kernel_module, "_recipe", lambda: "another version of ours")
    assert spec_of().key != specs[0].key


def test_the_second_time_nothing_is_compiled(lone_compiler):
    first = lone_compiler.compile([spec_of()])[0]
    assert first.seconds > 0
    assert lone_compiler.compile([spec_of()])[0] == CompiledKernel(spec_of(), first.path, 0.0)


@pytest.mark.parametrize("damage", ["truncated", "empty", "other", "no json", "half a json", "json of another kind"])
def test_a_broken_cache_entry_is_dropped_with_a_warning_and_rebuilt(lone_compiler, store, damage, caplog):
    spec = spec_of()
    staged = store.temporary()
    staged.write_bytes(b"object" * 100)
    path = store.put(spec, staged, {})
    assert store.find(spec) == path
    description = path.with_suffix(".json")
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other":
        path.write_bytes(b"something")
    elif damage == "no json":
        description.write_text("rm -rf /")
    elif damage == "half a json":
        description.write_text(description.read_text()[:20])
    else:
        description.write_text("[1, 2]")
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        rebuilt = lone_compiler.compile([spec])[0]
    assert "compiled again" in caplog.text
    assert_machine_code(rebuilt)
    assert store.find(spec) == path


def test_an_object_without_its_description_is_not_there(store):
    staged = store.temporary()
    staged.write_bytes(b"object")
    path = store.put(spec_of(), staged, {})
    path.with_suffix(".json").unlink()
    assert store.find(spec_of()) is None


def test_no_room_on_disk_is_a_compile_error(lone_compiler, store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "temporary", full)
    refusal = lone_compiler.compile([spec_of()])[0]
    assert refusal.reason is Reason.COMPILE_ERROR and "No space left" in refusal.detail


def process_of(worker):
    return worker._process.number


def test_a_worker_that_dies_costs_its_candidate_alone(lone_compiler):
    worker = lone_compiler._take()
    lone_compiler._give_back(worker)
    threading.Timer(0.3, os.kill, (process_of(worker), signal.SIGKILL)).start()  # while it compiles
    refusal = lone_compiler.compile([spec_of()])[0]
    assert isinstance(refusal, Refusal) and refusal.detail == "its process ended"
    assert_machine_code(lone_compiler.compile([spec_of()])[0])


@pytest.mark.parametrize("dead", ["worker", "nursery"])
def test_a_process_that_dies_while_nobody_asks_it_costs_nothing(dead, lone_compiler):
    first, second = lone_compiler._take(), lone_compiler._take()
    lone_compiler._give_back(first)
    os.kill(process_of(first), signal.SIGKILL)
    if dead == "nursery":
        lone_compiler._nursery._process.kill()
        lone_compiler._nursery._process.wait()
    assert second.alive
    lone_compiler._give_back(second)
    time.sleep(0.1)
    assert_machine_code(lone_compiler.compile([spec_of(), spec_of(b_major=Major.ROW)])[1])
    lone_compiler._idle.clear()
    assert_machine_code(lone_compiler.compile([spec_of(a_major=Major.COLUMN)])[0])


@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_without_a_process_to_compile_in_there_is_a_reason(how, lone_compiler, monkeypatch):
    module = {"ends": "no_such_module", "hangs": "code"}[how]  # which waits for a line that does not come
    if how == "hangs":
        monkeypatch.setattr(worker_module, "FORK_LIMIT_S", 0.5)
    monkeypatch.setattr(lone_compiler._nursery, "_module", module)
    refusal = lone_compiler.compile([spec_of()])[0]
    assert isinstance(refusal, Refusal) and "no process to compile in" in refusal.detail
    assert ("timed out" in refusal.detail) == (how == "hangs")
    monkeypatch.undo()
    assert_machine_code(lone_compiler.compile([spec_of()])[0])


def is_running(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # which a process that has ended is without
    except OSError:
        return False


def test_workers_end_with_the_process_that_started_them(tmp_path):
    script = (
        "from test_compile import *\n"
        "compiler = KernelCompiler(KernelStore(), 1)\n"
        "print(process_of(compiler._take()), compiler._nursery._process.pid)\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "NVGEMM_FUSION_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    run = functools.partial(subprocess.run, stdout=subprocess.PIPE, text=True, env=environment, timeout=300)
    processes = run([sys.executable, "-c", script]).stdout.split()
    deadline = time.monotonic() + 20
    while any(is_running(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_how_many_compile_at_a_time_may_change(lone_compiler, monkeypatch):
    running, most = [], []

    def compiled(spec):
        running.append(spec)
        most.append(len(running))
        time.sleep(0.2)
        running.remove(spec)

    monkeypatch.setattr(lone_compiler, "_compile", compiled)
    specs = [spec_of(Candidate(QUACK, 64, tile_n)) for tile_n in (32, 64, 96, 128)]
    for workers in (1, 3, 2):
        lone_compiler.allow(workers)
        most.clear()
        lone_compiler.compile(specs)
        assert max(most) == workers


def test_of_the_shared_compiler_who_asked_last_says_it(store, monkeypatch):
    """A graph that is found in Inductor's cache loads its kernels first, and knows nothing of `compile_threads`."""
    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(store.directory.parent))
    monkeypatch.setattr(compiler_module, "_compiler", None)
    compiler = compiler_module.shared_compiler()
    assert compiler._limit == 1 and compiler_module.shared_compiler(3) is compiler
    assert compiler_module.shared_compiler()._limit == 3


def test_a_worker_that_hangs_is_ended_and_its_candidate_banned(lone_compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "TIME_LIMIT_S", 0.2)  # less than the import of the compilers
    refusal = lone_compiler.compile([spec_of()])[0]
    assert isinstance(refusal, Refusal) and "did not end within 0.2 s" in refusal.detail
    assert lone_compiler.compile([spec_of()])[0] == refusal and not lone_compiler._workers


def test_of_two_processes_that_want_a_kernel_one_compiles_it(tmp_path):
    script = (
        "from test_compile import *\n"
        "compiled = KernelCompiler(KernelStore(), 1).compile([spec_of()])[0]\n"
        "assert_machine_code(compiled)\n"
        "print(compiled.seconds)\n"
    )
    environment = {**os.environ, "NVGEMM_FUSION_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    run = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, env=environment)
    processes = [run([sys.executable, "-c", script]) for _ in range(2)]
    seconds = sorted(float(process.communicate(timeout=300)[0]) for process in processes)
    assert seconds[0] == 0.0 < seconds[1]
    files = sorted(path.suffix for path in (tmp_path / "kernels").iterdir())
    assert files == [".json", ".so"]


def test_a_lock_that_is_not_to_be_had_holds_nobody_up(store, monkeypatch):
    with store.lock("name", 10.0):
        started = time.monotonic()
        other = threading.Thread(target=lambda: store.lock("name", 0.2).__enter__())
        other.start()
        other.join()
        assert 0.1 < time.monotonic() - started < 5

    def no_locks(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    with store.lock("name", 10.0):
        pass
    assert not list(store.directory.glob("*.lock"))


def test_what_was_prepared_is_told_once_with_its_seconds(lone_compiler):
    lone_compiler.prepare(spec_of())
    lone_compiler.prepare(spec_of())
    prepared = lone_compiler.submit(spec_of()).result()
    assert prepared.seconds > 0 and lone_compiler.submitted == 1
    assert lone_compiler.submit(spec_of()).result() == CompiledKernel(spec_of(), prepared.path, 0.0)


@pytest.mark.parametrize("missing", [(spec_of(),), ()])
def test_the_compilers_are_imported_early_where_something_is_missing(lone_compiler, missing):
    lone_compiler.expect(*missing)
    process = lone_compiler._nursery._process
    assert process.poll() is None and isinstance(lone_compiler.compile([spec_of()])[0], CompiledKernel)
    assert lone_compiler._nursery._process is process
    lone_compiler._nursery._process = None
    lone_compiler.expect(*missing)
    assert lone_compiler._nursery._process is None
    process.kill()
    process.wait()


def test_workers_import_nothing_of_inductor(tmp_path):
    """Neither at the start nor with the first kernel of a provider: half of torch takes longer than a kernel."""
    kernels = [spec_of(program=everything(torch.bfloat16, Major.ROW)), spec_of(Candidate(OPERATORS, 64, 128))]
    kernels.append(spec_of(Candidate(SKINNY, 16, 8, swap_ab=True, split_k=4)))
    script = (
        "import json, sys\n"
        "from nvgemm_fusion.lowering import compile_worker\n"
        "compile_worker.import_without_inductor()\n"
        "assert 'quack.epilogue.frontend' in sys.modules\n"
        "for number, spec in enumerate(json.loads(sys.argv[1])):\n"
        "    answer = compile_worker.answer({'spec': spec, 'library': f'{sys.argv[2]}/{number}.so'})\n"
        "    assert answer['ok'], answer\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])\n"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", script, json.dumps([spec.to_json() for spec in kernels]), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
