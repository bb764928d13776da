"""Workload: the tensors of one contest on the GPU, and each entrant as a function that can be timed on them.

All entrants share one tensor a buffer, so that what a GEMM has just written is as warm for the kernel after it as it
will be in the compiled graph, and so that a weight is held once. Contents are random: zeros would draw less power
and run faster. They are scaled so that the product is of order one, as in a model: where exponentials overflow, some
instructions take a slower path.

The GEMM's B lies in one place after the other, all of them within memory for two of it. Where it lies changes the time
of a kernel that waits for it by 1 to 3 percent, and not of each kernel alike
(`bench/results/h200-conditions.json`): with one place, the luckiest would win.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.testing import rand_strided
from torch._dynamo.utils import preserve_rng_state
from torch._inductor import config
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.select_algorithm import ExternKernelCaller
from torch._inductor.virtualized import V
from torch._prims_common import compute_required_storage_length
from torch._subclasses import FakeTensorMode

from ..fusion.reasons import Reason, Refusal, described
from ..lowering.launcher import bind
from .contest import Contender, Contest
from .stopwatch import Run

Making = Callable[[], Run]
"""A kernel in the making: waits for its compiler, and gives what runs it with B where it lies now."""
Prepared = list[Making] | Refusal
"""The kernels of an entrant, in the order in which they run, or why it has none."""
PLACES = 8
"""In which B may lie, at equal distances. They overlap: tuning may take twice the memory of the tensors, no more."""
ALIGNMENT_BYTES = 512
"""Of a place, as of what torch's allocator gives."""

_compiling_here: set[Future] = set()
"""What threads of this process compile, because Inductor's pool of processes takes seconds to start (torch 2.15 starts
it with the first choice that it compiles). They share the interpreter with whatever times a kernel."""


def place_starts(room: int, extent: int, alignment: int) -> range:
    """Where the PLACES of something of `extent` elements begin within `room` elements: at multiples of `alignment`
    elements, and in one place where there is no room to move."""
    step = (room - extent) // (PLACES - 1) // alignment * alignment
    return range(0, PLACES * step, step) if step else range(1)


