"""A trial worker whose kernels do what $BROKEN says: run by the tests of `trial` in place of the real one."""

import os
import signal
import sys
import time

import torch
from nvgemm_fusion.lowering import trial_worker
from nvgemm_fusion.lowering.launcher import bind

FAR = 1 << 40


def broken(how):
    def launch(*tensors):
        *_, out = tensors
        if how == "hangs":
            if out.is_cuda:
                torch.cuda._sleep(1 << 50)
                torch.cuda.synchronize()
            time.sleep(600)
        elif how == "crashes":
            if out.is_cuda:
                faulty_kernel()[(1,)](out, FAR)  # an illegal address: the GPU is lost to this process
            else:
                os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "raises":
            raise ValueError("no such shape")
        elif how == "has no room":
            raise torch.OutOfMemoryError("tried to allocate 3 TiB")
        elif how == "writes before":
            out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()
        elif how == "writes behind":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        elif how == "is wrong":
            out.zero_()

    return launch


def faulty_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def write(pointer, far):
        tl.store(pointer + far, 0.0)

    return write


def broken_bind(kernel):
    return bind(kernel) if os.environ["BROKEN"] == "not" else broken(os.environ["BROKEN"])


if __name__ == "__main__":
    if os.environ["BROKEN"] == "does not start":
        sys.exit(3)
    trial_worker.bind = broken_bind
    trial_worker.main()
