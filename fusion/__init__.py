"""WHAT may be fused into a GEMM's epilogue, and what was decided. Depends on torch, networkx and msgspec alone.

    ops         the op vocabulary: one table that capture, reference and emitters key on
    program     EpilogueProgram: SSA over the accumulator and named operands, ending in stores
    reference   the program evaluated with torch (in float64: the oracle of every test)
    space       the (M, N) space of a GEMM's product, and what kind of operand an access is in it
    problem     one GEMM: sizes, dtypes, layouts, target
    regions     which readers of a GEMM may go into its epilogue (a question about a graph)
    reasons     why something was not fused, not measured or not chosen
    decision    all alternatives of a region with their times, and the rule that picks one
    log         the decision as a JSON object, and the file it is appended to
    trace       the decision in torch's structured trace and in its counters

Data flows one way: `scheduler_hooks` describes the graph in these words, `lowering` turns a program and a
candidate into a kernel, and the timings come back into a `Decision`. Nothing here knows Inductor or CuTe.
"""
