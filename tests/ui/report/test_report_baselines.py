"""Rows of baselines in a report: their top lists, what they share with the method, and their switches."""

import sys

import pytest
import torch
from torch import nn

from report_dom import parse
from unde import Index, Setup
from unde.evaluate import baseline_scores
from unde.methods import TRAK
from unde.tasks import Classification
from unde.ui.report import Item, QueryPanel, Row, ScoredItem
from unde.ui.report import panels as baselines
from unde.ui.report.panels import page_of
from unde.ui.report.queries import queries_section

HIDDEN = "hidden-state similarity"


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    pytest.importorskip("transformers")
    from hf_toy import LINES, gpt2, tokenizer

    from unde.integrations.transformers import hf_setup

    queries = ["The people are free and strong.", "Taxes and debt."]
    lines = [*LINES, "word " * 60 + "and more"]
    setup = hf_setup(gpt2(), lines, tokenizer=tokenizer(), eval_queries=queries, seq_len=64)
    folder = tmp_path_factory.mktemp("language") / "idx"
    method = TRAK(projection="kron(4)")
    return setup, Index.build(
        setup.model, setup.task, setup.train_data, folder, method=method, progress=False, ids=setup.ids
    )


def page(setup, index, **more):
    queries = setup.rows(setup.eval_queries)
    scores = index.score(queries)
    made = page_of(index, setup, queries, scores, {}, title="A page", count=3, **more)
    return made, scores, parse(made.html())


def test_rows_are_the_top_lists(language):
    setup, index = language
    made, scores, tree = page(setup, index)
    queries = setup.rows(setup.eval_queries)
    texts = setup.texts(setup.rows(setup.train_data)), setup.texts(queries)
    expected = baseline_scores(setup.model, setup.task, setup.train_data, queries, texts=texts)
    best = scores.top(10).indices.tolist()
    for q, panel in enumerate(made.queries):
        assert [row.name for row in panel.rows] == ["unweighted", "BM25", HIDDEN]
        for row in panel.rows[1:]:
            order = sorted(range(len(index)), key=lambda i: -float(expected[row.name][q, i]))
            assert [scored.item.id for scored in row.proponents] == [setup.ids[i] for i in order[:3]]
            assert row.shared == (len(set(order[:10]) & set(best[q])), 10)
            assert row.opponents == () and not row.signed
    articles = tree.all("article")
    assert [len(article.all("section.row.baseline")) for article in articles] == [2, 2]
    heads = [section.one("h4").text for section in articles[0].all("section.baseline")]
    assert heads == ["BM25", HIDDEN]
    shared = made.queries[0].rows[1].shared[0]
    assert f"shares {shared} of its top 10 with “unweighted”" in articles[0].one("section.baseline-0").text
    assert articles[0].one("section.baseline-0").all("div.side.high")


def test_switches_are_off_and_say_what_is_shared(language):
    setup, index = language
    made, _, tree = page(setup, index)
    boxes = tree.all("div.switches input")
    assert [box.attributes["id"] for box in boxes] == ["show-baseline-0", "show-baseline-1"]
    assert not any("checked" in box.attributes for box in boxes)
    mean = sum(panel.rows[1].shared[0] for panel in made.queries) / 2
    assert f"show BM25 shares {mean:.1f} of its top 10 on average" in tree.one("div.switches").text
    assert "Baselines can be switched on" in tree.one("aside.reading-help").text
    assert "no opponents" not in tree.one("aside.reading-help").text  # baselines have none anyway


def test_long_texts_are_cut():
    item = Item(0, text="word " * 200)
    assert baselines._beginning(item).text == ("word " * 64).rstrip() + " …"
    assert baselines._beginning(Item(1, text="short")).text == "short"


def test_pages_without_baselines(language, tmp_path):
    setup, index = language
    made, _, tree = page(setup, index, baselines=False)
    assert [row.name for row in made.queries[0].rows] == ["unweighted"] and not tree.all("input")
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    plain = Setup(nn.Linear(4, 3), Classification(), (x[:9], y[:9]), eval_queries=(x[9:], y[9:]))
    index = Index.build(plain.model, plain.task, plain.train_data, tmp_path / "idx", progress=False)
    made, _, tree = page(plain, index)
    assert [row.name for row in made.queries[0].rows] == ["unweighted"] and not tree.all("input")


def test_a_pass_that_takes_too_long_is_left_out(language, monkeypatch, capfd):
    setup, index = language
    monkeypatch.setattr(baselines, "SECONDS", 0.0)
    monkeypatch.setattr(baselines, "_FIRST_SECONDS", 0.0)
    made, _, _ = page(setup, index)
    assert [row.name for row in made.queries[0].rows] == ["unweighted", "BM25"]
    said = " ".join(capfd.readouterr().err.split())
    assert "the page has no column of hidden-state similarity: a pass over" in said


def test_without_the_package_of_bm25(language, monkeypatch, capfd):
    setup, index = language
    monkeypatch.setitem(sys.modules, "bm25s", None)
    made, _, _ = page(setup, index)
    assert [row.name for row in made.queries[0].rows] == ["unweighted", HIDDEN]
    assert "the page has no BM25 column" in " ".join(capfd.readouterr().err.split())


def test_baselines_beside_weighted_rows():
    some = [ScoredItem(Item(3, text="a text"), 0.5)]
    rows = [Row("unweighted", some, some), Row("weighted", some, some), Row("BM25", some, shared=(1, 1))]
    tree = parse(f"<main>{queries_section([QueryPanel(Item('q', text='asked'), rows)])}</main>")
    assert tree.one("div.rows").classes == {"rows", "beside", "compared"}
    assert "show BM25 shares 1 of its top 1" in tree.one("div.switches").text
    tree = parse(f"<main>{queries_section([QueryPanel(Item('q', text='asked'), rows[:2])])}</main>")
    assert tree.one("div.rows").classes == {"rows", "beside"} and not tree.all("div.switches")
