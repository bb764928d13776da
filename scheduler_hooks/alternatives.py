"""Every way to compute a region, each with a time: the entrants of the contest that `fusion.decision` judges.

For a GEMM with the nodes of its largest region, those are: each stock choice with the nodes in a kernel of their
own, each Triton template with a region fused, and each of our candidates with nothing or with a region fused. All of
them compute the same nodes, so their times compare. The same nodes are also those that share a kernel with the region
in stock's code: nodes beside the GEMM that compute an operand, and readers that compute the region's result themselves,
as a norm does with a residual. Fusing the region into the GEMM leaves them to a kernel of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch._dynamo.utils import dynamo_timed
from torch._inductor import config
from torch._inductor.ir import ChoiceCaller
from torch._inductor.select_algorithm import ExternKernelCaller, TritonTemplateCaller

from ..fusion.decision import Alternative, Backend, Status, Timing
from ..fusion.reasons import Reason, Refusal
from ..fusion.regions import Region
from ..lowering import cost_model
from ..lowering.candidates import candidates
from ..lowering.compiler import CompiledKernel, shared_compiler
from ..lowering.cublaslt import CANDIDATE, activation
from ..lowering.kernel import Candidate, KernelSpec
from ..lowering.trial import shared_trial
from .choices import NvgemmChoice
from .contest import Contender, Contest
from .kernel_call import KernelCall
from .measurement import timed
from .virtual_device import current_virtual_device
from .workload import Workload

TRITON_TEMPLATES = 2
"""How many of the Triton templates, by Inductor's own timing, are timed again here."""


def contenders(contest: Contest) -> list[Contender] | Refusal:
    """All entrants with their times, stock first; a refusal when stock has to be left alone."""
    if not contest.programs:  # the GEMM alone has none: its result lies in no way that a kernel can write
        return contest.refusals[-1]
    compiling = _start_compiling(contest)
    if current_virtual_device() is not None:
        return [_with_modelled_time(contest, entrant) for entrant in (*_modelled_stock(contest), *compiling)]
    prepared = _prepared_stock(contest)
    if isinstance(prepared, Refusal):
        return prepared
    stock, workload = prepared
    return timed(workload, contest.node.get_device(), itertools.chain(stock, compiling))


def compile_ahead(contest: Contest, wanted: Collection[str]) -> None:
    """Starts the compilation of our candidates, long before `contenders` is called. wanted: nodes that another GEMM may
    take before. With one of them in its region, a kernel is compiled when it is known to compete."""
    compiler = shared_compiler(config.compile_threads)
    for region in list(contest.programs)[: 1 if config.nvgemm_fusion_force else None]:
        if _is_free(region, wanted):
            for entrant in _ours(contest, region):
                compiler.prepare(entrant.call.spec)


def time_stock_ahead(contest: Contest) -> None:
    """Has Inductor time its choices, as `contenders` would: of all GEMMs before anything is compiled beside that."""
    if contest.programs and current_virtual_device() is None:
        _timed_stock(contest)


def compile_stock_ahead(contest: Contest) -> None:
    """Starts the compilation of Inductor's kernels: `contenders` compiles them, too, and finds them in Inductor's
    caches."""
    if contest.programs and current_virtual_device() is None:
        _prepared_stock(contest)


def _is_free(region: Region | None, wanted: Collection[str]) -> bool:
    return region is None or not set(region.nodes).intersection(wanted)


def _prepared_stock(contest: Contest) -> tuple[list[Contender], Workload] | Refusal:
    """Stock's entrants, and the workload in which the kernels are being compiled of those that do not wait."""
    stock = _timed_stock(contest)
    if isinstance(stock, Refusal):
        return stock
    workload = Workload(contest)
    with torch.cuda.device(contest.node.get_device()):
        workload.prepare([entrant for entrant in stock if not entrant.waits])
    return stock, workload


