"""`unde report --labels` on a project of one's own: the page, the file, names that are hostile, and refusals."""

import csv
from pathlib import Path

import pytest
from commands import extend_project, run

from refusals import refused
from report_dom import parse, words
from unde import Index, Weights
from unde.index.labels import DEFAULT, label_rankings, neighbours
from unde.setup import Recipe

EVIL = "</dd><script>alert(1)</script>"
MORE = f"""

def named():
    setup = make()
    setup.classes = ["none", "one", "{EVIL}"]
    return setup

def known():
    setup = named()
    x, y = setup.train_data
    setup.true_labels = y
    wrong = y.clone()
    wrong[[5, 17, 40]] = (y[[5, 17, 40]] + 1) % 3
    setup.train_data = (x, wrong)
    return setup

def few():
    setup = make()
    setup.classes = ["one", "two"]
    return setup

class Squared(unde.Task):
    def loss(self, model, batch):
        return model(batch[0]).square().sum(1)

def squared():
    setup = make()
    setup.task = Squared()
    return setup
"""


@pytest.fixture
def built(project):
    extend_project(project, MORE, "make", "--method", "tracin")
    return project


def opened(target, path="idx"):
    setup = Recipe(target).make()
    return Index.open(path, model=setup.model, task=setup.task, train_data=setup.train_data)


def facts(card):
    return {words(row.one("dt")): words(row.one("dd")) for row in card.all(".said div")}


def side_by_side(root):
    rows = root.all("#mislabelled tbody tr")
    return {words(row.one("th")): [words(cell) for cell in row.all("td")] for row in rows}


def test_a_page_of_suspects_and_a_file(built):
    run(f"report {built}:named --index idx --labels --out p.html --csv s.csv --first 7")
    index = opened(f"{built}:make")
    rankings, names = label_rankings(index), ["none", "one", EVIL]
    found = rankings[DEFAULT]
    root = parse(Path("p.html").read_text())
    cards = root.all("#mislabelled li.example")
    first = found.order[:7].tolist()
    assert [words(card.one(".id")) for card in cards] == [f"row-{i}" for i in first]
    along, against = neighbours(index, first)
    for i, card, pro, opp in zip(first, cards, along, against, strict=True):
        told = facts(card)
        place = rankings["loss"].order.tolist().index(i) + 1
        assert told["by loss"] == f"{place} of 60"
        assert told["given"] == names[found.labels[i]] and told["predicted"] == names[found.predicted[i]]
        for side, some in (("proponents", pro), ("opponents", opp)):
            labels = [names[found.labels[n]] for n in some]
            counts = {label: labels.count(label) for label in labels}
            tally = {f"{label} ×{n}" if n > 1 else label for label, n in counts.items()}
            assert set(told[side].split(", ")) == tally
    assert words(root.one("#mislabelled-title")) == "Suspected labels"
    assert not root.all(".mark") and not root.all("script")
    common = {by: len(set(first) & set(other.order[:7].tolist())) for by, other in rankings.items()}
    assert side_by_side(root) == {by: [str(count)] for by, count in common.items()}
    with open("s.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"row-{i}" for i in found.order.tolist()]
    assert [row["given"] for row in rows] == [names[y] for y in found.labels[found.order]]
    for by, other in rankings.items():
        assert [float(row[by]) for row in rows] == other.scores[found.order].tolist()


def test_known_labels_give_an_area(built):
    run("build", f"{built}:known", "--out", "wrong", "--projection", "none", "--method", "tracin")
    run(f"report {built}:known --index wrong --labels --out p.html --by self-influence")
    root, setup = parse(Path("p.html").read_text()), Recipe(f"{built}:known").make()
    rankings = label_rankings(opened(f"{built}:known", "wrong"))
    areas = {by: f"{found.auc(setup.true_labels):.3f}" for by, found in rankings.items()}
    area = areas["self-influence"]
    assert [words(one) for one in root.all(".areas dd")] == [areas["loss"], area]
    assert area in words(root.one("dl.cards"))
    wrong = {by: found.wrong(setup.true_labels)[found.order[:48]] for by, found in rankings.items()}
    assert side_by_side(root) == {by: [areas[by], str(int(wrong[by].sum()))] for by in rankings}
    assert "3 of 60 labels are wrong (5.0%)" in words(root.all("p.lead")[0])
    wrong = [c for c in root.all("#mislabelled li.example") if "hit" in c.classes]
    assert all("really" in facts(card) for card in wrong)


def test_weights_count_where_influence_ranks(built):
    run("build", f"{built}:known", "--out", "wrong", "--projection", "none", "--method", "tracin")
    index, setup = opened(f"{built}:known", "wrong"), Recipe(f"{built}:known").make()
    values = [2.0] + [0.5] * (len(index.groups) - 1)
    Weights(values, index.groups.names).save("w.json")
    shared = f"report {built}:known --index wrong --labels --out p.html --weights w.json"
    run(shared, "--by", "opposition")
    rows = parse(Path("p.html").read_text()).all(".areas div")
    areas = {words(row.one("dt")): words(row.one("dd")) for row in rows}
    plain, weighted = (label_rankings(index, w)["opposition"].auc(setup.true_labels) for w in (None, values))
    loss = label_rankings(index)["loss"].auc(setup.true_labels)
    assert areas == {"loss": f"{loss:.3f}", "unweighted": f"{plain:.3f}", "weighted": f"{weighted:.3f}"}
    run(shared)
    names = [words(one) for one in parse(Path("p.html").read_text()).all(".areas dt")]
    assert names == ["loss", DEFAULT]  # weights do not change a loss


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["squared", "--labels"], "this is Squared"),
        (["few", "--labels"], "has 2 names, the model has 3 classes"),
        (["make", "--labels", "--query", 3], "--labels looks at training examples"),
        (["make", "--csv", "s.csv"], "--csv goes with --labels"),
        (["make", "--by", "opposition"], "--by goes with --labels"),
        (["make", "--by", "normalised"], "--by goes with --labels"),
        (["make", "--labels", "--by", "size"], "unknown ranking of --labels 'size'"),
    ],
)
def test_refusals(built, arguments, says):
    target, *rest = arguments
    refused(says, run, "report", f"{built}:{target}", "--index", "idx", "--out", "p.html", *rest)
    assert not Path("p.html").exists() and not Path("s.csv").exists()
