"""Panels of generated images: prompts, known contributors, and methods without opponents."""

import numpy as np
import pytest
import torch

from refusals import refused
from report_dom import parse, words
from unde import UndeError
from unde.ui.report import Item, Mark, Page, QueryPanel, Row, ScoredItem
from unde.ui.report.items import contributor_flags, marks_for
from unde.ui.report.queries import queries_section

STYLE, SUBJECT = Mark("S", "style"), Mark("P", "subject")


def shown(index: int) -> Item:
    image = np.random.default_rng(index).random((8, 8, 3))
    return Item(index, image=image, prompt=f"a robot, number {index}")


def generated(scores: dict[str, list[float]], **options) -> QueryPanel:
    query = Item(7, image=np.zeros((3, 8, 8)), prompt="a mosaic of <a cat>")
    return QueryPanel.from_scores(query, shown, scores, **options)


def test_rows_hold_the_highest_and_the_lowest():
    panel = generated({"no weights": [0.1, 0.9, -0.5, 0.3], "style": torch.tensor([3, 1, 2, -1.0])}, count=2)
    found = [([s.item.id for s in row.proponents], [s.item.id for s in row.opponents]) for row in panel.rows]
    assert found == [([1, 3], [2, 0]), ([0, 2], [3, 1])]
    assert [s.score for s in panel.rows[0].opponents] == [-0.5, 0.1]


def test_marks_follow_their_examples():
    known = {"subject": np.array([1, 0, 0, 1]), "style": torch.tensor([True, True, False, False])}
    panel = generated({"a": [4.0, 3.0, 2.0, 1.0], "b": [1.0, 2.0, 3.0, 4.0]}, count=4, contributors=known)
    expected = {0: [SUBJECT, STYLE], 1: [STYLE], 2: [], 3: [SUBJECT]}
    for row in panel.rows:
        assert {s.item.id: s.marks for s in row.proponents} == expected
        assert {s.item.id: s.marks for s in row.opponents} == expected


@pytest.mark.parametrize(
    ("scores", "options", "says"),
    [
        (
            {"a": [1.0, 2.0], "b": [1.0]},
            {},
            r"scores 'b' have the shape \(1,\): expected one for each .* \(2,\)",
        ),
        ({"a": [[1.0, 2.0]]}, {}, r"scores 'a' have the shape \(1, 2\)"),
        ({"a": [1.0, float("nan")]}, {}, "score of example 1 is nan"),
        ({"a": [1.0]}, {"count": 0}, "0 examples on each side"),
        (
            {"a": [1.0]},
            {"contributors": {"style": [True, False]}},
            r"contributors 'style' are bool of shape \(2,\)",
        ),
        ({"a": [1.0]}, {"contributors": {"style": [0.5]}}, "contributors 'style' are float64"),
        ({}, {}, "no row"),
    ],
)
def test_bad_scores_are_refused(scores, options, says):
    refused(says, generated, scores, **options)


@pytest.fixture
def root():
    known = {"subject": [1, 0, 0, 1], "style": [1, 1, 0, 0], "background": [0, 0, 0, 0]}
    scores = {"no weights": [4.0, 3.0, -2.0, -5.0], "style": [5.0, 6.0, -1.0, -4.0]}
    return parse(queries_section([generated(scores, count=2, contributors=known)]))


def test_the_query_stands_with_its_prompt(root):
    asked = root.one("header")
    assert [words(asked.one(f".prompt {tag}")) for tag in ("h4", "p")] == ["Prompt", "a mosaic of <a cat>"]
    assert asked.one("img").attributes["alt"] == "query #7, prompt “a mosaic of <a cat>”"
    assert not root.all(".facts")  # a prompt is no label: nothing is true, right or wrong
    assert not root.all(".differs")


def test_training_images_carry_their_prompts(root):
    first = root.all("li.thumb")[0]
    caption = first.one(".caption")
    assert words(caption) == caption.attributes["title"] == "a robot, number 0"
    assert first.one("img").attributes["alt"] == "training example #0, prompt “a robot, number 0”"


def test_a_mark_is_a_letter_a_word_and_a_tooltip(root):
    [marks, *_] = [shown.all(".mark") for shown in root.all("li.thumb")]
    assert [words(m.one(".sign")) for m in marks] == ["P", "S"]
    assert [words(m.one(".word")) for m in marks] == ["subject", "style"]
    assert marks[0].attributes["title"] == "known contributor to the query’s subject"
    legend = [words(entry) for entry in root.one("ul.legend").all("li")]
    assert legend == [
        "Sstyleknown contributor to the query’s style",
        "Psubjectknown contributor to the query’s subject",
    ]


def test_rows_count_the_contributors_among_their_highest(root):
    notes = [words(note) for note in root.all(".row-head .note")]
    assert notes == [
        "of the first 2: 2 style, 1 subject",
        "of the first 2: 2 style, 1 subject · the same examples as “no weights”",
    ]


def test_one_letter_means_one_thing_on_a_page():
    rows = [
        Row(
            "a",
            [ScoredItem(Item(0), 1.0, marks=[STYLE]), ScoredItem(Item(1), 1.0, marks=[Mark("S", "subject")])],
        )
    ]
    refused("'S' stands for 'style' and for 'subject'", queries_section, [QueryPanel(Item(0), rows)])
    refused("mark 'sty' of 'style': expected one letter", Mark, "sty", "style")


def test_letters_differ_whatever_the_names():
    names = ["subject", "style", "background", "SSS", "s", "b", "深", "—"]
    letters = [m.letter for m in marks_for(names).values()]
    assert letters[:3] == ["P", "S", "B"]  # as in the paper
    assert len(set(letters)) == len(names)
    assert [m.contribution for m in marks_for(names).values()] == names


def test_flags_have_the_shape_that_is_asked_for():
    flags = contributor_flags({"style": [[0, 1]]}, (1, 2), "each")
    assert flags["style"].dtype == bool
    with pytest.raises(
        UndeError, match=r"'style' are bool of shape \(2, 1\): expected true or false for each"
    ):
        contributor_flags({"style": np.ones((2, 1), bool)}, (1, 2), "each")


SQUARES = {"no weights": [0.0, 9.0, 0.25, 4.0], "style": [1.0, 0.5, 0.0, 16.0]}


def test_squares_have_no_opponents():
    root = parse(queries_section([generated(SQUARES, count=2)]))
    assert [words(side) for side in root.all("h5")] == ["▲ Highest scores", "▽ Lowest scores"] * 2
    assert not root.all(".side.opp") and not root.all(".side.pro")
    notes = [words(note) for note in root.all(".row-head .note")]
    assert notes[1] == "1 high score and 1 low score not in “no weights”"
    help_text = words(parse(Page("t", queries=[generated(SQUARES)]).html()).one("aside"))
    assert "there are no opponents" in help_text and "opponent ▼" not in help_text


def test_a_negative_score_makes_opponents():
    panel = generated({"a": [-0.1, 0.0, 1.0]})
    assert panel.rows[0].signed
    assert [words(side) for side in parse(queries_section([panel])).all("h5")] == [
        "▲ Proponents",
        "▼ Opponents",
    ]
    assert Row("a", [ScoredItem(Item(0), 1.0)]).signed  # the lowest are not known
    help_text = words(parse(Page("t", queries=[panel]).html()).one("aside"))
    assert "there are no opponents" not in help_text and "opponent ▼ has a negative score" in help_text
    assert "A query is an image that the model made from the prompt" in help_text and "loss" not in help_text