def _timed_stock(contest: Contest) -> list[Contender] | Refusal:
    """Stock's entrants, once Inductor has timed its choices. Meanwhile the process starts in which ours run first."""
    shared_trial(contest.node.get_device()).prepare()
    with dynamo_timed("nvgemm_fusion.stock"):
        return _stock(contest)


def _start_compiling(contest: Contest) -> Iterator[Contender]:
    """Starts the compilation of our candidates, so that it runs while stock is timed. Each comes when it is compiled.

    When regions are to be fused by force, a shorter one is compiled only if no kernel of a longer one can be had.
    """
    compiler = shared_compiler(config.compile_threads)

    def submit(region: Region | None) -> list[tuple[Contender, Future]]:
        return [(entrant, compiler.submit(entrant.call.spec)) for entrant in _ours(contest, region)]

    def compiled(waiting: list[tuple[Contender, Future]]) -> Iterator[Contender]:
        return (entrant.with_kernel(future.result()) for entrant, future in waiting)

    if not config.nvgemm_fusion_force:
        return compiled([pair for region in contest.programs for pair in submit(region)])

    def of_the_longest() -> Iterator[Contender]:
        for region in contest.programs:
            entrants = list(compiled(submit(region)))
            yield from entrants
            if any(entrant.compiled is not None for entrant in entrants):
                break

    return of_the_longest()


def _ours(contest: Contest, region: Region | None) -> list[Contender]:
    """Our candidates with `region` fused, not compiled yet."""
    program, limit = contest.programs[region].program, config.nvgemm_fusion_candidates
    found = candidates(contest.gemm.problem, contest.target, program, limit)
    if isinstance(found, Refusal):
        contest.refusals.append(found)
        return []
    return [our_contender(contest, region, candidate) for candidate in found]


def our_contender(contest: Contest, region: Region | None, candidate: Candidate) -> Contender:
    """`candidate` with `region` fused, not compiled yet."""
    captured, choice = contest.programs[region], contest.choice
    spec = KernelSpec.of(contest.gemm.problem, candidate, captured.program, contest.target)
    alternative = _alternative(contest, Backend.NVGEMM, str(candidate), region)
    if not captured.program.is_identity:
        alternative = replace(alternative, epilogue=captured.program.digest)
    # Of what the template buffer reads: ATen's choices, and so our candidates while it is lowered, may read a bias that
    # nothing has expanded. From the inputs of what is chosen Inductor learns which buffers are still needed.
    inputs, scalars = contest.node.node.inputs, (choice.alpha, choice.beta)
    choice = NvgemmChoice(candidate, inputs, choice.layout, *scalars, choice.known_as)
    return Contender(alternative, region, choice, KernelCall(spec, contest.gemm, captured))


def stock_contender(contest: Contest, region: Region | None, choice: ChoiceCaller) -> Contender:
    """One of Inductor's own choices, with `region` fused (a Triton template's) or with nothing.

    A template with a region waits. To compile it takes longer than any other kernel of a contest (Triton 3.9 needs 4 s
    and more for a tile of 128 x 256), and it is no faster than the template alone, which does less; unless that writes
    more, as a product in bfloat16 is more than a result in float8.
    """
    alternative = _alternative(contest, backend_of(choice), choice.name, region)
    stored = () if region is None else [contest.nodes[name].node.get_dtype().itemsize for name in region.stored]
    waits = sum(stored) >= contest.node.node.get_dtype().itemsize
    return Contender(alternative, region, choice, waits=waits)


def backend_of(choice: ChoiceCaller) -> Backend:
    """Whose kernel it is."""
    if isinstance(choice, TritonTemplateCaller):
        return Backend.TRITON
    return Backend.ATEN if isinstance(choice, ExternKernelCaller) else Backend.OTHER


