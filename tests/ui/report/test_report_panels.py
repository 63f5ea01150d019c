"""The parts of a page: queries, weights, tables, steps, provenance."""

import numpy as np
import pytest
import torch

from refusals import refused
from report_dom import parse, words
from unde import UndeError
from unde.console import duration
from unde.ui.report import Item, QueryPanel, ResultTable, Row, ScoredItem, Step, WeightsPanel
from unde.ui.report.queries import queries_section
from unde.ui.report.tables import evaluation_section, provenance_section, steps_section
from unde.ui.report.weights import block_names, weights_section

RESNET = [
    *(f"resnet.embedder.embedder.{part}" for part in ("convolution", "normalization")),
    *(
        f"resnet.encoder.stages.{stage}.layers.{layer}.layer.{index}.{part}"
        for stage in range(4)
        for layer in range(2)
        for index in range(2)
        for part in ("convolution", "normalization")
    ),
    "classifier.1",
]
GPT2 = [
    "transformer.wte",
    "transformer.wpe",
    *(
        f"transformer.h.{layer}.{part}"
        for layer in range(12)
        for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    ),
    "transformer.ln_f",
]


def square(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)


def digit(index: int, label: int, **kwargs) -> Item:
    return Item(index, label=label, image=square(index), **kwargs)


@pytest.fixture
def panel() -> QueryPanel:
    unweighted = Row(
        "unweighted",
        [ScoredItem(digit(1, 7), 0.8), ScoredItem(digit(2, 1, true_label=7), 0.4)],
        [ScoredItem(digit(3, 7), -0.2), ScoredItem(digit(4, 9), -0.1)],
    )
    weighted = Row(
        "weighted",
        [ScoredItem(digit(1, 7), 12.0), ScoredItem(digit(5, 7), 3.0)],
        [ScoredItem(digit(4, 9), -6.0)],
    )
    return QueryPanel(digit(900, 7), [unweighted, weighted], predicted=torch.tensor(1))


def test_a_query_shows_its_rows_in_order(panel):
    article = parse(queries_section([panel])).one("article")
    assert words(article.one("h3")) == "Query #900"
    assert [words(row) for row in article.all(".row h4")] == ["unweighted", "weighted"]
    facts = [words(fact) for fact in article.all(".facts div")]
    assert facts == ["true label7", "predicted1✗wrong", "asked about7"]
    unweighted, weighted = article.all("section.row")
    assert [words(side) for side in unweighted.all("h5")] == ["▲ Proponents", "▼ Opponents"]
    assert [words(each) for each in unweighted.one(".pro.side").all(".score")] == ["+0.800", "+0.400"]
    assert [words(each) for each in unweighted.one(".opp.side").all(".score")] == ["−0.200", "−0.100"]
    assert [words(each) for each in weighted.all(".score")] == ["+12.0", "+3.00", "−6.00"]
    assert [img.attributes["alt"] for img in weighted.all("img")] == [
        "training example #1, label 7",
        "training example #5, label 7",
        "training example #4, label 9",
    ]


def test_bars_are_relative_to_the_row(panel):
    unweighted, weighted = parse(queries_section([panel])).all("section.row")
    widths = [[each.attributes["style"] for each in row.all(".bar i")] for row in (unweighted, weighted)]
    assert widths[0] == ["width:100%", "width:50%", "width:25%", "width:12.5%"]
    assert widths[1] == ["width:100%", "width:25%", "width:50%"]


def test_marks_say_what_is_odd_about_an_example(panel):
    first = parse(queries_section([panel])).all("section.row")[0]
    marks = [[(each.classes - {"mark"}).pop() for each in shown.all(".mark")] for shown in first.all("li")]
    assert marks == [[], ["differs", "mislabelled"], [], ["differs"]]
    legend = parse(queries_section([panel])).one("ul.legend")
    assert len(legend.all("li")) == 2


def test_marks_that_do_not_occur_are_not_explained():
    row = Row("trak", [ScoredItem(Item(1, label=7), 0.8)])
    assert not parse(queries_section([QueryPanel(Item(0, label=7), [row])])).all("ul.legend")
    # Without a label on the query, no label can differ from it.
    assert not parse(queries_section([QueryPanel(Item(0), [row])])).all(".mark")


