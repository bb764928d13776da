"""HOW a GEMM with an epilogue becomes kernels. Depends on `fusion`, and on no part of Inductor.

    targets         the GPUs that kernels are compiled for
    kernel          Candidate: one kernel configuration; KernelSpec: all that a compiled kernel depends on
    shared_memory   how many stages of A and B there is room for beside an epilogue
    spaces          which configurations the kernels of each architecture have
    occupancy       how long a configuration takes, from how it fills the machine
    heuristics      what nvMatmulHeuristics recommends
    candidates      the legal configurations of a problem, and the best N of them
    expressions     how each op is written in CuTe DSL, and how exact that is
    emit            EpilogueProgram -> the source of QuACK's epilogue function
    dry_run         that source, run on the CPU
    providers       a spec -> a library, by QuACK, the CUTLASS Operator API or `skinny`
    library         a kernel as a shared library: linked, and loaded
    skinny          a GEMM of our own, for products of at most 8 rows
    tf32            QuACK's GEMM with float32 operands
    cublaslt        the one kernel with an epilogue that torch itself has
    worker          a process of our own, asked one thing at a time
    compile_worker  the processes that compile
    compiler        many of those, at most N at a time
    store           compiled kernels on disk, up to a limit
    tuning          decisions that were measured, on disk and as a portable file
    verification    a kernel's result against the reference, on samples
    residency       how many clusters the GPU at hand holds at once
    launcher        a compiled kernel as a function of tensors
    trial_worker    the process in which a kernel runs first, on tensors that are watched
    trial           that process, and what becomes of a kernel that fails there
    cost_model      times for a GPU that is not there
    packages        which kernel packages are installed

One kernel walks down that list: `candidates` picks a configuration, a `KernelSpec` joins it with a program, the
`compiler` finds it in the `store` or has a worker make it, and generated code asks the `launcher` for it.
"""
