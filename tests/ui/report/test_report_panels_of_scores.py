"""From scores to panels: which examples, under which names, with which tokens."""

import pytest
import torch

import toy
from unde import Setup, UndeError, Weights
from unde.data import Rows
from unde.tasks import Task
from unde.ui.report.panels import query_panels
from unde.ui.report.weights import weights_panels

WORDS = ["to", " be", " or", " not"]


class Sum(Task):
    def loss(self, model, batch):
        return model(batch[0]).square().sum(1)


@pytest.fixture
def found(tmp_path):
    index = toy.build(tmp_path / "idx", 6, ids=[f"t{i}" for i in range(6)])
    setup = Setup(
        index.model,
        Sum(),
        toy.data(6),
        eval_queries=toy.data(2, seed=1),
        show=lambda example: "".join(WORDS),
        ids=[f"t{i}" for i in range(6)],
        pieces=lambda example: WORDS,
    )
    return setup, Rows(setup.eval_queries), index.score(setup.eval_queries)


def test_tokens_are_those_of_the_pair_and_the_way(found):
    setup, queries, scores = found
    total = {"unweighted": scores.total(), "weighted": scores.total(torch.tensor([0.0, 2.0]))}
    asked = []

    def tokens(q, i, w):
        asked.append((q, i))
        value = float(total["unweighted" if w is None else "weighted"][q, i])
        return torch.tensor([value, 1.0, -1.0, 0.0], dtype=torch.float64)

    weights = torch.tensor([0.0, 2.0])
    panels = query_panels(
        setup, queries, scores, {"unweighted": None, "weighted": weights}, which=[1], count=2, tokens=tokens
    )
    [panel] = panels
    assert len(asked) == 8 and {q for q, _ in asked} == {1}
    for row in panel.rows:
        best = total[row.name][1].sort(descending=True)
        assert [s.item.id for s in row.proponents] == [f"t{i}" for i in best.indices[:2].tolist()]
        assert [s.item.id for s in row.opponents] == [f"t{i}" for i in best.indices.flip(0)[:2].tolist()]
        for s in (*row.proponents, *row.opponents):
            assert s.tokens is not None
            assert [piece for piece, _ in s.tokens] == WORDS
            assert s.tokens[0][1] == pytest.approx(s.score, rel=1e-6)


def test_shading_needs_both_tokens_and_pieces(found):
    setup, queries, scores = found
    options = {"which": [0], "count": 1}
    plain = query_panels(setup, queries, scores, {"a": None}, **options)
    silent = query_panels(setup, queries, scores, {"a": None}, tokens=lambda q, i, w: None, **options)
    setup.pieces = None
    bare = query_panels(setup, queries, scores, {"a": None}, tokens=lambda q, i, w: [1.0] * 4, **options)
    assert [p[0].shaded for p in (plain, silent, bare)] == [False] * 3


def test_pieces_that_do_not_match_their_tokens_are_refused(found):
    setup, queries, scores = found
    with pytest.raises(UndeError, match=r"4 pieces for training example \d, which has 3 tokens"):
        query_panels(setup, queries, scores, {"a": None}, which=[0], tokens=lambda q, i, w: [1.0] * 3)


def test_queries_have_names_where_given(found):
    setup, queries, scores = found
    named = query_panels(setup, queries, scores, {"a": None}, which=[0, 1], count=1, names=["x:1", "x:2"])
    assert [p.query.id for p in named] == ["x:1", "x:2"]
    assert [p.query.id for p in query_panels(setup, queries, scores, {"a": None}, which=[0, 1])] == [0, 1]


def test_contributors_are_marked_for_their_query(found):
    setup, queries, scores = found
    known = {"style": torch.zeros(2, 6, dtype=bool)}
    known["style"][1, 4] = True
    panels = query_panels(setup, queries, scores, {"a": None}, which=[0, 1], count=6, contributors=known)
    for q, panel in enumerate(panels):
        marks = {s.item.id: [m.letter for m in s.marks] for s in panel.rows[0].proponents}
        assert marks == {f"t{i}": ["S"] if (q, i) == (1, 4) else [] for i in range(6)}
    with pytest.raises(UndeError, match=r"'style' are bool of shape \(2, 5\): expected .* \(2, 6\)"):
        query_panels(
            setup, queries, scores, {"a": None}, which=[0], contributors={"style": known["style"][:, 1:]}
        )


def test_an_example_is_shown_once_however_often_it_is_on_the_page(found):
    setup, queries, scores = found
    asked = []
    setup.show = lambda example: asked.append(1) or {"image": torch.zeros(3, 2, 2), "prompt": "a dot"}
    ways = {"a": None, "b": torch.tensor([0.0, 2.0])}
    panels = query_panels(setup, queries, scores, ways, which=[0, 1], count=6)
    assert len(asked) == 6 + 2  # training examples, queries
    assert panels[0].query.prompt == panels[1].rows[1].opponents[5].item.prompt == "a dot"


def test_keys_that_no_page_knows_are_refused(found):
    setup, queries, scores = found
    setup.show = lambda example: {"promt": "a dot"}
    with pytest.raises(
        UndeError, match=r"unknown key in what Setup.show returns 'promt'.*Did you mean 'prompt'"
    ):
        query_panels(setup, queries, scores, {"a": None}, which=[0])


def test_sets_of_weights_are_brought_to_one_order():
    sets = {
        "x": Weights(torch.tensor([0.5, 1.5]), ["a", "b"]),
        "y": Weights(torch.tensor([0.4, 1.6]), ["b", "a"]),
    }
    panels = weights_panels(sets, ["a", "b"])
    assert [(p.name, p.groups) for p in panels] == [("x", ["a", "b"]), ("y", ["a", "b"])]
    assert panels[1].values == pytest.approx([1.6, 0.4])
