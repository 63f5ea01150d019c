"""What notebooks show: markup that is well-formed, escaped, without scripts, and that needs no colours of a page."""

import re
from xml.dom import minidom

import numpy as np
import torch
from random_group_scores import random_scores

import toy
from unde import Weights
from unde.evaluate import Estimate
from unde.scoring import from_arrays

EVIL = "<script>alert(1)</script>&\"'\x00"


def shown(thing) -> str:
    html = thing._repr_html_()
    minidom.parseString(html.replace("<br>", "<br/>"))  # raises unless all tags are closed
    assert "<script" not in html and "<style" not in html and "http" not in html and "\x00" not in html
    # Text has no colour of its own, so that it is read on any ground.
    assert not re.search(r"(?<!-)color:(?!inherit)", html)
    assert len(html) < 20_000
    return html


def test_every_object_shows_itself(tmp_path):
    index = toy.build(tmp_path / "idx<&>", 6, ids=[f"{EVIL}{i}" for i in range(6)])
    scores = index.score(toy.data(3, seed=1))
    html = shown(index)
    assert "idx&lt;&amp;&gt;" in html and "TracIn" in html and ">6<" in html
    assert ">3<" in shown(scores) and "2: 0, 2" in shown(scores)
    top = scores.top(2)
    html = shown(top)
    assert html.count("&lt;script&gt;") == 6
    assert f"{abs(top.values[0, 0].item()):.3g}"[:4] in html
    assert "group 2" in shown(from_arrays(random_scores(2, 3).by_group()))


def test_bars_are_as_long_as_weights():
    names = [EVIL, *(f"g{i}" for i in range(30))]
    html = shown(Weights(torch.arange(31.0) + 1, names))
    widths = [float(w) for w in re.findall(r"width:([\d.]+)px", html)]
    assert len(widths) == 12 and widths[0] == 80.0  # the largest twelve
    np.testing.assert_allclose(widths, [80 * (31 - i) / 31 for i in range(12)], rtol=1e-2)
    assert "and 19 more" in html
    assert "&lt;script&gt;" in shown(Weights(torch.tensor([3.0, 1.0]), names[:2]))
    assert ", uniform" in shown(Weights.uniform(["a"]))


def test_an_estimate_and_its_interval():
    html = shown(Estimate(np.array([0.0, 0.5, 1.0, np.nan])))
    assert "3, from 0 to 1" in html and "undefined for 1 of 4" in html
    [left] = [float(x) for x in re.findall(r"left:([\d.]+)px;width:3px", html)]
    assert left == 79.0  # the mean, 0.5, in the middle of 160
    assert "interval" not in shown(Estimate(np.array([0.5]))).replace("no interval", "")


def test_many_queries_are_few_rows():
    html = shown(random_scores(300, 50).top(40))
    assert html.count("<tr") == 1 + 25 and "the first 5 of each are shown" in html
