"""Side-by-side measurement: what the project claims, and how it was measured.

    graphs      the named graphs that are measured
    layers      layers of real models, with their GEMMs
    side_by_side  one function compiled under several settings
    kernels     one GEMM's kernels, as functions of B
    gpus        work on all GPUs of a machine
    rows        their results on file
    suite       the layers side by side with every backend of torch: `python -m nvgemm_fusion.bench.suite`
    plots       pictures of that
    candidates  every kernel configuration on their GEMMs: `python -m nvgemm_fusion.bench.candidates`
    conditions  their times by where B lies, and by how busy the GPU is: `python -m nvgemm_fusion.bench.conditions`
    fit         the constants of the ranking, fitted to those times: `python -m nvgemm_fusion.bench.fit`
    e2e         the decoder of Llama 3.1 8B, off and on: `python -m nvgemm_fusion.bench.e2e`
    compile_time  how long compiling takes, off and on: `python -m nvgemm_fusion.bench.compile_time`
    launch      host time of a call: `python -m nvgemm_fusion.bench.launch`
    smoke       four graphs at three sizes on a real GPU: `python -m nvgemm_fusion.bench.smoke`
    operations  every op on a real GPU: `python -m nvgemm_fusion.bench.operations`
    operations_page  the page `docs/operations.md`, with what was measured
    demo        a small MLP and a Llama block, on a GPU or on the virtual one: `make demo`
    table       decisions as a table for the terminal
    selection   which decisions somebody wants to see
    explanation one decision in full
    difference  what changed between two logs
    doctor      whether fusion can work here
    report      a decision log as one HTML page
    drawing     the graph of a region, placed for drawing
    regression_suite  a suite of graphs for the gate, out of a Python file
    regression_graphs  our own
    regression_run   one, compiled: what was decided, and whether the results are right
    numerics    results and emitted epilogues against float64
    generated_code  what Inductor generated for the virtual device, run on the CPU
    baseline    the decisions of a suite as a file
    regression  a suite against its baseline
    regression_report  what that found, for a terminal, CI and a pull request
    regress_command  the gate: `nvgemm-fusion regress`
    plan_command  what a script's GEMMs would be fused to: `nvgemm-fusion plan`
    architectures  models of real widths
    coverage    how many of their GEMMs can be fused: `python -m nvgemm_fusion.bench.coverage`
    random_graphs  random expressions over a product
    fuzz        many of them on a GPU: `python -m nvgemm_fusion.bench.fuzz`
    pytest_plugin  decisions in the tests of a project that uses us
    terminal    how the commands print, and how they end
    log_command  reading a decision log: `nvgemm-fusion log`
    cache_command  what is kept on disk: `nvgemm-fusion cache`
    command     the command `nvgemm-fusion`
"""
