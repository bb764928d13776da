"""One process a GPU: work that is measured item by item, on all GPUs of a machine at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.queues import SimpleQueue
from typing import TypeVar

import torch

Item, Result = TypeVar("Item"), TypeVar("Result")


def over_gpus(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results of `function` for `items`, as they come. Each process has one GPU and its part of the cores, and
    takes the next item when it is done with one. Raises what `function` raises, and BrokenProcessPool when a process
    dies; then, or when it is closed, what has not begun is left undone."""
    gpus = torch.cuda.device_count()
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, gpus))
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for gpu in range(gpus):
        free.put(gpu)
    pool = ProcessPoolExecutor(gpus, context, initializer=_settle, initargs=(free, cores))
    try:
        for future in as_completed([pool.submit(function, item) for item in items]):
            yield future.result()
    finally:  # an item that fails, or a caller that has enough or is interrupted, ends it all: hours, at times
        pool.shutdown(cancel_futures=True)


def _settle(free: SimpleQueue, cores: int) -> None:
    """Makes one GPU the only one of this process, before anything asks for it, and keeps it and what it starts to its
    part of the cores: what compiles elsewhere would be in its times."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu = free.get()
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[gpu * cores : (gpu + 1) * cores] or allowed)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(cores)
