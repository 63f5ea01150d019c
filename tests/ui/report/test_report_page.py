"""The page as a whole: complete, well formed, self-contained, legible, and written whole or not at all."""

import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest
from schemes import DARK, LIGHT

from refusals import refused
from report_dom import parse, words
from unde import UndeError
from unde.markup import score
from unde.ui.report import (
    Card,
    HeatmapPanel,
    Item,
    Mark,
    MislabelPanel,
    Page,
    QueryPanel,
    ResultTable,
    RocCurve,
    Row,
    ScoredItem,
    Step,
    WeightsPanel,
)
from unde.ui.report.page import CSS

EVIL = (
    """</style></title><script>alert("1")</script><img src='http://evil.example/x' onerror=alert(1)>&amp;"""
)


def make_page(word: str = "", sets: bool = False) -> Page:
    """A page with every part, with `word` inside every text that a caller can give; with `sets` of weights."""
    rng = np.random.default_rng(0)

    def item(index: int, kind: int) -> Item:
        image = rng.integers(0, 256, (8, 8), dtype=np.uint8) if kind == 0 else None
        passage = f"passage {index} {word} " * 30 if kind == 1 else None
        labels = f"label{index % 3}{word}", f"label{index % 4}{word}"
        prompt = f"prompt{word}" if kind == 0 else None
        return Item(f"id{index}{word}", labels[0], image, passage, labels[1], prompt=prompt)

    def some(kind: int, sign: int) -> list[ScoredItem]:
        more = {"marks": [Mark("S", f"style{word}")]}
        values = sign * rng.random(5)
        return [ScoredItem(item(int(rng.integers(1000)), kind), value, **more) for value in values]

    def query(kind: int) -> QueryPanel:
        names = ("unweighted", "weighted")
        rows = [Row(f"{name}{word}", some(kind, 1), some(kind, -1), word) for name in names]
        more = {"predicted": f"label{kind}{word}"}
        return QueryPanel(item(900 + kind, kind), rows, **more)

    groups = [f"block{i // 4}{word}.layer{i}" for i in range(16)]
    notes = {"objective": [0.1, 0.2], "note": word}
    weights = [
        WeightsPanel(groups, np.ones(16), name=f"{name}{word}", **notes) for name in ("subject", "style")
    ]
    maps = {f"m{word}": [[0.5]]}
    curves = [RocCurve(f"curve{word}", [0, 1], [0, 1], 0.5)]
    return Page(
        title=f"Digits{word}",
        subtitle=f"Subtitle{word}",
        cards=[Card(f"Card{word}", f"41{word}", f"remark{word}")],
        queries=[query(kind) for kind in range(3)],
        weights=weights if sets else weights[0],
        heatmaps=[HeatmapPanel(f"Map{word}", [f"r{word}"], [f"c{word}"], maps, f"recall{word}")],
        mislabelled=MislabelPanel(some(0, 1), curves, 100, 10, f"influence{word}", word),
        tables=[ResultTable(f"ResultTable{word}", [f"column{word}"], [[f"cell{word}"]], f"note{word}")],
        steps=[Step(f"step{word}", 2.0, f"remark{word}")],
        provenance={f"key{word}": f"value{word}", "nested": {f"key{word}": [f"value{word}"]}},
    )


def test_every_label_and_score_is_on_the_page():
    page = make_page()
    root = parse(page.html())
    for position, panel in enumerate(page.queries, 1):
        article = root.one(f"#query-{position}")
        assert words(article.one("h3")).endswith(panel.query.name)
        scored = [each for row in panel.rows for each in (*row.proponents, *row.opponents)]
        assert [words(each) for each in article.all(".score")] == [score(each.score) for each in scored]
        for shown, each in zip(article.all("li.example"), scored):
            assert str(each.item.label) in words(shown.one(".label"))
            assert str(each.item.true_label) in words(shown.one(".label"))
            if each.item.image is None:
                assert words(shown.one(".id")) == each.item.name
            else:
                assert each.item.name in (shown.one("img").attributes["alt"] or "")
    assert [words(card) for card in root.all(".cards dd")] == ["41", "remark"]
    assert words(root.one("h1")) == words(root.one("head title")) == "Digits"


def test_sections_follow_what_is_given():
    anchors = [link.attributes["href"] for link in parse(make_page().html()).all("nav li a")]
    names = "top queries weights heatmaps mislabelled evaluation steps provenance"
    assert anchors == [f"#{name}" for name in names.split()]
    bare = parse(Page("Only a title").html())
    assert [link.attributes["href"] for link in bare.all("nav li a")] == ["#top"]
    assert not bare.all("main section")


def test_links_lead_somewhere_on_the_page():
    root = parse(make_page().html())
    ids = {node.attributes.get("id") for node in root.walk()}
    links = [link.attributes["href"] or "" for link in root.all("a")]
    assert len(links) > 8
    assert all(link.startswith("#") and link[1:] in ids for link in links)


