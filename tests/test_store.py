"""The kernels on disk stay below their limit, whoever else puts, finds and removes some at the same time."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.lowering import launcher as launchers
from nvgemm_fusion.lowering.compiler import KernelCompiler
from nvgemm_fusion.lowering.kernel import Candidate, KernelSpec
from nvgemm_fusion.lowering.store import DEFAULT_LIMIT_MB, LIMIT_VARIABLE, KernelStore, size_limit
from nvgemm_fusion.lowering.verification import mismatch

MB = 1_000_000
OBJECT = 100_000
"""The bytes of an object here: ten are a limit of 1 MB."""

PROGRAM, _ = ProgramBuilder().build([Store(ACCUMULATOR, torch.bfloat16)])
BAN = Refusal(Reason.WRONG_RESULT, "1.0 instead of 2.0")


def spec_of(number):
    return KernelSpec(Candidate("quack", 64, 64), torch.bfloat16, Major.ROW, Major.ROW, PROGRAM, "sm_90a", number)


def put(store, number, size=OBJECT):
    """Puts an object, which is the number over and over."""
    staged = store.temporary()
    staged.write_bytes(number.to_bytes(4, "little") * (size // 4))
    return store.put(spec_of(number), staged, {})


def aged(path, seconds):
    """`path`, as if it had been used so many seconds ago."""
    os.utime(path, times=(time.time() - seconds,) * 2)
    return path


def read_only(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store of at most 1 MB."""
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    return KernelStore(tmp_path)


def test_the_limit_is_kept_and_the_oldest_go(store):
    for number in range(30):
        aged(put(store, number), 1000 - number)
        assert store.size()[1] <= MB
    found = [number for number in range(30) if store.find(spec_of(number)) is not None]
    assert found == list(range(30 - len(found), 30)) and 9 <= len(found) <= 10
    assert len(list(store.directory.iterdir())) == 2 * len(found)  # the descriptions of the others are gone, too


def test_what_is_found_was_used(store):
    for number in range(10):
        aged(put(store, number), 1000 - number)
    assert store.find(spec_of(0)) is not None
    put(store, 10)
    assert store.find(spec_of(0)) is not None
    assert store.find(spec_of(1)) is None and store.find(spec_of(2)) is None and store.find(spec_of(3)) is not None


def test_the_newest_stays_however_large(store):
    aged(put(store, 0), 1000)
    path = aged(put(store, 1, 2 * MB), 2000)
    assert store.size() == (1, 2 * MB) and store.find(spec_of(1)) == path
    put(store, 2)
    assert store.find(spec_of(1)) is None and store.find(spec_of(2)) is not None


def test_bans_survive(store):
    put(store, 0)
    store.ban(spec_of(0), BAN)
    store.ban(spec_of(1), BAN)
    for path in store.directory.iterdir():
        aged(path, 10_000)
    for number in range(2, 30):
        put(store, number)
    assert store.find(spec_of(0)) == store.find(spec_of(1)) == BAN
    assert store.clear() and store.find(spec_of(0)) is None


def test_a_ban_survives_the_same_kernel_put_by_another_process(store):
    """That one began to compile when the object had been removed for room, and before the ban."""
    staged = store.temporary()
    store.ban(spec_of(0), BAN)
    store.put(spec_of(0), staged, {})
    assert store.find(spec_of(0)) == BAN


def test_a_ban_as_older_versions_wrote_it_holds_and_survives(store):
    store.ban(spec_of(0), BAN)
    (ban,) = store.directory.iterdir()
    aged(ban.rename(store.directory / f"{spec_of(0).key}.json"), 10_000)
    for number in range(1, 30):
        put(store, number)
    assert store.find(spec_of(0)) == BAN


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"banned": "colour", "detail": ""}'])
def test_a_ban_that_cannot_be_read_is_a_ban(store, content):
    put(store, 0)
    store.ban(spec_of(0), BAN)
    (ban,) = store.directory.iterdir()
    ban.write_text(content)
    for _ in range(2):
        found = store.find(spec_of(0))
        assert isinstance(found, Refusal) and found.reason is Reason.WRONG_RESULT and "cannot be read" in found.detail


@pytest.mark.parametrize("limit", ["1", "0"])
def test_what_killed_processes_left_is_swept(store, monkeypatch, limit):
    monkeypatch.setenv(LIMIT_VARIABLE, limit)
    old, young = aged(store.temporary(), 4000), aged(store.temporary(), 1000)
    put(store, 0)
    assert not old.exists() and young.exists()


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_without_a_limit_everything_stays(store, monkeypatch, limit):
    monkeypatch.setenv(LIMIT_VARIABLE, limit)
    for number in range(30):
        put(store, number)
    assert store.size() == (30, 30 * OBJECT) and size_limit() is None