def test_remarks_compare_rows(panel):
    notes = [words(note) for note in parse(queries_section([panel])).all(".row-head .note")]
    assert notes[0] == "1 of 2 proponents with the label asked about"
    assert notes[1] == "2 of 2 proponents with the label asked about · 1 proponent not in “unweighted”"
    again = QueryPanel(
        Item(0), [panel.rows[0], Row("again", panel.rows[0].proponents, panel.rows[0].opponents)]
    )
    last = parse(queries_section([again])).all(".row-head .note")[-1]
    assert words(last) == "the same examples as “unweighted”"


def test_text_queries_read_as_passages():
    row = Row(
        "trak",
        [ScoredItem(Item("doc-1", text="The Thames <b>"), 1.0)],
        [ScoredItem(Item("doc-2", text="A" * 900), -1)],
    )
    root = parse(queries_section([QueryPanel(Item("p", text="Which river?"), [row])]))
    assert "kind-text" in root.one("article").classes
    assert words(root.one("header p.passage")) == "Which river?"
    assert words(root.all("li.reading")[0].one(".passage")) == "The Thames <b>"
    assert root.all("li.reading")[1].one(".rest").text.endswith("AAA")
    assert not root.all("img")


def test_plain_ids_are_enough():
    row = Row("trak", [ScoredItem(Item(11), 1.0), ScoredItem(Item("x<y"), 0.5)])
    root = parse(queries_section([QueryPanel(Item(0), [row])]))
    assert [words(each) for each in root.all("li .id")] == ["#11", "x<y"]
    assert not root.all(".opp.side")
    assert not root.all("dl")


def test_many_queries_get_a_strip_of_links(panel):
    assert not parse(queries_section([panel, panel])).all("ol.strip")
    root = parse(queries_section([panel] * 4))
    links = root.all("ol.strip a")
    assert [link.attributes["href"] for link in links] == [f"#query-{position}" for position in range(1, 5)]
    assert [article.attributes["id"] for article in root.all("article")] == [
        f"query-{position}" for position in range(1, 5)
    ]


def test_empty_rows_and_queries_are_refused():
    refused("row 'trak' holds no example", Row, "trak", [])
    refused("query 3 has no row", QueryPanel, Item(3), [])


def test_weights_are_drawn_in_model_order_and_ranked():
    values = np.linspace(0.1, 1.9, len(RESNET))[::-1]
    root = parse(weights_section([WeightsPanel(RESNET, values)]))
    tips = [title.text for title in root.all(".bar-group title")]
    assert tips == [f"{name}: {value:.3g}" for name, value in zip(RESNET, values)]
    top, means, everything = root.all("table")
    assert [words(row) for row in top.all("tbody th")] == RESNET[:10]
    assert [words(row.all("td")[0]) for row in top.all("tbody tr")] == [
        f"{value:.3f}" for value in values[:10]
    ]
    assert len(means.all("tbody tr")) == 6
    assert [words(row) for row in everything.all("tbody th")] == RESNET
    assert [label.text for label in root.all("text.above")] == ["1", "2", "3", "4", "5"]


def test_the_order_of_the_table_is_by_weight():
    root = parse(weights_section([WeightsPanel(["a", "b", "c"], [0.3, 2.2, 0.5])]))
    assert [words(row) for row in root.one("tbody").all("th")] == ["b", "c", "a"]
    assert [row.all("td")[0].text for row in root.one("tbody").all("tr")] == ["2.200", "0.500", "0.300"]
    assert not root.all("details")  # nothing more to unfold


def test_the_words_count_right():
    values = [0.0, 0.005, 0.5, 2.495, 2.0]
    lead = words(parse(weights_section([WeightsPanel(list("abcde"), values)])).all("p.note")[0])
    assert "From 0 to 2.5:" in lead
    assert "2 of 5 groups lie above 1" in lead
    assert "half of the total is in the largest 2." in lead
    assert lead.endswith("hardly counting: 2 groups.")


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        (
            RESNET,
            ["resnet.embedder.embedder", *(f"resnet.encoder.stages.{i}" for i in range(4)), "classifier"],
        ),
        (GPT2, ["transformer", *(f"transformer.h.{i}" for i in range(12))]),
        ([f"group {index}" for index in range(128)], None),
        (["one"], None),
    ],
)
def test_blocks_are_found_from_names(groups, blocks):
    found = block_names(groups)
    assert (None if found is None else list(dict.fromkeys(found))) == blocks
    if found is not None:
        assert all(name.startswith(block) for name, block in zip(groups, found))


