"""The report: what it says of a decision log, that no log can break it, and how it behaves in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import networkx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvgemm_fusion.bench.drawing import place
from nvgemm_fusion.bench.report import MOST_ENTRIES, render
from nvgemm_fusion.fusion.decision import Alternative, Backend, Decision, NodeOrigin, Status, Timing, choose
from nvgemm_fusion.fusion.log import to_record
from nvgemm_fusion.fusion.problem import Problem
from nvgemm_fusion.fusion.program import ACCUMULATOR, Major, ProgramBuilder, Store
from nvgemm_fusion.fusion.reasons import Reason, Refusal

HOSTILE = """</script></style></title><script>hacked()</script>"'><img src=x onerror=hacked()> {{ 7 * 7 }} \ud800\x00"""


def record(gemm="buf0", us=50.0, status=Status.MEASURED, operator="relu", refusals=()):
    """A record as a log has it. The fused kernel takes `us`, and the unfused one 60 microseconds."""
    builder = ProgramBuilder()
    program, _ = builder.build([Store(builder.op("relu", ACCUMULATOR), torch.bfloat16)])
    failure = Refusal(Reason.COMPILE_ERROR, "out of registers")
    alternatives = (
        Alternative(Backend.ATEN, "mm", (), ("op1",), "", Timing(60.0, 1.5), status),
        Alternative(Backend.NVGEMM, "quack 128x256", ("op1",), (), program.digest, Timing(us, 0.5), status),
        Alternative(Backend.NVGEMM, "quack 64x64", ("op1",), (), program.digest, None, Status.FAILED, failure),
    )
    alternatives, chosen = choose(alternatives)
    decision = Decision(
        graph="graph0",
        gemm=gemm,
        problem=Problem(256, 512, 128, torch.bfloat16, Major.ROW, Major.COLUMN, "sm_90a"),
        programs=(program,),
        alternatives=alternatives,
        chosen=chosen,
        refusals=tuple(refusals),
        nodes=(
            NodeOrigin("op0", ("mm", "t"), ("model.py:7: x @ w.t()",)),
            NodeOrigin("op1", (operator,), (f"model.py:8: {operator}(h)",)),
        ),
        edges=(("op0", "op1"), ("op1", "op2")),
        target="H200",
        versions={"torch": "2.13.0", "quack-kernels": "0.6.5"},
    )
    return json.loads(json.dumps(to_record(decision)))