@pytest.mark.parametrize("sets", [False, True])
def test_nothing_is_fetched_and_nothing_runs(sets):
    root = parse(make_page(EVIL, sets).html())
    assert not root.all("script")
    for node in root.walk():
        for name, value in node.attributes.items():
            assert not name.startswith("on"), f"{name} in <{node.tag}>"
            if name in {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}:
                assert re.match(r"data:image/png;base64,|data:,$|#", value or ""), value
    assert "url(" not in CSS
    assert "@import" not in CSS
    metas = {node.attributes.get("http-equiv"): node.attributes.get("content") for node in root.all("meta")}
    policy = metas["Content-Security-Policy"] or ""
    assert policy.startswith("default-src 'none'; img-src data:")
    assert "script-src" not in policy


@pytest.mark.parametrize("sets", [False, True])
def test_what_users_wrote_stays_text(sets):
    plain, evil = parse(make_page("", sets).html()), parse(make_page(EVIL, sets).html())
    # The same elements, whatever the strings say.
    counts = [[node.tag for node in root.walk() if node.tag not in {"wbr", "p"}] for root in (plain, evil)]
    assert set(counts[0]) >= {"img", "svg", "table", "details"}
    for tag in ("img", "article", "li", "rect"):
        assert counts[0].count(tag) == counts[1].count(tag)
    assert "script" not in counts[1]
    shown = evil.text
    assert shown.count(EVIL) > 60
    assert EVIL not in make_page(EVIL, sets).html()
    assert words(evil.one("h1")) == f"Digits{EVIL}"


def test_the_sign_is_explained():
    help_text = words(parse(make_page().html()).one("aside"))
    assert (
        "proponent ▲ has a positive score: training on it lowers the model’s loss on the query" in help_text
    )
    assert "opponent ▼ has a negative score: training on it raises that loss" in help_text
    assert "A weighted row trusts" in help_text
    unweighted = Page("t", queries=make_page().queries)
    assert "A weighted row" not in words(parse(unweighted.html()).one("aside"))
    assert not parse(Page("t").html()).all("aside")  # no queries, nothing to explain


@pytest.mark.parametrize("sets", [False, True])
def test_pictures_have_words_and_headings_have_an_order(sets):
    root = parse(make_page("", sets).html())
    assert all(image.attributes.get("alt") for image in root.all("img"))
    assert all(
        svg.attributes.get("aria-label") or svg.attributes.get("aria-hidden") for svg in root.all("svg")
    )
    levels = [int(node.tag[1]) for node in root.walk() if re.fullmatch("h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert root.one("html").attributes["lang"] == "en"


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_told_from_their_ground(scheme):
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
    for ground in ("page", "panel", "fill"):
        for ink in ("ink", "muted", "pro", "opp", "alarm", "accent"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for tone in range(6):
        assert contrast(colours[f"tone-{tone}"], colours["page"]) >= 3, tone


def test_both_schemes_set_the_same_colours():
    used = set(re.findall(r"var\(--([\w-]+)", CSS)) - {"tone", "shade"}
    for scheme in (LIGHT, DARK):
        assert set(re.findall(r"--([\w-]+):", scheme)) == used
    assert CSS.count("{") == CSS.count("}")


def test_write_makes_one_file(tmp_path):
    path = make_page().write(tmp_path / "deep" / "report.html")
    assert path == tmp_path / "deep" / "report.html"
    assert path.read_text(encoding="utf-8") == make_page().html()
    assert os.listdir(path.parent) == ["report.html"]


def test_write_replaces_an_older_page(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    Page("New").write(str(path))
    assert "<title>New</title>" in path.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["report.html"]


def test_the_same_page_gives_the_same_bytes(tmp_path):
    first, second = (make_page().write(tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_others_may_read_the_page(tmp_path):
    before = os.umask(0o022)
    try:
        path = Page("Shared").write(tmp_path / "report.html")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_page_and_nothing_else(tmp_path, monkeypatch, step, error):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        # The new page is there, beside the old one, when it goes wrong.
        assert len(os.listdir(tmp_path)) == 2
        raise error

    monkeypatch.setattr(os, step, fail)
    expected = UndeError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if expected is UndeError else None):
        Page("New").write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_page_that_cannot_be_rendered_touches_nothing(tmp_path):
    row = Row("trak", [ScoredItem(Item(0, image=np.zeros(3)), 1.0)])
    with pytest.raises(UndeError, match="example 0"):
        Page("Broken", queries=[QueryPanel(Item(1), [row])]).write(tmp_path / "new" / "report.html")
    assert os.listdir(tmp_path) == []


def test_a_folder_is_not_a_page(tmp_path):
    refused("it is a folder", Page("Title").write, tmp_path)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    refused("cannot write the report to", Page("Title").write, tmp_path / "file" / "report.html")


def test_a_link_is_followed(tmp_path):
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old")
    link.symlink_to(real)
    Page("New").write(link)
    assert Path(link).is_symlink()
    assert "New" in real.read_text(encoding="utf-8")
