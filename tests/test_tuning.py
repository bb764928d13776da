"""Decisions that are kept: on disk, used again, and carried in a file that nobody has to trust."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from nvgemm_fusion.fusion.decision import Status, Timing
from nvgemm_fusion.fusion.reasons import Reason
from nvgemm_fusion.lowering import tuning
from nvgemm_fusion.lowering.kernel import Candidate
from nvgemm_fusion.lowering.packages import versions
from nvgemm_fusion.lowering.tuning import TuningStore

COMMAND = Path(sys.executable).parent / "nvgemm-fusion"


def entry_of(m=64, target="H200", measured_at="2026-11-29T12:00:00+00:00", us=10.0, **changes):
    problem = tuning.ProblemData(m, 128, 32, "bfloat16", "row", "column", "float32", "sm_90a")
    programs = (tuning.ProgramData("0123456789abcdef", "v0 = relu(acc)\nstore v0 as bfloat16"),)
    contest = tuning.Contest(target, problem, programs, 0, ("ATEN", "TRITON"), 5)
    winner = tuning.Winner("NVGEMM", "nvgemm", 0, Candidate("quack", 64, 64), us, 0.1)
    fields = {"us_best_unfused": 12.0, "versions": versions(), "measured_at": measured_at, **changes}
    return tuning.TuningEntry(contest, winner, **fields)


@pytest.fixture
def store(tmp_path):
    return TuningStore(tmp_path)


def test_an_entry_is_found_again(store):
    entry = entry_of()
    store.put(entry)
    assert store.find(entry.contest) == entry and list(store.entries()) == [entry]
    assert store.find(entry_of(m=65).contest) is None
    assert store.clear() == 1 and store.find(entry.contest) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"contest": 1}', b"[" * 100_000])
def test_a_broken_entry_is_ignored_with_a_warning(store, content, caplog):
    store.put(entry_of())
    (path,) = store.directory.iterdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "nvgemm_fusion"):
        assert store.find(entry_of().contest) is None
    assert "ignored the kept decision" in caplog.text


def test_an_entry_under_anothers_name_is_not_used(store):
    store.put(entry_of())
    (path,) = store.directory.iterdir()
    path.write_bytes(msgspec.json.encode(entry_of(m=128)))
    assert store.find(entry_of().contest) is None


def test_a_newer_measurement_is_never_overwritten_unless_told(store):
    new, old = entry_of(us=9.0, measured_at="2026-11-30T00:00:00+00:00"), entry_of(us=11.0)
    assert store.merge([new]) == 1
    assert store.merge([old, new]) == 0 and store.find(new.contest) == new
    assert store.merge([old], overwrite=True) == 1 and store.find(new.contest) == old


def test_a_file_round_trips_and_is_readable(tmp_path):
    path = tmp_path / "file.json"
    tuning.write_file(path, [entry_of(), entry_of(m=128)])
    assert tuning.read_file(path) == (entry_of(), entry_of(m=128))
    text = path.read_text()
    assert "v0 = relu(acc)" in text and len(text.splitlines()) > 50


def hostile(change):
    """A tuning file with one entry, changed by `change`."""
    data = json.loads(msgspec.json.encode(tuning.TuningFile("nvgemm-fusion tuning", 1, (entry_of(),))))
    changed = change(data)
    return json.dumps(data if changed is None else changed)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "{}",
        "[" * 100_000,
        '{"a":' * 50_000,
        hostile(lambda d: d.update(schema=2)),
        hostile(lambda d: d.update(kind="something else")),
        hostile(lambda d: d.update(entries={})),
        hostile(lambda d: d["entries"][0].update(run="rm -rf /")),
        hostile(lambda d: d["entries"][0]["contest"]["problem"].update(m=0)),
        hostile(lambda d: d["entries"][0]["contest"]["problem"].update(m=1 << 70)),
        hostile(lambda d: d["entries"][0]["contest"]["problem"].update(m="64")),
        hostile(lambda d: d["entries"][0]["contest"]["problem"].update(a_major="diagonal")),
        hostile(lambda d: d["entries"][0]["contest"]["programs"][0].update(digest="../../etc/passwd")),
        hostile(lambda d: d["entries"][0]["contest"].update(programs=[])),
        hostile(lambda d: d["entries"][0]["winner"].update(us=-1)),
        hostile(lambda d: d["entries"][0]["winner"].update(us=1e300)),
        hostile(lambda d: d["entries"][0]["winner"].update(backend="SHELL")),
        hostile(lambda d: d["entries"][0]["winner"].update(candidate=[1])),
        hostile(lambda d: d["entries"][0].update(measured_at="yesterday")),
        hostile(lambda d: d["entries"][0].update(versions=[1])),
        hostile(lambda d: d["entries"][0].update(versions={"x" * 1000: "1"})),
    ],
    ids=range(23),
)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "hostile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="tuning file") as refused:
        tuning.read_file(path)
    assert "\n" not in str(refused.value)


def test_misfits():
    assert entry_of().misfit(versions(), "H200") is None and entry_of().misfit(versions()) is None
    assert entry_of().misfit(versions(), "H100").reason is Reason.TARGET
    assert entry_of(target="Z80").misfit(versions()).reason is Reason.TARGET
    assert entry_of(versions={**versions(), "torch": "1.0"}).misfit(versions()).reason is Reason.VERSION


# A contest on the virtual H200 whose times are passed off as measured ones.


@pytest.fixture
def contests(tmp_path, h200, inductor_config, decisions, instant_kernels, monkeypatch):
    """A function that compiles a graph anew and gives its decision record; `fastest` says who wins from then on."""
    from nvgemm_fusion.scheduler_hooks import alternatives
    from nvgemm_fusion.scheduler_hooks import tuning as hooks

    monkeypatch.setenv("NVGEMM_FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hooks, "shared_compiler", alternatives.shared_compiler)

    def time(contest, entrant):
        alternative = entrant.alternative
        wins = alternative.backend.value == run.fastest[0] and bool(alternative.fused) == run.fastest[1]
        return replace(entrant, alternative=replace(alternative, timing=Timing(10.0 if wins else 20.0, 0.1)))

    monkeypatch.setattr(alternatives, "_with_modelled_time", time)
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (128, 32), (128,)))

    def run():
        torch._dynamo.reset()
        with inductor_config.patch(nvgemm_fusion_cache=True):
            torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b)))(x, w, b)
        return decisions()[-1]

    run.fastest = ("NVGEMM", True)
    return run


@pytest.mark.parametrize("winner", [("NVGEMM", True), ("NVGEMM", False), ("ATEN", False), ("TRITON", True)], ids=str)
def test_the_second_time_the_winner_is_taken_from_disk(contests, h200, winner):
    contests.fastest = winner
    first, first_code = contests(), h200.code[-1]
    contests.fastest = ("nobody", False)
    second = contests()
    assert not first["from_cache"] and second["from_cache"] and len(second["alternatives"]) == 1
    chosen, kept = first["alternatives"][first["chosen"]], second["alternatives"][second["chosen"]]
    assert kept["backend"] == winner[0] and (kept["fused"], kept["us"]) == (chosen["fused"], 10.0)
    assert first_code.count("nvgemm_") == h200.code[-1].count("nvgemm_")


def test_modelled_times_are_not_kept(contests, monkeypatch):
    from nvgemm_fusion.scheduler_hooks import alternatives

    time = alternatives._with_modelled_time

    def modelled(contest, entrant):
        timed = time(contest, entrant)
        return replace(timed, alternative=replace(timed.alternative, status=Status.MODELLED))

    monkeypatch.setattr(alternatives, "_with_modelled_time", modelled)
    contests()
    assert not contests()["from_cache"]


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: msgspec.structs.replace(entry, versions={**versions(), "torch": "1.0"}),
        lambda entry: msgspec.structs.replace(
            entry, winner=msgspec.structs.replace(entry.winner, candidate=Candidate("quack", 72, 8))
        ),
        lambda entry: msgspec.structs.replace(entry, winner=msgspec.structs.replace(entry.winner, candidate=None)),
        lambda entry: msgspec.structs.replace(entry, winner=msgspec.structs.replace(entry.winner, program=7)),
        lambda entry: msgspec.structs.replace(
            entry, winner=msgspec.structs.replace(entry.winner, backend="ATEN", name="nothing")
        ),
    ],
    ids=["version", "illegal candidate", "no candidate", "no such program", "no such choice"],
)
def test_an_entry_that_does_not_hold_here_is_measured_again(contests, change):
    contests()
    (entry,) = TuningStore().entries()
    TuningStore().put(change(entry))
    assert not contests()["from_cache"]


def test_force_decides_for_itself(contests, inductor_config):
    contests()
    with inductor_config.patch(nvgemm_fusion_force=True):
        assert not contests()["from_cache"]


def run_command(cache, *arguments):
    environment = {**os.environ, "NVGEMM_FUSION_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    command = [COMMAND, "cache", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_from_one_machine_to_another(tmp_path):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "h200.json"
    assert run_command(here, "export", file).returncode == 2
    TuningStore(here).merge(
        [entry_of(), entry_of(m=128), entry_of(m=256, target="Z80"), entry_of(m=512, versions={"torch": "1.0"})]
    )
    assert "4 decisions" in run_command(here, "info").stdout
    assert run_command(here, "export", file).stdout.startswith("4 decisions")
    imported = run_command(there, "import", file)
    assert imported.returncode == 0, imported.stderr
    assert "took in 2 of 4" in imported.stdout
    assert "skipped 1: target: measured on Z80" in imported.stdout and "skipped 1: version: " in imported.stdout
    assert "as new" in run_command(there, "import", file).stdout
    assert "took in 2" in run_command(there, "import", file, "--overwrite").stdout
    assert json.loads(run_command(there, "info", "--json").stdout)["decisions"] == 2
    assert "2 decisions" in run_command(there, "clear").stdout
    assert json.loads(run_command(there, "info", "--json").stdout)["decisions"] == 0


@pytest.mark.parametrize("content", [None, "not json", '{"kind": "nvgemm-fusion tuning"}'])
def test_what_is_no_tuning_file_is_wrong_use(tmp_path, content):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    result = run_command(tmp_path, "import", file)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "Traceback" not in result.stderr
