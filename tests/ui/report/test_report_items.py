"""Examples as they are shown: pictures, passages, ids, labels and scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusals import refused
from report_dom import parse
from unde import UndeError
from unde.markup import el, number, score, text
from unde.ui.report import Item, ScoredItem
from unde.ui.report.items import example, fold, kind_of, label_of, passage, picture, same


@given(st.text())
def test_any_text_stays_text(words):
    node = parse(el("p", words, title=words)).one("p")
    # Characters that HTML forbids are replaced; all others come back.
    shown = "".join("\ufffd" if text(letter) == "\ufffd" else letter for letter in words)
    assert node.text == shown
    assert node.attributes["title"] == shown
    str(node.text).encode("utf-8")


def test_text_that_cannot_be_written_is_replaced():
    assert text("a\x00b\ud800c\x1b") == "a\ufffdb\ufffdc\ufffd"
    assert text("tab\tline\nпривет 🎈") == "tab\tline\nпривет 🎈"


@pytest.mark.parametrize(
    ("value", "written"),
    [(1e-12, "1e−12"), (0.5, "0.5"), (1234567.0, "1.23e6"), (-0.001, "−0.001"), (0, "0")],
)
def test_numbers(value, written):
    assert number(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.91, "+0.910"), (-100.4, "−100"), (12.0, "+12.0"), (-4e-9, "−4.00e−9"), (0.0, "0")],
)
def test_scores(value, written):
    assert score(value) == written


def test_a_long_passage_is_folded_and_nothing_is_lost():
    words = " ".join(f"word{index}" for index in range(300))
    root = parse(passage(words))
    folded = root.one("details.passage")
    assert "open" not in folded.attributes
    head, rest = folded.one("summary .head").text, folded.one(".rest").text
    assert head + rest == words
    assert 200 < len(head) <= 320
    assert head.endswith(" ")  # between words
    assert folded.one(".more").text == f"… {len(rest):,} more characters"


@given(st.text(alphabet="ab \n", max_size=900))
def test_folding_keeps_every_character(words):
    head, rest = fold(words)
    assert head + rest == words
    assert len(head) < 320 + 60
    assert not rest or len(head.split("\n")) <= 9


def test_many_short_lines_are_folded_too():
    head, rest = fold("x = 1\n" * 100)
    assert head == "x = 1\n" * 8
    assert rest == "x = 1\n" * 92


def test_a_short_passage_is_not_folded():
    root = parse(passage("Two <b>words</b>"))
    assert root.one("p.passage").text == "Two <b>words</b>"
    assert not root.all("details")


def test_small_pictures_are_enlarged_crisply_and_large_ones_shrunk():
    small = parse(picture(Item(3, label=7, image=np.zeros((28, 28), np.uint8)), "query")).one("img")
    assert "crisp" in small.classes
    assert (small.attributes["width"], small.attributes["height"]) == ("28", "28")
    assert small.attributes["alt"] == "query #3, label 7"
    large = parse(picture(Item("a.jpg", image=np.zeros((400, 200, 3), np.uint8)), "query")).one("img")
    assert "crisp" not in large.classes
    assert (large.attributes["width"], large.attributes["height"]) == ("96", "192")
    assert large.attributes["alt"] == "query a.jpg"


def test_a_bad_image_is_reported_with_its_example():
    with pytest.raises(UndeError, match=r"example 'odd': cannot show an array of shape \(5,\)"):
        picture(Item("odd", image=np.zeros(5)), "query")


def test_labels_compare_across_types():
    assert same(3, "3")
    assert same(torch.tensor(3), np.int64(3))
    assert not same(3, 8)


def test_mislabelled():
    assert not Item(0, label=3).is_mislabelled
    assert not Item(0, label=3, true_label=torch.tensor(3)).is_mislabelled
    assert not Item(0, label=3, true_label="3").is_mislabelled
    assert Item(0, label=3, true_label=8).is_mislabelled
    assert Item(0, label=3, mislabelled=True).is_mislabelled


def test_wrong_labels_show_the_true_one():
    assert parse(label_of(Item(0, label=3))).text == "3"
    assert parse(label_of(Item(0, label=3, true_label=3))).text == "3"
    wrong = parse(label_of(Item(0, label=3, true_label=8)))
    assert (wrong.one("s").text, wrong.one("b").text) == ("3", "8")
    assert label_of(Item(0)) is None


def test_layout_follows_what_is_known():
    image = np.zeros((2, 2))
    assert kind_of([Item(0), Item(1)]) == "id"
    assert kind_of([Item(0), Item(1, image=image)]) == "image"
    assert kind_of([Item(0, image=image), Item(1, text="t")]) == "text"


@pytest.mark.parametrize(
    ("value", "share", "tone"), [(0.5, 25.0, "pro"), (-2.0, 100.0, "opp"), (0.0, 0.0, "pro")]
)
def test_bars_are_relative_to_the_largest(value, share, tone):
    bar = parse(example(ScoredItem(Item(1), value), "id", 2.0)).one(".bar")
    style = bar.one("i").attributes["style"]
    assert style is not None
    assert float(style.removeprefix("width:").removesuffix("%")) == share
    assert tone in bar.classes


def test_rows_of_zeros_have_empty_bars():
    assert parse(example(ScoredItem(Item(1), 0.0), "id", 0.0)).one(".bar i").attributes["style"] == "width:0%"


def test_an_example_without_its_picture_shows_its_id():
    root = parse(example(ScoredItem(Item(41), 1.0), "image", 1.0))
    assert root.one(".missing").text == "#41"


def test_text_with_a_picture_shows_both():
    root = parse(example(ScoredItem(Item(4, text="a cat", image=np.zeros((2, 2))), 1.0), "text", 1.0))
    assert root.one("img").attributes["alt"] == "training example #4"
    assert root.one("p.passage").text == "a cat"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_scores_must_be_finite(value):
    refused("score of example 9", ScoredItem, Item(9), value)
