"""WHERE the project meets Inductor: the only folder that imports `torch._inductor`.

    autoload        runs at the end of `import torch`; leaves an import hook behind
    install         connects and disconnects the extension points
    settings        our entries of `torch._inductor.config`
    torch_versions  what differs between torch versions
    choices         candidates into the template buffer, while a GEMM is lowered
    gemm            a GEMM of Inductor's IR in the words of `fusion`
    capture         loop bodies -> EpilogueProgram
    graph           scheduler nodes -> the graph that regions are found in
    alternatives    every way to compute a region, each as something that can be run
    stopwatch       GPU time of such things, side by side
    fusion_pass     the scheduler pass: measures, decides, fuses
    codegen         the scheduling backend: one call in the wrapper for what was decided
    virtual_device  all of it for a GPU that is not there

One GEMM walks from `choices` (lowering) through `fusion_pass` (scheduling) to `codegen`; this package imports
nothing of Inductor before Inductor has been imported by somebody else.
"""