class Workload:
    """Builds what the stopwatch runs. Tensors are allocated as entrants need them, and freed by `release`."""

    def __init__(self, contest: Contest) -> None:
        self.contest = contest
        self._buffers: dict[str, torch.Tensor] = {}
        self._making: dict[tuple[str, ...], Making] = {}
        self._bound: dict[tuple[str, ...], Run] = {}

    def prepare(self, entrants: Sequence[Contender]) -> list[Prepared]:
        """What `runs` takes of each entrant. Starts the compilation of Inductor's kernels for all of them, side by
        side, which may be long before `runs` waits for it. Nothing is to be timed until then."""
        return [self._prepared(entrant) for entrant in entrants]

    def gemm_alone(self, choice: Any) -> Prepared:
        """What `runs` takes of a stock choice without any node. There is nothing to compile."""
        return [functools.partial(self._stock_gemm, choice)]

    def runs(self, prepared: Sequence[Prepared]) -> list[Run | Refusal]:
        """Each entrant as a function, for B where it lies now, or why it has none (a kernel that does not load). By
        then, nothing is being compiled in this process, for whatever contest."""
        wait(tuple(_compiling_here))
        return [_made(kernels) for kernels in prepared]

    def places(self) -> Iterator[None]:
        """Moves B to each of its places. Functions made for one place are of no use in the next. Where there is no room
        for B to move, there is one place."""
        name = self.contest.gemm.b.buffer
        b = V.graph.get_buffer(name)
        size, stride = _hints(b.get_size()), _hints(b.get_stride())
        extent = compute_required_storage_length(size, stride, 0)
        try:
            room = self._random(name, (2 * extent,), (1,))
        except torch.OutOfMemoryError:
            room = self._random(name, (extent,), (1,))
        for start in place_starts(len(room), extent, ALIGNMENT_BYTES // room.itemsize):
            self._bound.clear()
            self._buffers[name] = torch.as_strided(room, size, stride, start)
            yield

    def release(self) -> None:
        """Frees the tensors, as far as nothing else holds them."""
        self._buffers.clear()
        self._making.clear()  # they know this object, which would keep its tensors
        self._bound.clear()

    def _prepared(self, entrant: Contender) -> Prepared:
        if entrant.alternative.refusal is not None:
            return entrant.alternative.refusal
        try:
            if entrant.call is not None:
                gemm = self._kernel(entrant)
            elif entrant.region is not None:
                gemm = self._fused_triton(entrant)
            else:
                gemm = functools.partial(self._stock_gemm, entrant.choice)
            before, after = map(self._kernels, self.contest.separate(entrant.region))
            return [*before, gemm, *after]
        except Exception as error:  # one entrant is out, the others go on
            return Refusal(Reason.RUN_ERROR, described(error))

    def _kernel(self, entrant: Contender) -> Making:
        launcher = functools.cache(lambda: bind(entrant.compiled))  # loaded once for all places

        def make() -> Run:
            launch = launcher()
            arguments = [
                _viewed(self._buffer(view.buffer), view.size, view.strides, view.offset)
                for view in entrant.call.arguments()
            ]
            return lambda: launch(*arguments)

        return make

    def _stock_gemm(self, choice: Any) -> Run:
        product = self._buffer(self.contest.node.node.get_name())
        if isinstance(choice, ExternKernelCaller):
            function = choice.to_callable()
            inputs = [self._view(node) for node in choice.input_nodes]
            return (lambda: function(*inputs, out=product)) if choice.has_out_variant else (lambda: function(*inputs))
        # Triton templates address their inputs from the start of the buffer, and take each buffer once.
        bases = {node.get_name(): self._buffer(node.get_name()) for node in choice.input_nodes}
        # Made anew with each run, because it is bound to the stream that is current when it is made.
        return lambda: choice.bmreq.make_run_fn(*bases.values(), out=product)()

    def _fused_triton(self, entrant: Contender) -> Making:
        node = self.contest.node
        members = [self.contest.nodes[name] for name in entrant.region.nodes]
        with node.node.swap_as_triton_caller(entrant.choice):
            return self._generated([node, *members], entrant.choice.name)

    def _kernels(self, names: Sequence[str]) -> list[Making]:
        """The kernels that Inductor makes of these nodes, in a topological order, when nothing takes them in."""
        groups = grouped([self.contest.nodes[name] for name in names])
        return [self._generated(group.get_nodes()) for group in groups]

    def _generated(self, nodes: Sequence[BaseSchedulerNode], choice: str = "") -> Making:
        """The kernel that Inductor generates for `nodes` (of a GEMM as the template `choice`), which many entrants may
        have in common."""
        key = choice, *(node.get_name() for node in nodes)
        if key not in self._making:
            future, module = self.contest.node.scheduler.compile_kernel(list(nodes))
            compiled = _threads().submit(_compile, future, module)
            if future is None:
                _compiling_here.add(compiled)
                compiled.add_done_callback(_compiling_here.discard)

            def make() -> Run:
                if key not in self._bound:
                    compiled.result()
                    with FakeTensorMode():  # only what they look like: real ones would take as much room again
                        looks = module.get_args()
                    arguments = self._adopt(looks, nodes)
                    self._bound[key] = lambda: module.call(arguments)
                return self._bound[key]

            self._making[key] = make
        return self._making[key]

    def _adopt(self, arguments: Sequence[Any], nodes: Sequence[Any]) -> list[Any]:
        """The arguments of a generated kernel, given as fake tensors: ours where they look alike, else zeros (of a
        workspace, a kernel expects them).

        Two buffers that look alike may change places; they are alike for the time that it takes, too.
        """
        names = {dep.name for node in nodes for dep in (*node.read_writes.reads, *node.read_writes.writes)}
        names |= {x.get_name() for node in nodes if node.is_template() for x in node.node.inputs}
        product = self.contest.node.node.get_name()
        ours = [self._buffer(name) for name in sorted(names, key=lambda name: name != product)]
        adopted = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                look = _look(argument)
                found = next((i for i, tensor in enumerate(ours) if _look(tensor) == look), None)
                argument = _zeros_like(argument) if found is None else ours.pop(found)
            adopted.append(argument)
        return adopted

    def _view(self, node: Any) -> torch.Tensor:
        layout = node.get_layout()
        return _viewed(
            self._buffer(node.get_name()), _hints(layout.size), _hints(layout.stride), *_hints([layout.offset])
        )

    def _buffer(self, name: str) -> torch.Tensor:
        """The tensor behind the buffer `name` of the graph."""
        if name not in self._buffers:
            node = V.graph.get_buffer(name)
            self._buffers[name] = self._random(name, _hints(node.get_size()), _hints(node.get_stride()))
        return self._buffers[name]

    def _random(self, name: str, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """Contents for the buffer `name`."""
        node = V.graph.get_buffer(name)
        with preserve_rng_state():
            tensor = rand_strided(size, stride, dtype=node.get_dtype(), device=node.get_device())
            if not tensor.is_floating_point():
                tensor.random_(0, 2)  # which are zeros so far
        return tensor.mul_(self.contest.gemm.problem.k ** -0.5) if name == self.contest.gemm.b.buffer else tensor


@functools.lru_cache(maxsize=None)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, config.compile_threads), thread_name_prefix="nvgemm-inductor")


def _compile(future: Future | None, module: ModuleType) -> None:
    """Has a kernel of Inductor's compiled and loaded, which otherwise its first run does. future: its compilation in a
    process of Inductor's pool, None where that is not there (yet)."""
    if future is not None:
        future.result()
    module.triton_.precompile()  # what the process has compiled is found on disk


def _made(kernels: Prepared) -> Run | Refusal:
    if isinstance(kernels, Refusal):
        return kernels
    try:
        runs = [make() for make in kernels]
    except Exception as error:  # one entrant is out, the others go on
        return Refusal(Reason.RUN_ERROR, described(error))
    return lambda: [run() for run in runs]


def grouped(nodes: Sequence[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """`nodes`, in a topological order, fused with each other as far as Inductor's code generation allows.

    The scheduler's own `can_fuse` also looks at streams, which it assigns after our pass.
    """
    groups: list[BaseSchedulerNode] = []
    for node in nodes:
        backend = node.scheduler.get_backend(node.get_device())
        place = next((i for i, group in enumerate(groups) if backend.can_fuse_vertical(group, node)), None)
        if place is None:
            groups.append(node)
        else:
            groups[place] = backend.fuse(groups[place], node)
    return groups


def _viewed(buffer: torch.Tensor, size: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """A view whose `offset` counts from where `buffer` starts, which need not be where its memory does."""
    return torch.as_strided(buffer, size, strides, buffer.storage_offset() + offset)


def _look(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


def _zeros_like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()


def _hints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(V.graph.sizevars.simplify(value)) if not isinstance(value, int) else value for value in values)
