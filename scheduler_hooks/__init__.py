"""WHERE the project meets Inductor: the only folder that imports `torch._inductor`.

    autoload        runs at the end of `import torch`; leaves an import hook behind
    install         connects and disconnects the extension points
    settings        our entries of `torch._inductor.config`
    torch_versions  what differs between torch versions
    choices         candidates into the template buffer, while a GEMM is lowered
    gemm            a GEMM of Inductor's IR in the words of `fusion`
    capture         loop bodies -> EpilogueProgram
    graph           scheduler nodes -> the graph that regions are found in
    contest         a GEMM with the regions around it, and who competes to compute them
    alternatives    those that do, each with its time
    measurement     what the stopwatch says of them, in several places of memory
    workload        the tensors of one region on the GPU, and each alternative as a function of them
    stopwatch       GPU time of such functions, side by side
    fusion_pass     the scheduler pass: measures, decides, fuses
    tuning          a decision that was made before, from disk
    kernel_call     a decided kernel with the buffers it is called on, as a line of generated code
    codegen         the scheduling backend: one call in the wrapper for what was decided
    virtual_device  all of it for a GPU that is not there
    virtual_cuda    what its driver would say
    virtual_script  somebody's program, run on it
    fake_gpu        the CUDA tensors of such a program
    fake_attention  attention over them
    fake_autocast   autocast over them
    stock_fusions   what Inductor fuses by itself, counted
    recording       a block in which everything is decided by us and logged, with a GPU or without

One GEMM walks from `choices` (lowering) through `fusion_pass` (scheduling) to `codegen`; this package imports
nothing of Inductor before Inductor has been imported by somebody else.
"""