def _stock(contest: Contest) -> list[Contender] | Refusal:
    """Stock's entrants, after Inductor's own autotuning has put its choices in an order."""
    buffer = contest.node.node
    timings = buffer.choice_timings()
    ordered = sorted(timings, key=timings.__getitem__)
    if not ordered:
        return Refusal(Reason.NOT_MEASURED, "Inductor has timed none of its choices")
    known = [choice for choice in ordered if isinstance(choice, (ExternKernelCaller, TritonTemplateCaller))]
    if not known or ordered[0] is not known[0]:
        return Refusal(Reason.NOT_MEASURED, f"Inductor's fastest choice is {ordered[0]}")
    external = [choice for choice in known if isinstance(choice, ExternKernelCaller)]
    triton = [choice for choice in known if isinstance(choice, TritonTemplateCaller)][:TRITON_TEMPLATES]
    if contest.node.scheduler._has_layout_conflict_for_template(buffer):
        triton = []
    return _stock_contenders(contest, external, triton) + activation_contenders(contest)


def activation_contenders(contest: Contest) -> list[Contender]:
    """The product with bias and activation in cuBLASLt, where that is all of a region. Not on the virtual device: its
    model knows nothing that would tell this from a kernel of ours."""
    entrants, problem = [], contest.gemm.problem
    for region, captured in contest.programs.items():
        if region is not None and problem.dtype.itemsize == 2 and activation(captured.program):
            spec = KernelSpec.of(problem, CANDIDATE, captured.program, contest.target)
            alternative = _alternative(contest, Backend.ATEN, "addmm_activation", region)
            alternative = replace(alternative, epilogue=captured.program.digest)
            call, kernel = KernelCall(spec, contest.gemm, captured), CompiledKernel(spec, None, 0.0)
            entrants.append(Contender(alternative, region, contest.choice, call, kernel))
    return entrants


def _modelled_stock(contest: Contest) -> list[Contender]:
    """Stock's entrants on the virtual device: one of each kind, since there is nothing to tell two apart."""
    choices = contest.node.node.choices
    external = [choice for choice in choices if isinstance(choice, ExternKernelCaller)]
    triton = [choice for choice in choices if isinstance(choice, TritonTemplateCaller)]
    return _stock_contenders(contest, external[:1], triton[:1])


def _stock_contenders(
    contest: Contest, external: Sequence[ChoiceCaller], triton: Sequence[ChoiceCaller]
) -> list[Contender]:
    """External kernels unfused, Triton templates unfused and (unless that is switched off) with each region."""
    entrants = [stock_contender(contest, None, choice) for choice in (*external, *triton)]
    if config.epilogue_fusion:
        entrants += [stock_contender(contest, region, choice) for region in contest.regions for choice in triton]
    return entrants


def _alternative(contest: Contest, backend: Backend, name: str, region: Region | None) -> Alternative:
    fused = () if region is None else region.nodes
    before, after = contest.separate(region)
    return Alternative(backend, name, fused=fused, separate=before + after)


def _with_modelled_time(contest: Contest, entrant: Contender) -> Contender:
    """The entrant with the cost model's time in place of a stopwatch's."""
    alternative, problem = entrant.alternative, contest.gemm.problem
    if alternative.status is Status.FAILED:
        return entrant
    captured = contest.programs.get(entrant.region)
    program = contest.largest_program if captured is None else captured.program
    if alternative.backend is Backend.NVGEMM:
        us = cost_model.gemm_us(problem, [entrant.choice.candidate], program, contest.target)
    else:
        everything = candidates(problem, contest.target, program, None)
        us = cost_model.gemm_us(problem, everything, program, contest.target)
    if alternative.backend is Backend.TRITON:
        us *= cost_model.TRITON_FACTOR
    before, after = contest.separate(entrant.region)
    dtype = contest.node.node.get_dtype()
    if set(after) - set(contest.readers):
        us += cost_model.pointwise_us(problem, contest.largest_program, dtype, contest.target)
    elif after:  # what the readers write is the same for all
        us += cost_model.read_us(problem, program, contest.target)
    if before:
        us += cost_model.fill_us(problem, len(before), dtype, contest.target)
    return replace(entrant, alternative=replace(alternative, timing=Timing(us), status=Status.MODELLED))
