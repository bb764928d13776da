"""Which readers of a GEMM may go into its epilogue."""

from __future__ import annotations

import networkx
from nvgemm_fusion.fusion.reasons import Reason, Refusal
from nvgemm_fusion.fusion.regions import NodeFacts, Region, absorbers, find_regions, producers

NOT_A_LOOP = Refusal(Reason.NOT_POINTWISE, "x")


def graph_of(edges, **facts):
    """Nodes in order of appearance; a node without facts is pointwise and absorbs what it reads."""
    graph = networkx.DiGraph()
    for name in dict.fromkeys(name for edge in edges for name in edge):
        graph.add_node(name, facts=facts.get(name, NodeFacts(absorbs=True)))
    graph.add_edges_from(edges)
    return graph


TEMPLATE = NodeFacts(refusal=NOT_A_LOOP, absorbs=False)
REDUCTION = NodeFacts(refusal=NOT_A_LOOP, absorbs=True)
OUTPUT = NodeFacts(escapes=True, absorbs=True)


def reasons(search):
    return [refusal.reason for refusal in search.refusals]


def test_a_chain_up_to_the_next_gemm():
    search = find_regions(graph_of([("g", "a"), ("a", "b"), ("b", "h")], h=TEMPLATE), "g")
    assert search.regions == [Region("g", ("a", "b"), ("b",))]
    assert not search.refusals  # of the prefix (a), which b would absorb, nobody asks


def test_a_diamond_is_one_region():
    search = find_regions(graph_of([("g", "a"), ("g", "b"), ("a", "c"), ("b", "c"), ("c", "h")], h=TEMPLATE), "g")
    assert search.regions[0] == Region("g", ("a", "b", "c"), ("c",))


def test_a_path_that_leaves_and_comes_back_is_not_convex():
    graph = graph_of([("g", "a"), ("g", "h"), ("h", "b"), ("a", "b"), ("b", "o")], h=TEMPLATE, o=TEMPLATE)
    search = find_regions(graph, "g")
    assert Reason.NOT_CONVEX in reasons(search)
    assert not search.regions  # and h needs the product, so `a` may as well be computed with b


def test_two_gemms_may_not_wait_for_each_other():
    """p1 in g1's epilogue reads g2, so g2's epilogue may not read g1: found because g1 and p1 are one node by now."""
    graph = graph_of([("g1p1", "p2"), ("g2", "g1p1"), ("g2", "p2"), ("p2", "o")], g1p1=TEMPLATE, o=TEMPLATE)
    search = find_regions(graph, "g2")
    assert not search.regions and Reason.NOT_CONVEX in reasons(search)


def test_a_product_that_is_needed_is_stored_beside_the_rest():
    search = find_regions(graph_of([("g", "a"), ("a", "h")], g=OUTPUT, h=TEMPLATE), "g")
    assert search.regions == [Region("g", ("a",), ("g", "a"))] and not search.refusals
    search = find_regions(graph_of([("g", "a"), ("g", "k"), ("a", "h")], h=TEMPLATE, k=TEMPLATE), "g")
    assert search.regions == [Region("g", ("a",), ("g", "a"))]


def test_a_product_that_a_reduction_reads_is_left_where_it_is():
    """Stock computes `a` in the kernel of the reduction, which reads the product anyway."""
    search = find_regions(graph_of([("g", "a"), ("g", "r"), ("a", "h")], r=REDUCTION, h=TEMPLATE), "g")
    assert not search.regions and set(reasons(search)) == {Reason.NOT_POINTWISE, Reason.READER_FUSES}
    for facts in ({"g": OUTPUT}, {"g": OUTPUT, "a": OUTPUT}):
        edges = [("g", "a"), ("a", "r"), ("a", "h")]
        search = find_regions(graph_of(edges, r=REDUCTION, h=TEMPLATE, **facts), "g")
        assert not search.regions and Reason.READER_FUSES in reasons(search)


def test_a_norm_that_would_take_the_residual_in_is_timed_with_it():
    """The residual stream is needed further on, so only the product is spared."""
    norm = [("g", "add"), ("add", "square"), ("add", "scale"), ("square", "scale"), ("scale", "h")]
    graph = graph_of(norm, square=REDUCTION, scale=REDUCTION, h=TEMPLATE)
    assert not find_regions(graph, "g").regions
    graph = graph_of([*norm, ("h", "later"), ("add", "later")], square=REDUCTION, scale=REDUCTION, h=TEMPLATE)
    assert find_regions(graph, "g").regions == [Region("g", ("add",), ("add",))]
    assert absorbers(graph, "g", ("add",)) == ("square", "scale")


def test_a_value_that_is_needed_is_stored_on_the_way_or_ends_the_region():
    search = find_regions(graph_of([("g", "a"), ("a", "b"), ("a", "h"), ("b", "h")], h=TEMPLATE), "g")
    assert search.regions == [Region("g", ("a", "b"), ("a", "b")), Region("g", ("a",), ("a",))]
    search = find_regions(graph_of([("g", "a"), ("a", "b")], a=OUTPUT, b=OUTPUT), "g")
    assert search.regions == [Region("g", ("a", "b"), ("a", "b")), Region("g", ("a",), ("a",))]


def test_two_results_of_one_product_are_two_stores():
    search = find_regions(graph_of([("g", "a"), ("g", "b")], a=OUTPUT, b=OUTPUT), "g")
    assert search.regions == [Region("g", ("a", "b"), ("a", "b"))] and not search.refusals


def test_a_reduction_that_would_take_the_result_in_ends_it():
    search = find_regions(graph_of([("g", "a"), ("a", "norm"), ("norm", "h")], norm=REDUCTION, h=TEMPLATE), "g")
    assert not search.regions
    assert set(reasons(search)) == {Reason.NOT_POINTWISE, Reason.READER_FUSES}


def test_an_output_of_the_graph_may_be_the_store():
    search = find_regions(graph_of([("g", "a")], a=OUTPUT), "g")
    assert search.regions == [Region("g", ("a",), ("a",))]


def test_no_reader():
    graph = networkx.DiGraph()
    graph.add_node("g", facts=OUTPUT)
    assert reasons(find_regions(graph, "g")) == [Reason.NO_READER]
    assert reasons(find_regions(graph_of([("g", "h")], h=TEMPLATE), "g")) == [Reason.NO_READER]


def test_what_lies_behind_a_refused_node_has_no_reason_of_its_own():
    search = find_regions(graph_of([("g", "r"), ("r", "a"), ("a", "b"), ("g", "b")], r=REDUCTION), "g")
    assert reasons(search) == [Reason.NOT_POINTWISE]


def test_producers_are_the_pointwise_nodes_beside_the_gemm():
    spans = NodeFacts(absorbs=True, spans=True)
    edges = [("mask", "a"), ("g", "a"), ("before", "g"), ("before", "a"), ("row", "a"), ("a", "h")]
    graph = graph_of(edges, mask=spans, before=spans, row=NodeFacts(absorbs=True), a=spans, h=TEMPLATE)
    assert producers(graph, "g", ("a",)) == ("mask",)  # the GEMM waits for `before`, and `row` is another space
    assert producers(graph, "g", ()) == ()
