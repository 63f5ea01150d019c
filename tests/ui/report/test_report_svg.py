"""Plots: geometry follows the numbers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusals import refused
from report_dom import Node, parse
from unde.ui.report.svg import Bar, Line, bar_plot, line_plot, ticks


def at(node: Node, name: str) -> float:
    value = node.attributes[name]
    assert value is not None
    return float(value)


def points(root: Node) -> list[list[tuple[float, float]]]:
    curves = []
    for node in root.all("polyline"):
        pairs = (node.attributes["points"] or "").split()
        curves.append([(float(pair.split(",")[0]), float(pair.split(",")[1])) for pair in pairs])
    return curves


def plot_bars(values, **kwargs) -> Node:
    bars = [Bar(float(value), f"layer{index}", **kwargs) for index, value in enumerate(values)]
    return parse(bar_plot(bars, title="weights"))


@pytest.mark.parametrize("amount", [1, 2, 10, 64, 65, 300])
def test_bar_heights_are_proportional(amount):
    values = np.random.default_rng(amount).gamma(1.0, 1.0, amount)
    values[0] = 0.0 if amount > 1 else values[0]
    values /= values.mean()
    root = plot_bars(values)
    heights = np.array([at(bar, "height") for bar in root.all("rect.mark-bar")])
    assert len(heights) == amount
    unit = heights.max() / values.max()
    assert np.allclose(heights, unit * values, atol=0.011)
    assert heights.max() > 50
    # All stand on one ground, and the line of uniform weight is one unit above it.
    feet = {round(at(bar, "y") + at(bar, "height"), 1) for bar in root.all("rect.mark-bar")}
    assert len(feet) == 1
    line = root.one("line.reference")
    assert at(line, "y1") == at(line, "y2")
    assert feet.pop() - at(line, "y1") == pytest.approx(unit, abs=0.06)


@pytest.mark.parametrize("amount", [10, 41, 64, 300])
def test_bars_do_not_touch_and_stay_inside(amount):
    root = plot_bars(np.ones(amount))
    width = at(root.one("svg"), "width")
    assert width <= 1100
    bars = root.all("rect.mark-bar")
    edges = [(at(bar, "x"), at(bar, "x") + at(bar, "width")) for bar in bars]
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(edges))
    assert edges[0][0] > 0
    assert edges[-1][1] < width
    assert edges[0][1] - edges[0][0] > 2  # wide enough to see


def test_every_bar_is_named_until_names_no_longer_fit():
    few, many = plot_bars(np.ones(64)), plot_bars(np.ones(65))
    assert [label.text for label in few.all("text.bar-label")] == [f"layer{index}" for index in range(64)]
    assert many.all("text.bar-label") == []
    # The tooltip names them in any case.
    assert many.all(".bar-group title")[64].text == "layer64: 1"
    spots = [at(label, "x") for label in few.all("text.bar-label")]
    assert min(right - left for left, right in itertools.pairwise(spots)) >= 11  # the height of their letters


def test_names_fit_below_and_long_ones_keep_their_end():
    bars = [Bar(1.0, "encoder." * 8 + "tail"), Bar(1.0, "x")]
    root = parse(bar_plot(bars, title="w"))
    shown = root.all("text.bar-label")[0]
    assert shown.text.startswith("…")
    assert shown.text.endswith("encoder.tail")
    assert at(root.one("svg"), "height") >= at(shown, "y") + 6 * len(shown.text)


def test_blocks_are_ruled_and_coloured():
    names = ["embedding"] + ["layer1"] * 6 + ["layer2"] * 6
    bars = [Bar(1.0, "x", block=name) for name in names]
    root = parse(bar_plot(bars, title="w"))
    tones = [(bar.classes - {"mark-bar"}).pop() for bar in root.all("rect.mark-bar")]
    assert tones == ["tone-0"] + ["tone-1"] * 6 + ["tone-2"] * 6
    assert [label.text for label in root.all("text.block-label")] == [
        "layer1",
        "layer2",
    ]  # the first is too narrow
    assert len(root.all("line.divider")) == 2
    # A divider stands between the last bar of a block and the first of the next.
    bars_at = [at(bar, "x") for bar in root.all("rect.mark-bar")]
    assert bars_at[0] < at(root.all("line.divider")[0], "x1") < bars_at[1]


def test_colours_come_round():
    bars = [Bar(1.0, "x", block=f"block{index}") for index in range(8)]
    root = parse(bar_plot(bars, title="w"))
    tones = [(bar.classes - {"mark-bar"}).pop() for bar in root.all("rect.mark-bar")]
    assert tones == [f"tone-{index % 6}" for index in range(8)]


def test_roc_goes_through_its_points():
    curve = Line("weighted", [0.0, 0.0, 0.25, 1.0], [0.0, 0.6, 0.8, 1.0])
    lines = [curve, Line("chance", [0.0, 1.0], [0.0, 1.0])]
    unit = (0.0, 1.0)
    root = parse(
        line_plot(
            lines,
            title="roc",
            x_label="x",
            y_label="y",
            x_range=unit,
            y_range=unit,
            diagonal=True,
            size=(370, 370),
        )
    )
    diagonal = root.one("line.diagonal")
    left, bottom = at(diagonal, "x1"), at(diagonal, "y1")
    right, top = at(diagonal, "x2"), at(diagonal, "y2")
    first, second = points(root)
    expected = [(left + x * (right - left), bottom - y * (bottom - top)) for x, y in zip(curve.x, curve.y)]
    assert first == [pytest.approx(point, abs=0.011) for point in expected]
    assert second == [(left, bottom), (right, top)]
    assert top < bottom  # up is up
    assert right - left == pytest.approx(bottom - top, rel=0.15)  # nearly square


def test_line_plot_ranges_hold_the_data():
    root = parse(line_plot([Line("a", [1, 2, 3], [-5.0, 0.0, 2.5])], title="t", x_label="x", y_label="y"))
    (curve,) = points(root)
    axis = root.one("line.axis")
    assert (curve[0][0], curve[-1][0]) == (at(axis, "x1"), at(axis, "x2"))
    assert all(0 < y < at(axis, "y1") for _, y in curve)
    heights = [y for _, y in curve]
    assert (heights[0] - heights[1]) / (heights[1] - heights[2]) == pytest.approx(2.0, abs=0.01)


def test_flat_and_single_point_curves_can_be_drawn():
    flat = parse(line_plot([Line("a", [1, 2], [3.0, 3.0])], title="t", x_label="x", y_label="y"))
    (curve,) = points(flat)
    assert curve[0][1] == curve[1][1]
    single = parse(line_plot([Line("a", [1], [0.0])], title="t", x_label="x", y_label="y"))
    assert len(single.all("circle")) == 1


def test_long_curves_are_thinned_and_keep_their_ends():
    values = np.arange(100_000.0)
    (curve,) = points(parse(line_plot([Line("a", values, values)], title="t", x_label="x", y_label="y")))
    assert len(curve) == 600
    axis = parse(line_plot([Line("a", values, values)], title="t", x_label="x", y_label="y")).one("line.axis")
    assert (curve[0][0], curve[-1][0]) == (at(axis, "x1"), at(axis, "x2"))


def test_plots_have_a_name_for_those_who_cannot_see_them():
    svg = plot_bars([1.0]).one("svg")
    assert (svg.attributes["role"], svg.attributes["aria-label"]) == ("img", "weights")


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low, width):
    high = low + width
    marks = ticks(low, high)
    if high > low and width > 1e-9 * abs(low):
        assert 1 <= len(marks) <= 9
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= mark <= high + slack for mark in marks)
    assert marks == sorted(set(marks))


def test_bad_curves_are_refused():
    refused("2 x and 1 y", Line, "a", [1, 2], [1])
    refused("0 x and 0 y", Line, "a", [], [])
    refused("at least one bar", bar_plot, [], title="t")
    refused("at least one curve", line_plot, [], title="t", x_label="x", y_label="y")
