"""Residency: how many clusters of blocks the GPU at hand holds at once.

The driver knows (`cuOccupancyMaxActiveClusters`): a GPU whose processing clusters are uneven holds fewer than its
number of multiprocessors would say. It is asked about blocks that take all of a multiprocessor's shared memory, as
those of a GEMM do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_EMPTY = b""".version 7.8
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
\0"""


@functools.lru_cache(maxsize=None)
def resident_clusters(cluster_size: int, device: int) -> int:
    """How many clusters of `cluster_size` blocks the CUDA device number `device` holds at once.

    Raises RuntimeError with the driver's error.
    """
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context that the driver wants to be asked in
        shared_bytes = _answer(driver.cuDeviceGetAttribute(attribute, _answer(driver.cuCtxGetDevice())))
        module = _answer(driver.cuModuleLoadData(_EMPTY))
        try:
            kernel = _answer(driver.cuModuleGetFunction(module, b"empty"))
            settings = driver.CUfunction_attribute
            _answer(driver.cuFuncSetAttribute(kernel, settings.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
            _answer(
                driver.cuFuncSetAttribute(
                    kernel, settings.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
                )
            )
            return _answer(driver.cuOccupancyMaxActiveClusters(kernel, _launch(cluster_size, shared_bytes)))
        finally:
            driver.cuModuleUnload(module)


def _launch(cluster_size: int, shared_bytes: int) -> Any:
    """One cluster, as a launch."""
    from cuda.bindings import driver

    size = driver.CUlaunchAttribute()
    size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    extent = driver.CUlaunchAttributeValue()
    extent.clusterDim.x, extent.clusterDim.y, extent.clusterDim.z = cluster_size, 1, 1
    size.value = extent
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = cluster_size, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
    launch.sharedMemBytes = shared_bytes
    launch.attrs, launch.numAttrs = [size], 1
    return launch


def _answer(result: tuple) -> Any:
    """What a call of the driver's gives besides its status."""
    status, *values = result
    if status.value:
        raise RuntimeError(f"the driver says {status.name}")
    return values[0] if values else None
