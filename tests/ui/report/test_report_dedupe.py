"""A page holds each picture once, however often it shows it."""

import base64
import re

import numpy as np

from report_dom import parse
from unde.ui.report import Item, Page, QueryPanel, Row, ScoredItem
from unde.ui.report.pixels import encode_png, to_pixels

EVIL = '"><img class="picture" src="data:image/png;base64,AAAA" width="1" height="1" alt="" title="">'


def pictures(n):
    return np.random.default_rng(0).integers(0, 256, (n, 24, 24, 3), dtype=np.uint8)


def page(images, shown, label="a"):
    """A query for each list of training examples."""
    rows = [[ScoredItem(Item(i, label=label, image=images[i]), 1.0) for i in some] for some in shown]
    return Page("t", queries=[QueryPanel(Item(f"q{q}"), [Row("trak", r)]) for q, r in enumerate(rows)]).html()


def drawn(markup):
    """The bytes of every picture that is shown, in order, with its words."""
    root = parse(markup)
    held = {s.attributes["id"]: s.one("image").attributes["href"] for s in root.all("symbol")}
    out = []
    for node in root.walk():
        if "picture" not in node.classes:
            continue
        if node.tag == "img":
            out.append((node.attributes["src"], node.attributes["alt"]))
        else:
            assert node.attributes["role"] == "img"
            out.append((held[node.one("use").attributes["href"][1:]], node.attributes["aria-label"]))
    return [(base64.b64decode(uri.partition(",")[2]), words) for uri, words in out]


def test_each_picture_is_there_once_and_shown_wherever_it_belongs():
    images = pictures(4)
    markup = page(images, [[0, 1], [1, 2], [1, 3, 0]])
    uris = re.findall(r'"(data:image/png;base64,[^"]*)"', markup)
    assert len(uris) == len(set(uris)) == 4
    order = [0, 1, 1, 2, 1, 3, 0]
    wanted = [(encode_png(to_pixels(images[i])), f"training example #{i}, label a") for i in order]
    assert drawn(markup) == wanted


def test_a_page_does_not_grow_with_how_often_a_picture_is_shown():
    images = pictures(1)
    once, often = page(images, [[0]]), page(images, [[0]] * 20)
    picture = len(base64.b64encode(encode_png(to_pixels(images[0]))))
    assert len(often) - len(once) < 20 * picture / 2


def test_texts_that_look_like_pictures_are_left_alone():
    markup = page(pictures(2), [[0, 1], [0, 1]], label=EVIL)
    root = parse(markup)
    assert not root.all("img") and len(root.all("symbol")) == 2
    assert [words for _, words in drawn(markup)] == [
        f"training example #{i}, label {EVIL}" for i in (0, 1, 0, 1)
    ]
    assert "base64,AAAA" not in "".join(n.attributes.get("href") or "" for n in root.all("image"))