@pytest.mark.parametrize("value", ["much", "1.5", "1e3", "nan", " "])
def test_a_wrong_limit_is_warned_of_once(monkeypatch, caplog, value):
    monkeypatch.setenv(LIMIT_VARIABLE, value)
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        assert size_limit() == size_limit() == DEFAULT_LIMIT_MB * MB
    assert caplog.text.count(LIMIT_VARIABLE) == 1


@pytest.mark.parametrize("value", [None, ""])
def test_the_default_limit(monkeypatch, caplog, value):
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(LIMIT_VARIABLE, value)
    assert size_limit() == DEFAULT_LIMIT_MB * MB and not caplog.records


def test_a_limit_beyond_all_numbers_is_a_limit(store, monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "9" * 400)
    put(store, 0)
    put(store, 1)
    assert store.size()[0] == 2


def test_a_folder_of_ten_thousand_is_not_slow(store):
    store.directory.mkdir()
    for number in range(10_000):
        (store.directory / f"{number:032x}.so").write_bytes(b"x" * 200)
        (store.directory / f"{number:032x}.json").write_bytes(b"{}")
    start = time.perf_counter()
    put(store, 0)
    assert time.perf_counter() - start < 5  # 0.2 s, where nothing else runs
    assert store.size()[1] <= 0.9 * MB and len(list(store.directory.iterdir())) == 2 * store.size()[0]


def test_a_burst_does_not_read_the_folder_each_time(store, monkeypatch):
    scans = []
    libraries = store._libraries
    monkeypatch.setattr(store, "_libraries", lambda: scans.append(1) or libraries())
    for number in range(500):
        put(store, number, 1000)
    assert len(scans) == 10  # with the first, and after each twentieth of the limit


def test_files_that_vanish_or_stay_are_no_error(store, monkeypatch):
    for number in range(10):
        aged(put(store, number), 1000 - number)
    unlink = Path.unlink

    def unlink_but_not(path, missing_ok=False):
        if path.stem == spec_of(0).key:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        if path.suffix == ".so":
            unlink(path)  # another process was faster
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_but_not)
    put(store, 10)
    assert store.find(spec_of(0)) is not None and store.find(spec_of(1)) is None and store.find(spec_of(3)) is not None


def test_objects_that_vanish_while_they_are_counted_are_no_error(store, monkeypatch):
    path = put(store, 0)
    put(store, 1)
    glob = Path.glob

    def glob_and_remove(folder, pattern):
        listed = list(glob(folder, pattern))
        path.unlink(missing_ok=True)
        return iter(listed)

    monkeypatch.setattr(Path, "glob", glob_and_remove)
    assert store.size() == (1, OBJECT)


def test_a_folder_that_cannot_be_read_does_not_lose_the_kernel(store, monkeypatch):
    monkeypatch.setattr(Path, "glob", read_only)
    assert put(store, 0) == store.find(spec_of(0))


def test_a_disk_that_takes_no_writes_gives_its_kernels(store, monkeypatch, caplog):
    path = put(store, 0)
    for module, name in ((os, "utime"), (os, "replace"), (os, "unlink"), (Path, "unlink")):
        monkeypatch.setattr(module, name, read_only)
    assert store.find(spec_of(0)) == path and store.find(spec_of(1)) is None
    store.ban(spec_of(0), BAN)  # is no error
    assert not caplog.records


def test_an_object_that_was_removed_is_not_there_and_no_warning(store, caplog):
    put(store, 0).unlink()
    assert store.find(spec_of(0)) is None and not caplog.records


def use_at_random(folder, seed):
    """What one of several processes does: finds kernels, and puts those that it does not find. Their contents hold."""
    store, choose = KernelStore(folder), random.Random(seed)
    for _ in range(400):
        number = choose.randrange(60)
        path = store.find(spec_of(number))
        if path is None:
            path = put(store, number)
        try:
            assert set(memoryview(path.read_bytes()).cast("I")) == {number}
        except FileNotFoundError:  # removed by another one just now
            pass
    return store.size()[1]


def test_several_processes_at_once(tmp_path, store):
    store.ban(spec_of(1000), BAN)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        sizes = pool.starmap(use_at_random, [(tmp_path, seed) for seed in range(3)])
    assert max(sizes) <= MB + 3 * OBJECT  # each scans after an object of this size, and has put one before it scans
    assert store.size()[1] <= MB and store.find(spec_of(1000)) == BAN
    assert not list(store.directory.glob("*.tmp"))


# A kernel that was found, and is removed before it is loaded.


