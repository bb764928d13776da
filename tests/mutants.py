"""Faults put back by hand, each of which the suite has to find: `make mutants`.

    python tests/mutants.py [NAME ...]     checks all, or those named
    python tests/mutants.py --page         prints the table of docs/testing.md after the check

A mutant is one line of the program changed. The program is copied to a folder that comes first on the path, the line is
changed there, and the tests that should notice run until the first failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("fusion", "lowering", "scheduler_hooks", "bench")


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` (there once) becomes `new`. tests: the files of the suite that should notice."""

    fault: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "row and column swapped",
        "fusion/space.py",
        "kind = OperandKind.COLUMN if self.stride_m else OperandKind.ROW",
        "kind = OperandKind.ROW if self.stride_m else OperandKind.COLUMN",
        "tests/test_capture.py",
    ),
    Mutant(
        "a rounding that the graph states is dropped",
        "fusion/program.py",
        "        if compute_dtype(dtype) == dtype or (is_rounded and defined.dtype == dtype):",
        "        if True:",
        "tests/test_capture.py",
    ),
    Mutant(
        "a slice of an operand is read from the start of its buffer",
        "scheduler_hooks/kernel_call.py",
        "views.append(View(where.buffer, size, strides, access.offset))",
        "views.append(View(where.buffer, size, strides, 0))",
        "tests/test_capture.py",
    ),
    Mutant(
        "two reads of one buffer are one operand, wherever they read",
        "scheduler_hooks/capture.py",
        "self.builder.operand(BufferAccess(name, access), operand)",
        "self.builder.operand(BufferAccess(name, Access(access.stride_m, access.stride_n, 0)), operand)",
        "tests/test_capture.py",
    ),
    Mutant(
        "a value is taken although another element of it is read",
        "scheduler_hooks/capture.py",
        "            if access != self.capture.written[name]:",
        "            if False:",
        "tests/test_pass.py tests/test_capture.py",
    ),
    Mutant(
        "alpha scales the bias, too",
        "scheduler_hooks/gemm.py",
        "            if self.beta != 1:",
        "            if self.alpha != 1:\n"
        "                bias = builder.op('mul', bias, builder.constant(self.alpha))\n"
        "            if self.beta != 1:",
        "tests/test_capture.py",
    ),
    Mutant(
        "a column-major tile is read as a row-major one",
        "fusion/space.py",
        "return Operand(OperandKind.TILE, dtype, layout.major)",
        "return Operand(OperandKind.TILE, dtype)",
        "tests/test_capture.py tests/test_space.py",
    ),
    Mutant(
        "0.0 and -0.0 are one constant",
        "fusion/program.py",
        "key = replace(instruction, constant=None), _constant_to_json(instruction.constant)",
        "key = replace(instruction, constant=None), instruction.constant",
        "tests/test_program.py",
    ),
    Mutant(
        "a region goes on although a path leaves it and comes back",
        "fusion/regions.py",
        "        if refusal is None and not needed <= {gemm, *grown}:",
        "        if False:",
        "tests/test_regions.py",
    ),
    Mutant(
        "what a reader computes anyway is written for it",
        "fusion/regions.py",
        "            if node == gemm or not is_written:",
        "            if False:",
        "tests/test_regions.py",
    ),
    Mutant(
        "of several values that leave a region the last is stored",
        "fusion/regions.py",
        "            stored.append(node)",
        "            stored[:] = [node]",
        "tests/test_stores.py",
    ),
    Mutant(
        "a stored value has no memory of its own",
        "scheduler_hooks/codegen.py",
        "stored = {output.buffer for output in call.captured.outputs}",
        "stored = {output.buffer for output in call.captured.outputs[:1]}",
        "tests/test_stores.py",
    ),
    Mutant(
        "the maximum drops a NaN",
        "lowering/expressions.py",
        '"cutlass.select_(({0} > {1}) | ({0} != {0}), {0}, {1})"',
        '"cutlass.select_({0} > {1}, {0}, {1})"',
        "tests/test_operations.py",
    ),
    Mutant(
        "a difference is emitted the wrong way round",
        "lowering/expressions.py",
        'Row("sub", "{0} - {1}"',
        'Row("sub", "{1} - {0}"',
        "tests/test_operations.py",
    ),
    Mutant(
        "operands are emitted in another order",
        "lowering/emit.py",
        "names = [ACCUMULATOR_NAME, *(operand_name(index) for index in range(len(program.operands)))]",
        "names = [ACCUMULATOR_NAME, *(operand_name(index) for index in reversed(range(len(program.operands))))]",
        "tests/test_reference.py tests/test_capture.py",
    ),
    Mutant(
        "a wrong result passes for a right one",
        "lowering/verification.py",
        "        if wrong.sum().item() > STRAY * wrong.numel():",
        "        if wrong.all().item():",
        "tests/test_verification.py",
    ),
    Mutant(
        "float32 is rounded to TF32, which nobody has allowed",
        "scheduler_hooks/gemm.py",
        '    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":',
        "    if False:",
        "tests/test_tf32.py",
    ),
    Mutant(
        "a TF32 kernel is compared with the product in float32",
        "lowering/verification.py",
        "    if matrix.dtype == torch.float32:",
        "    if False:",
        "tests/test_tf32.py",
    ),
    Mutant(
        "an operand is rounded to memory that Inductor's kernel has in a register",
        "scheduler_hooks/fusion_pass.py",
        "    if config.emulate_precision_casts:  # then Inductor's kernels round it, too",
        "    if True:",
        "tests/test_pass.py",
    ),
    Mutant(
        "a negative int8 leaves the kernel as a negative float",
        "lowering/emit.py",
        '    return f"Float32({name} & Int32(255))" if store.dtype == torch.int8 else f"Float32({name})"',
        '    return f"Float32({name})"',
        "tests/test_fuzz.py",
    ),
    Mutant(
        "any activation is taken for one of cuBLASLt's",
        "lowering/cublaslt.py",
        "        if torch.allclose(result, function(product + row), rtol=1e-10, atol=1e-12):",
        "        if torch.allclose(result, function(product + row), rtol=1e-1, atol=1e-1):",
        "tests/test_cublaslt.py",
    ),
    Mutant(
        "a kernel that writes behind its output takes part in the contest",
        "lowering/trial_worker.py",
        "        return bool((before == PATTERN).all() and (after == PATTERN).all())",
        "        return bool((before == PATTERN).all())",
        "tests/test_trial.py",
    ),
    Mutant(
        "a kernel that hangs is tried again by the next process",
        "lowering/trial.py",
        "                store.ban(kernel.spec, refusal)",
        "                pass",
        "tests/test_trial.py",
    ),
    Mutant(
        "a buffer that a kernel reads is freed before",
        "scheduler_hooks/alternatives.py",
        "inputs, scalars = contest.node.node.inputs,",
        "inputs, scalars = choice.input_nodes,",
        "tests/test_pass.py",
    ),
    Mutant(
        "a kernel that would wait for itself is a candidate",
        "lowering/shared_memory.py",
        "LEAST_STAGES = 2",
        "LEAST_STAGES = 1",
        "tests/test_tf32.py",
    ),
    Mutant(
        "the last of K is left out where it is no whole vector",
        "lowering/candidates.py",
        "    if problem.k * problem.dtype.itemsize % ALIGNMENT_BYTES:",
        "    if False:",
        "tests/test_skinny.py",
    ),
    Mutant(
        "Inductor finds no time of ours, and compiles its own anew",
        "scheduler_hooks/choices.py",
        "        return self.known_as",
        "        return self.name",
        "tests/test_pass.py",
    ),
    Mutant(
        "no kernel of Inductor's is generated while its scheduler is under construction",
        "scheduler_hooks/torch_versions.py",
        "if not hasattr(scheduler, name):",
        "if hasattr(scheduler, name):",
        "tests/test_pass.py",
    ),
    Mutant(
        "after a graph that was cached, kernels compile one by one",
        "lowering/compiler.py",
        "            _compiler.allow(workers)",
        "            pass",
        "tests/test_compile.py",
    ),
    Mutant(
        "a kernel is tried when the last is compiled",
        "scheduler_hooks/measurement.py",
        "_tried(entrant, device, store) for entrant in entrants]",
        "_tried(entrant, device, store) for entrant in list(entrants)]",
        "tests/test_measurement.py",
    ),
    Mutant(
        "who is far behind is timed in every place of B",
        "scheduler_hooks/measurement.py",
        "return _finalists(windows)",
        "return list(windows[0])",
        "tests/test_measurement.py",
    ),
    Mutant(
        "a contest is held on a GPU that never rests",
        "scheduler_hooks/measurement.py",
        "stopwatch.time(runs, REST * (len(windows) % 2))",
        "stopwatch.time(runs, 0.0)",
        "tests/test_measurement.py",
    ),
    Mutant(
        "a template is compiled with a region, though it takes longer without",
        "scheduler_hooks/measurement.py",
        "isinstance(part, Timing) and part.us > whole.us",
        "isinstance(part, Timing) and False",
        "tests/test_measurement.py",
    ),
    Mutant(
        "kernels are timed while this process compiles others",
        "scheduler_hooks/workload.py",
        "        wait(tuple(_compiling_here))",
        "        pass",
        "tests/test_workload.py",
    ),
    Mutant(
        "a contest is decided with B in one place",
        "scheduler_hooks/workload.py",
        "return range(0, PLACES * step, step) if step else range(1)",
        "return range(1)",
        "tests/test_workload.py",
    ),
    Mutant(
        "the host's lateness is timed",
        "scheduler_hooks/stopwatch.py",
        "is_in_time = not begins.query()",
        "is_in_time = True",
        "tests/test_stopwatch.py",
    ),
    Mutant(
        "a shared GPU is steady if there are windows enough",
        "fusion/decision.py",
        "if within > UNSTEADY * mean:",
        "if False:",
        "tests/test_decision.py",
    ),
    Mutant(
        "a window's refusal is forgotten in the next",
        "scheduler_hooks/stopwatch.py",
        "refusal = next((timed for timed in found if isinstance(timed, Refusal)), None)",
        "refusal = None if isinstance(found[-1], Timing) else found[-1]",
        "tests/test_stopwatch.py",
    ),
    Mutant(
        "kernels are compiled for nodes that another GEMM takes before",
        "scheduler_hooks/alternatives.py",
        "return region is None or not set(region.nodes).intersection(wanted)",
        "return True",
        "tests/test_pass.py",
    ),
    Mutant(
        "a kernel is loaded on its thread's device, and not on its caller's",
        "lowering/launcher.py",
        "with torch.cuda.device(device):",
        "with torch.cuda.device(-1):",
        "tests/test_store.py",
    ),
    Mutant(
        "a kernel that was found wrong is used again",
        "lowering/store.py",
        '            if "banned" in content:',
        "            if False:",
        "tests/test_verification.py",
    ),
)


def main(arguments: list[str]) -> int:
    """Checks mutants; 0 when each was found."""
    names = [argument for argument in arguments if argument != "--page"]
    survivors, rows = 0, []
    for mutant in MUTANTS:
        if names and mutant.fault not in names:
            continue
        found_by = check(mutant)
        survivors += found_by is None
        rows.append(f"| {mutant.fault} | `{mutant.file}` | {f'`{found_by}`' if found_by else '**nobody**'} |")
        print(f"{mutant.fault}: {found_by or 'NOT FOUND'}", flush=True)
    if "--page" in arguments:
        print("| fault | in | found by |\n| --- | --- | --- |", *rows, sep="\n")
    return int(survivors > 0)


def check(mutant: Mutant) -> str | None:
    """The first test that fails with the fault in place, None where all pass."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "nvgemm_fusion"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        path = package / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.fault}: {mutant.file} has {source.count(mutant.old)} lines like {mutant.old!r}")
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
        environment = {**os.environ, "PYTHONPATH": folder}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", result.stdout, re.MULTILINE)
    return failed[1] if result.returncode == 1 and failed else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
