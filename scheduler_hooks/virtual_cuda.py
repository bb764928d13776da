"""The virtual CUDA: what a driver would say of a GPU that is not there.

`virtual_cuda(target)` answers torch, Inductor and Triton from `lowering.targets`; nothing touches a driver. What would
only have an effect on a GPU (to synchronise, to seed, to empty a cache) has none, no memory is in use, and an event
takes the time of the clock.
"""

from __future__ import annotations

import collections
import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from ..lowering.targets import Target

DEVICE = torch.device("cuda", 0)

_NOTHING = """
    _lazy_init _record_memory_history _set_stream_by_id empty_cache init ipc_collect manual_seed manual_seed_all
    memory._dump_snapshot memory._record_memory_history nvtx.mark nvtx.range_pop nvtx.range_push profiler.start
    profiler.stop reset_accumulated_memory_stats reset_max_memory_allocated reset_peak_memory_stats seed seed_all
    set_device set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream set_sync_debug_mode
    synchronize
""".split()
_ZERO = """
    _exchange_device _maybe_exchange_device current_device initial_seed max_memory_allocated max_memory_reserved
    memory_allocated memory_reserved utilization
""".split()
_YES = "is_available is_bf16_supported is_initialized is_tf32_supported".split()
_NO = "_is_in_bad_fork is_current_stream_capturing".split()
"""Functions of `torch.cuda` that return nothing, 0, True and False, whatever they are given."""

_OF_ACCELERATOR = """
    empty_cache is_available max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats
    reset_accumulated_memory_stats reset_peak_memory_stats synchronize device_count current_stream set_stream
""".split()
"""Functions of `torch.accelerator` that are called like those of `torch.cuda`."""


class Stream:
    """A stream on which nothing runs."""

    device = DEVICE
    device_index = stream_id = cuda_stream = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self, *_: Any) -> None:
        pass

    wait_event = wait_stream = synchronize


class Event:
    """A point in time on the clock: between two of them, more than nothing has passed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter()

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return max((end.seconds - self.seconds) * 1e3, 1e-3)

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        pass

    wait = synchronize


@contextlib.contextmanager
def virtual_cuda(target: Target) -> Iterator[None]:
    """Inside the block there is one GPU, a `target`."""
    import triton
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch.utils._triton import has_triton

    # Dynamo makes tables of functions when it needs them: they are to hold torch's own, not those from here.
    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    with contextlib.ExitStack() as stack:
        for name, answer in _answers(target).items():
            stack.enter_context(mock.patch(name, answer, create=True))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _driver(target), create=True))
        # Whether Triton works is asked once and remembered; the answer differs inside and outside.
        has_triton.cache_clear()
        stack.callback(has_triton.cache_clear)
        yield


def _answers(target: Target) -> dict[str, Any]:
    """What is to be replaced, by its full name, and with what."""
    properties = _properties(target)
    capability, memory = target.capability, target.memory_bytes
    of_cuda = {
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **dict.fromkeys(_ZERO, lambda *_, **__: 0),
        **dict.fromkeys(_YES, lambda *_, **__: True),
        **dict.fromkeys(_NO, lambda *_, **__: False),
        "Event": Event,
        "Stream": Stream,
        "_get_device_properties": lambda *_, **__: properties,
        "current_stream": lambda *_, **__: Stream(),
        "default_stream": lambda *_, **__: Stream(),
        "device_count": lambda: 1,
        "get_device_capability": lambda *_, **__: capability,
        "get_device_name": lambda *_, **__: properties.name,
        "get_device_properties": lambda *_, **__: properties,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "mem_get_info": lambda *_, **__: (memory, memory),
        "memory_stats": lambda *_, **__: collections.defaultdict(int),
        "memory_summary": lambda *_, **__: "",
        "stream": lambda stream: stream or Stream(),
    }
    interface = "torch._dynamo.device_interface.CudaInterface"
    return {
        **{f"torch.cuda.{name}": answer for name, answer in of_cuda.items()},
        **{f"torch.accelerator.{name}": of_cuda[name] for name in _OF_ACCELERATOR},
        "torch.accelerator.current_accelerator": lambda *_, **__: torch.device("cuda"),
        "torch.accelerator.current_device_index": lambda: 0,
        "torch.accelerator.set_device_index": lambda *_: None,
        "torch._C._cuda_getCurrentRawStream": lambda *_: 0,
        f"{interface}.is_available": staticmethod(lambda: True),
        f"{interface}.current_device": staticmethod(lambda: 0),
        f"{interface}.get_compute_capability": staticmethod(lambda *_: capability[0] * 10 + capability[1]),
        f"{interface}.get_device_properties": staticmethod(lambda *_: properties),
    }


def _properties(target: Target) -> types.SimpleNamespace:
    """What `torch.cuda.get_device_properties` gives, as far as Inductor reads it."""
    return types.SimpleNamespace(
        name=f"NVIDIA {target.name}",
        major=target.capability[0],
        minor=target.capability[1],
        multi_processor_count=target.multiprocessors,
        total_memory=target.memory_bytes,
        L2_cache_size=target.l2_bytes,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=target.shared_bytes_per_block,
        shared_memory_per_multiprocessor=target.shared_bytes_per_block + 1024,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=target.threads_per_multiprocessor,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        is_integrated=False,
    )


def _driver(target: Target) -> Any:
    """Triton's view of the device: a target to compile for, and nothing to launch on."""
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target.capability[0] * 10 + target.capability[1], 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: DEVICE,
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
        get_empty_cache_for_benchmark=lambda: torch.empty(1, device=DEVICE),
        clear_cache=lambda cache: None,
    )
