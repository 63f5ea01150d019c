"""Heat maps: every number in its cell, one scale for all, legible on both grounds."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from schemes import DARK, LIGHT
from test_report_page import contrast, luminance

from refusals import refused
from report_dom import parse, words
from unde.ui.report import HeatmapPanel, Page
from unde.ui.report.tables import HEATS, heatmaps_section

ROWS, COLUMNS = ["down_blocks.0", "mid_block"], ["attn1.to_q", "attn1.to_k", "attn2.to_out"]
MAPS = {
    "subject": np.array([[0.0, 0.31, math.nan], [0.625, 0.05, 0.2]]),
    "style": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, math.nan]]),
}


@pytest.fixture
def root():
    return parse(heatmaps_section([HeatmapPanel("Recall", ROWS, COLUMNS, MAPS, "recall@10")]))


def cells(figure):
    """(tooltip, shade, number) of each cell, in reading order."""
    return [
        (td.attributes["title"], [c for c in td.classes if c.startswith("heat-")], words(td))
        for td in figure.all("tbody td")
    ]


def test_every_value_is_in_its_cell(root):
    subject, style = root.all("figure")
    assert [words(h) for h in root.all("caption")] == ["subject", "style"]
    assert cells(subject) == [
        ("down_blocks.0, attn1.to_q: 0 %", ["heat-0"], "0"),
        ("down_blocks.0, attn1.to_k: 31 %", ["heat-4"], "31"),
        ("down_blocks.0, attn2.to_out: none", [], "–"),
        ("mid_block, attn1.to_q: 62.5 %", ["heat-8"], "62"),
        ("mid_block, attn1.to_k: 5 %", ["heat-0"], "5"),
        ("mid_block, attn2.to_out: 20 %", ["heat-2"], "20"),
    ]
    # One scale for both, up to 70 %: 0.2 has the same shade in either map.
    assert ("down_blocks.0, attn1.to_k: 20 %", ["heat-2"], "20") in cells(style)
    assert words(root.one(".heat-scale")) == "recall@10 in %: 0 70"
    assert len(root.all(".heat-scale i")) == HEATS


def test_maps_can_be_read_without_seeing_them(root):
    subject, style = root.all("figure")
    said = subject.attributes["aria-label"]
    assert said == "heat map of recall@10 for subject: highest 62.5 % at mid_block, attn1.to_q"
    assert style.attributes["aria-label"].endswith("highest 50 % at mid_block, attn1.to_k")
    assert [words(h) for h in subject.all("thead th")] == COLUMNS
    assert [words(h) for h in subject.all("tbody th")] == ROWS


@pytest.mark.parametrize(
    ("highest", "top", "shown"), [(0.004, 0.01, "0.4"), (0.07, 0.1, "7.0"), (1.0, 1.0, "100")]
)
def test_the_scale_fits_the_values(highest, top, shown):
    panel = HeatmapPanel("t", ["r"], ["c"], {"a": [[highest]], "b": [[math.nan]]})
    assert panel.top == top
    one, none = parse(heatmaps_section([panel])).all("figure")
    assert words(one.one("tbody td")) == shown
    assert words(none.one("figcaption")) == "No cell"
    assert HeatmapPanel("t", ["r"], ["c"], {"a": [[math.nan]]}).top == 1


@pytest.mark.parametrize(
    ("rows", "maps", "says"),
    [
        (["r"], {}, "1 rows, 2 columns and 0 maps: expected at least one of each"),
        ([], {"a": np.zeros((0, 2))}, "0 rows"),
        (["r"], {"a": [[0.1, 0.2], [0.3, 0.4]]}, r"map 'a' of 't' has the shape \(2, 2\): expected \(1, 2\)"),
        (["r"], {"a": [[0.1, 20.0]]}, "map 'a' of 't' has 20 at 'r', 'y': expected shares from 0 to 1"),
        (["r"], {"a": [[-0.1, 0.2]]}, "has -0.1 at 'r', 'x'"),
        (["r"], {"a": [[math.inf, 0.2]]}, "has inf at 'r', 'x'"),
    ],
)
def test_bad_maps_are_refused(rows, maps, says):
    refused(says, HeatmapPanel, "t", rows, ["x", "y"], maps)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_shades_go_one_way_and_numbers_stand_out(scheme):
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
    heats = [colours[f"heat-{level}"] for level in range(HEATS)]
    light = [luminance(colour) for colour in heats]
    steps = [after - before for before, after in itertools.pairwise(light)]
    # By luminance alone neighbours differ and their order shows, so no hue is needed.
    assert len({step > 0 for step in steps}) == 1
    assert all(contrast(one, other) > 1.15 for one, other in itertools.pairwise(heats))
    # Higher is further from the ground.
    ground = [contrast(colour, colours["page"]) for colour in heats]
    assert ground == sorted(ground)
    for level, heat in enumerate(heats):
        assert contrast(heat, colours["ink" if level < HEATS // 2 else "page"]) >= 4.5, level


def test_a_page_links_to_its_heat_maps():
    page = parse(Page("t", heatmaps=[HeatmapPanel("Recall", ROWS, COLUMNS, MAPS)]).html())
    assert "#heatmaps" in [link.attributes["href"] for link in page.all("nav li a")]
    assert words(page.one("#heatmaps h3")) == "Recall"