@pytest.fixture
def load(store, monkeypatch):
    """A function that loads a kernel by `bind`, given in place of the real one; `load.compiled` counts compilations."""

    class Worker:
        alive = True

        def ask(self, request, limit_s):
            load.compiled += 1
            Path(request["library"]).write_bytes(b"object")
            return {"ok": True, "seconds": 1.0}

        def kill(self):
            pass

    def load(bind):
        monkeypatch.setattr(launchers, "bind", bind)
        launchers.load_kernel.cache_clear()
        return launchers.load_kernel(json.dumps(spec_of(0).to_json()))

    load.compiled = 0
    compiler = KernelCompiler(store, workers=1)
    monkeypatch.setattr(compiler._nursery, "worker", Worker)
    monkeypatch.setattr(launchers, "shared_compiler", lambda: compiler)
    yield load
    launchers.load_kernel.cache_clear()
    compiler.close()


def test_a_kernel_that_is_gone_is_compiled_once_more(load):
    def bind(compiled):
        if load.compiled == 1:
            compiled.path.unlink()
        content = compiled.path.read_bytes()
        return lambda: content

    assert load(bind)() == b"object" and load.compiled == 2


def computes(launch):
    """Whether `launch` gives the product."""
    tensors = [torch.randn(64, 32).bfloat16(), torch.randn(32, 48).bfloat16(), torch.empty(64, 48).bfloat16()]
    launch(*tensors)
    return mismatch(PROGRAM, tensors) is None


def test_a_kernel_that_is_gone_each_time_is_computed_by_torch(load, caplog):
    def bind(compiled):
        compiled.path.unlink()
        return compiled.path.read_bytes()

    assert computes(load(bind)) and load.compiled == 2
    assert "torch computes" in caplog.text and "FileNotFoundError" in caplog.text


def test_a_kernel_that_is_there_and_does_not_load_is_computed_by_torch(load, caplog):
    def bind(compiled):
        raise RuntimeError("no such symbol")

    assert computes(load(bind)) and load.compiled == 1
    assert "torch computes" in caplog.text and "no such symbol" in caplog.text


def test_the_real_loader_says_that_a_kernel_is_gone(load, caplog):
    real = launchers.bind

    def bind(compiled):
        compiled.path.unlink()
        return real(compiled)

    assert computes(load(bind)) and load.compiled == 2 and "torch computes" in caplog.text


def test_generated_code_goes_on_while_its_kernel_is_loaded(load, monkeypatch):
    """On the device that was current when the code was loaded, whatever becomes current since."""
    devices, current, may_load = [], [3], threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or contextlib.nullcontext())

    def bind(compiled):
        assert may_load.wait(60)
        return lambda: threading.current_thread()

    launch = load(bind)  # which would wait for ever
    current[0] = 5
    with ThreadPoolExecutor(2) as callers:
        early = [callers.submit(launch) for _ in range(2)]
        assert not wait(early, timeout=0.2).done
        may_load.set()
        assert all(future.result() is not threading.current_thread() for future in early)
    assert launch() is threading.current_thread()  # only the loading is another thread's
    assert devices == [3] and load.compiled == 1


def test_who_asks_again_gets_a_new_answer(store, monkeypatch):
    """Also right after the first one, while its future still tells others that it is done."""
    compiler, answers, tell = KernelCompiler(store, workers=1), iter(range(5)), Future._invoke_callbacks
    monkeypatch.setattr(compiler, "_compile", lambda spec: next(answers))
    monkeypatch.setattr(Future, "_invoke_callbacks", lambda future: (time.sleep(0.1), tell(future)))
    assert [compiler.compile([spec_of(0)])[0] for _ in range(5)] == list(range(5))
    assert compiler.submitted == compiler.finished == 5
    compiler.close()


def test_the_command_shows_the_limit(store, tmp_path, monkeypatch):
    from nvgemm_fusion.bench.command import app
    from typer.testing import CliRunner

    def info(*options):
        result = CliRunner().invoke(app, ["cache", "info", *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path))
    put(store, 0)
    assert "1 kernels (0.1 MB, limit 1 MB)" in info()
    found = json.loads(info("--json"))
    assert (found["kernel_bytes"], found["kernel_bytes_limit"]) == (OBJECT, MB)
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert "(0.1 MB, no limit)" in info() and json.loads(info("--json"))["kernel_bytes_limit"] is None
    assert json.loads(info("--json"))["bans"] == [] and "banned" not in info()
    store.ban(spec_of(0), BAN)
    (store.directory / "unreadable.banned.json").write_text("{")
    (ban,) = json.loads(info("--json"))["bans"]
    assert (ban["candidate"], ban["reason"], ban["detail"]) == (str(spec_of(0).candidate), "wrong result", BAN.detail)
    assert f"banned: {spec_of(0).candidate}, bfloat16" in info()