class Outline(HTMLParser):
    """The tags of a page in order, the text between them, and the values of attributes that could load something."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.references = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))
        self.references += [value for name, value in attributes if name in ("src", "href", "action", "data")]

    def handle_data(self, text):
        if self.tags[-1:] != [("script", ())] and self.tags[-1:] != [("style", ())]:
            self.texts.append(text)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def text_of(*records, **options):
    return Outline(render(records, "a log", **options)).text


# What the page says.


def test_a_decision_in_full():
    text = text_of(record(refusals=[Refusal(Reason.NOT_POINTWISE, "op2")]))
    for said in (
        "graph0 buf0",
        "256 × 512 × 128 (M × N × K), bfloat16 accumulated in float32; A row-major, B column-major; H200",
        "then relu",
        "mm, t model.py:7: x @ w.t()",
        "✓ chosen: NVGEMM quack 128x256 with op1 fused",
        "60.0 µs ± 1.5",
        "50.0 µs , against 60.0 µs for the best unfused",
        "not pointwise , op2",
        "NVGEMM quack 64x64 with op1 fused : compile error , out of registers",
        "v0 = relu(acc) store v0 as bfloat16",
    ):
        assert said in text
    assert "NVGEMM quack 128x256 was not chosen: slower" in text_of(record(us=70.0))


def test_the_figures_at_the_top():
    text = text_of(record(), record("buf1", us=40.0), record("buf2", us=70.0), record("buf3", status=Status.MODELLED))
    assert "4 decisions 3 fused" in text and "1 left alone 1 ATEN" in text
    assert f"{(1.2 * 1.5 * 1.0) ** (1 / 3):.3f}× speed-up, measured" in text and "geometric mean of 3" in text
    assert "≈ 1.200× speed-up, modelled" in text and "geometric mean of 1" in text
    assert "4 compile error the kernel did not compile" in text and "1 slower another alternative is faster" in text
    assert "torch 2.13.0 quack-kernels 0.6.5" in text


def test_a_modelled_time_never_looks_like_a_measured_one():
    pattern = re.compile(r"(≈ )?[\d.]+ µs(?: ± [\d.]+)?( modelled| not measured)?")
    unknown = record()
    unknown["alternatives"][0]["status"] = "guessed"
    for one in (record(status=Status.MODELLED), unknown):
        assert "Not every time here was measured" in text_of(one)
    assert all(all(marks) for marks in pattern.findall(text_of(record(status=Status.MODELLED))))
    assert not any(any(marks) for marks in pattern.findall(text_of(record())))
    assert "modelled" not in text_of(record())


def test_decisions_over_the_limit_are_counted_and_said_to_be_left_out():
    text = text_of(*[record(f"buf{i}") for i in range(5)], limit=2)
    assert "5 decisions" in text and "3 decisions are left out." in text and "first 2 of 5" in text
    assert "graph0 buf1" in text and "graph0 buf2" not in text


def test_long_lists_are_cut_and_the_page_says_so():
    long = record()
    long["alternatives"] += [dict(long["alternatives"][0], us=70.0 + i) for i in range(MOST_ENTRIES)]
    long["nodes"] += [{"name": f"more{i}", "operators": ["abs"], "source": []} for i in range(MOST_ENTRIES)]
    text = text_of(long)
    assert "2 more alternatives are in the log" in text and "2 more nodes are in the log" in text


def test_what_cannot_be_reported_is_said_in_one_line():
    for records, limit, said in (([], 1, "no decision"), ([record()], 0, "limit is 0"), ([record(), 3], 1, "record 2")):
        with pytest.raises(ValueError, match=said) as error:
            render(records, "a log", limit)
        assert "\n" not in str(error.value)


def test_a_log_of_a_few_hundred_decisions_stays_small():
    assert len(render([record(f"buf{i}") for i in range(300)], "a log").encode()) < 3_000_000


def test_a_log_written_by_a_compile(decisions, h200, instant_kernels):
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (128, 32), (128,)))
    torch.compile(lambda x, w, b: torch.relu(torch.nn.functional.linear(x, w, b)))(x, w, b)
    text = text_of(*decisions())
    assert "64 × 128 × 32" in text and "then relu" in text and "reads op0" in text and "modelled" in text


def test_the_page_is_made_without_torch():
    """Importing torch takes longer than all of the report."""
    code = "import sys, nvgemm_fusion.bench.report as report; report.render([{}], ''); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# Where nodes and lines of a region are drawn.


def test_writers_stand_above_their_readers_and_boxes_do_not_overlap():
    graph = networkx.DiGraph([("a", "g"), ("g", "r"), ("g", "s"), ("o", "s"), ("r", "t"), ("s", "t"), ("a", "t")])
    placed = place(graph)
    boxes = {box["node"]: box for box in placed["boxes"]}
    assert all(boxes[writer]["y"] + boxes[writer]["height"] < boxes[reader]["y"] for writer, reader in graph.edges)
    for box in boxes.values():
        assert 0 <= box["x"] <= placed["width"] - box["width"] and 0 <= box["y"] <= placed["height"] - box["height"]
        for other in boxes.values():
            assert other is box or other["y"] != box["y"] or abs(other["x"] - box["x"]) > box["width"]
    assert boxes["o"]["y"] == boxes["g"]["y"], "what only the region reads stands right above its reader"


def test_a_line_goes_beside_the_boxes_that_it_passes():
    placed = place(networkx.DiGraph([("g", "r"), ("r", "s"), ("g", "s")]))
    passed = next(box for box in placed["boxes"] if box["node"] == "r")
    line = next(line for line in placed["lines"] if (line["writer"], line["reader"]) == ("g", "s"))
    bend, bottom = re.search(r"([\d.]+) [\d.]+ V([\d.]+)", line["path"]).groups()
    assert float(bottom) == passed["y"] + passed["height"]
    assert not passed["x"] <= float(bend) <= passed["x"] + passed["width"]


def test_roles_are_told_by_words_and_shapes():
    page = render([record(us=70.0)], "a log")
    assert "op0: GEMM. op1: not fused. op2: outside. op1 reads op0. op2 reads op1." in Outline(page).text
    assert all(f'<g class="{role}"' in page for role in ("GEMM", "not-fused", "outside"))
    assert "<path d" in page and 'class="inside"' not in page
    assert 'class="inside"' in render([record()], "a log")


@pytest.mark.parametrize("edges", [None, [], "op0", [["op0"]], [["op0", "op1"], ["op1", "op0"]]])
def test_edges_that_are_no_graph_are_not_drawn(edges):
    assert "Not drawn: the log does not say who reads from whom" in text_of({**record(), "edges": edges})


# No log breaks the page.


def spoiled(value, text, names=False):
    """`value` with `text` behind every string in it, and with `names` behind the keys of the outermost object."""
    if isinstance(value, str):
        return value + text
    if isinstance(value, list):
        return [spoiled(item, text) for item in value]
    if isinstance(value, dict):
        return {key + text if names else key: spoiled(item, text) for key, item in value.items()}
    return value


def spoiled_record(text):
    return {key: spoiled(value, text, key in ("programs", "versions")) for key, value in record().items()}


def test_hostile_strings_add_no_element_and_no_attribute():
    tame, hostile = (Outline(render([spoiled_record(text)], text)) for text in ("tame", HOSTILE))
    assert hostile.tags == tame.tags
    assert "hacked" in hostile.text and "{{ 7 * 7 }}" in hostile.text
    assert all(reference.startswith("#") for reference in hostile.references)


@pytest.mark.parametrize("key", record())
def test_a_record_without_a_key_is_shown_with_the_others(key):
    assert "1 decision " in text_of({name: value for name, value in record().items() if name != key})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def spoilt(good, **others):
    """Objects like `good` with any of the keys missing or of any value; `others` are strategies for further keys."""
    return st.fixed_dictionaries({}, optional={key: st.just(good[key]) | ANYTHING for key in good} | others)


@settings(deadline=None, max_examples=60)
@given(spoilt(record(), alternatives=ANYTHING | st.lists(spoilt(record()["alternatives"][1]), max_size=3)))
def test_any_json_gives_a_page(one):
    assert render([one], "a log").encode().rstrip().endswith(b"</html>")


# In a browser.


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, which is asked for rather than skipped in silence."""
    if os.environ.get("NVGEMM_FUSION_NO_BROWSER") == "1":
        pytest.skip("NVGEMM_FUSION_NO_BROWSER=1")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.fail("no Chromium: `apt-get install chromium`, or NVGEMM_FUSION_NO_BROWSER=1 to skip these tests")
    from playwright.sync_api import sync_playwright

    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", *quiet]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_report(browser, tmp_path):
    """A function that opens the report of some records from disk. Whatever a test does there, the page must neither
    complain nor ask for anything but itself."""
    path = tmp_path / "report.html"
    complaints, requests, contexts = [], [], []

    def open_page(records, fragment="", **options):
        path.write_text(render(records, "a log"), encoding="utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri() + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [] and {url.partition("#")[0] for url in requests} == {path.as_uri()}


LOG = [
    record("buf0", us=40.0),
    record("buf1", operator="gelu", status=Status.MODELLED),
    record("buf2", us=70.0, refusals=[Refusal(Reason.TAKEN, "op9")]),
    {**record("buf3"), "chosen": None, "fused": False, "us_chosen": None, "alternatives": []},
]


def shown(page):
    return [name.split()[-1] for name in page.locator("article:visible h3").all_inner_texts()]


@pytest.mark.parametrize(
    "fragment, expected",
    [
        ("", ["buf0", "buf1", "buf2", "buf3"]),
        ("#text=GELU", ["buf1"]),
        ("#text=graph0+relu", ["buf0", "buf2", "buf3"]),
        ("#text=model.py%3A8", ["buf0", "buf1", "buf2", "buf3"]),
        ("#reason=taken", ["buf2"]),
        ("#backend=left+to+Inductor", ["buf3"]),
        ("#fused=no", ["buf2", "buf3"]),
        ("#speedup=1.21", ["buf0"]),
        ("#speedup=1.1&backend=NVGEMM&text=gelu", ["buf1"]),
        ("#reason=no+such+reason&unknown=1", ["buf0", "buf1", "buf2", "buf3"]),
    ],
)
def test_a_link_brings_its_filters(open_report, fragment, expected):
    page = open_report(LOG, fragment)
    assert shown(page) == expected
    assert page.locator("output").inner_text() == f"{len(expected)} of 4 decisions shown"


def test_a_filter_that_is_clicked_stands_in_the_link(open_report):
    page = open_report(LOG)
    page.get_by_label("Outcome").select_option("left alone")
    page.get_by_label("Text").fill("relu buf2")
    assert shown(page) == ["buf2"] and page.url.endswith("#text=relu+buf2&fused=no")
    again = page.context.new_page()
    again.goto(page.url)
    assert shown(again) == ["buf2"] and again.get_by_label("Text").input_value() == "relu buf2"
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("4 of 4 decisions shown").wait_for()
    assert page.url.endswith("report.html#")
    page.get_by_role("link", name="taken").click()
    page.get_by_text("1 of 4 decisions shown").wait_for()
    assert shown(page) == ["buf2"] and page.get_by_label("Reason").input_value() == "taken"


def test_the_keyboard_is_enough(open_report):
    page = open_report(LOG)
    page.get_by_label("Text").focus()
    for key in ("Tab", "ArrowDown"):
        page.keyboard.press(key)
    assert page.get_by_label("Reason").input_value() != ""
    page.locator("summary").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("article").nth(1).locator("pre").is_visible()


@pytest.mark.parametrize(
    "width, media, scheme",
    [
        (1280, "screen", "light"),
        (1280, "screen", "dark"),
        (390, "screen", "light"),
        (320, "screen", "dark"),
        (720, "print", "dark"),
    ],
)
def test_nothing_sticks_out(open_report, tmp_path, width, media, scheme):
    wide = record("a_name_without_an_end_" * 20, operator="x" * 500)
    wide["edges"] += [["op0", f"reader{i}"] for i in range(20)]
    page = open_report([*LOG, wide], viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.emulate_media(media=media, color_scheme=scheme)
    if media == "screen":
        page.get_by_role("button", name="Expand all").click()
    page.screenshot(path=tmp_path / f"{media}-{width}-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("pre").evaluate_all("all => all.every(one => one.checkVisibility())")
    assert page.get_by_label("Text").is_visible() == (media == "screen")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 22)"
    assert dark == (scheme == "dark" and media == "screen"), "paper is white"


def test_nothing_hostile_runs(open_report):
    page = open_report([spoiled_record(HOSTILE), spoiled_record("")], viewport={"width": 390, "height": 800})
    assert page.evaluate("typeof hacked") == "undefined" and page.locator("img").count() == 0
    page.locator("[name=reason]").select_option(index=1)
    assert len(shown(page)) == 1 and page.evaluate("document.documentElement.scrollWidth") == 390
