"""Side-by-side measurement: what the project claims, and how it was measured.

    graphs      the named graphs that are measured
    smoke       four graphs at three sizes on a real GPU: `python -m nvgemm_fusion.bench.smoke`
    demo        a small MLP and a Llama block, on a GPU or on the virtual one: `make demo`
    table       decisions as a table for the terminal
    selection   which decisions somebody wants to see
    explanation one decision in full
    difference  what changed between two logs
    doctor      whether fusion can work here
    pytest_plugin  decisions in the tests of a project that uses us
    terminal    how the commands print, and how they end
    cache_command  what is kept on disk: `nvgemm-fusion cache`
    command     the command `nvgemm-fusion`
"""