def test_given_blocks_are_used_and_averaged():
    panel = WeightsPanel(["a", "b", "c", "d"], [0.5, 1.5, 1.75, 0.25], blocks=["down", "down", "up", "up"])
    root = parse(weights_section([panel]))
    assert [words(entry) for entry in root.all("ul.blocks li")] == ["down", "up"]
    assert [words(row) for row in root.all("tbody")[1].all("tr")] == ["down1.00", "up1.00"]
    assert [bar.classes for bar in root.all("rect.mark-bar")][1:3] == [
        {"mark-bar", "tone-0"},
        {"mark-bar", "tone-1"},
    ]
    assert root.all(".bar-group title")[2].text == "c (up): 1.75"


def test_the_objective_is_drawn_when_there_is_one():
    panel = WeightsPanel(["a", "b"], torch.tensor([0.5, 1.5]), objective=[0.1, 0.2, 0.25])
    root = parse(weights_section([panel]))
    assert len((root.one("polyline").attributes["points"] or "").split()) == 3
    assert words(root.one("figcaption")) == "0.1 at the start, 0.25 at the end."
    assert not parse(weights_section([WeightsPanel(["a"], [1.0])])).all("polyline")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"groups": ["a"], "values": [1.0, 1.0]}, "expected one each"),
        ({"groups": [], "values": []}, "expected one each"),
        ({"groups": ["a", "b"], "values": [3.0, -1.0]}, "weight of group 'b' is -1.0"),
        ({"groups": ["a", "b"], "values": [float("nan"), 1.0]}, "weight of group 'a' is nan"),
        ({"groups": ["a", "b"], "values": [1.0, 2.0]}, "mean 1.5.*Divide"),
        ({"groups": ["a", "b"], "values": [1.0, 1.0], "blocks": ["x"]}, "1 block names for 2 groups"),
        ({"groups": ["a"], "values": [1.0], "objective": [float("inf")]}, "objective holds"),
    ],
)
def test_bad_weights_are_refused(kwargs, says):
    refused(says, WeightsPanel, **kwargs)


def test_tables():
    table = ResultTable(
        "LDS",
        ["scores", "LDS", "n", "ok"],
        [["a<b", "26.1 ± 1.2", 64, True], ["w", 0.123456, None, False]],
        "note",
        1,
    )
    root = parse(evaluation_section([table]))
    assert [words(head) for head in root.all("thead th")] == ["scores", "LDS", "n", "ok"]
    cells = [[words(cell) for cell in row.children] for row in root.all("tbody tr")]  # ty: ignore
    assert cells == [["a<b", "26.1 ± 1.2", "64", "yes"], ["w", "0.1235", "–", "no"]]
    assert [("number" in head.classes) for head in root.all("thead th")] == [False, True, True, False]
    assert ["highlight" in row.classes for row in root.all("tbody tr")] == [False, True]
    assert words(root.one("caption")) == "LDS"
    with pytest.raises(
        UndeError, match="row 0 of the table 'LDS' has 1 cells: expected one for each of the 2"
    ):
        ResultTable("LDS", ["a", "b"], [["x"]])


def test_steps():
    root = parse(steps_section([Step("train", 30.0, "6 epochs"), Step("build", 7.5)]))
    assert [words(name) for name in root.all(".step-name")] == ["train", "build"]
    assert [words(time) for time in root.all(".step-time")] == ["30.0 s", "7.5 s"]
    assert [bar.attributes["style"] for bar in root.all(".bar i")] == ["width:100%", "width:25%"]
    assert words(root.one("p.lead")) == "2 steps in 37.5 s."
    assert parse(steps_section([Step("nothing", 0.0)])).one(".bar i").attributes["style"] == "width:0%"
    refused("step 'x' took -1", Step, "x", -1)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.0, "0.00 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (3599.7, "1 h 00 min"), (3600, "1 h 00 min")],
)
def test_durations(seconds, written):
    assert duration(seconds, exact=True) == written


def test_provenance_is_folded_and_complete():
    root = parse(provenance_section({"version": "0.1", "seeds": {"data": 1, "where": {2}}, "<k>": "<v>"}))
    assert "open" not in root.one("details").attributes
    assert [term.text for term in root.all("dt")] == ["version", "seeds", "<k>"]
    assert root.one("pre").text == '{\n  "data": 1,\n  "where": "{2}"\n}'
    assert root.all("dd")[2].text == "<v>"
