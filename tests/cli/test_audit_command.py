"""`unde audit` on a project of one's own: the page, the files, names that are hostile, and refusals."""

import csv
from pathlib import Path

import pandas as pd
import pytest
from commands import extend_project, run

from refusals import refused
from report_dom import parse, words
from unde import Index
from unde.index.audit import audit
from unde.index.labels import label_rankings
from unde.setup import Recipe
from unde.ui.report.labels_page import COMPARED

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


def test_a_page_of_suspects_and_files(built):
    out = run(f"audit {built}:named --index idx --out p.html --csv s.csv --parquet s.parquet --first 7")
    result, names = audit(opened(f"{built}:make")), ["none", "one", EVIL]
    suspects, issues = result.suspects, result.issues
    assert issues and result.summary in out and result.estimate.split(",")[0] in out
    root = parse(Path("p.html").read_text())
    cards = root.all("#mislabelled li.example")
    assert [words(card.one(".id")) for card in cards] == [f"row-{i}" for i in issues[:7]]
    for i, card in zip(issues, cards):
        text = facts(card)
        assert text["given"] == names[suspects.labels[i]]
        assert text["suggested"].startswith(f"{names[result.suggested[i]]} (")
        for side, some in (("proponents", result.proponents[i]), ("opponents", result.opponents[i])):
            labels = [names[suspects.labels[n]] for n in some]
            counts = {label: labels.count(label) for label in labels}
            tally = {f"{label} ×{n}" if n > 1 else label for label, n in counts.items()}
            assert set(text[side].split(", ")) == tally
    assert words(root.one("#mislabelled-title")) == "Suspected labels"
    assert not root.all(".mark") and not root.all("script")
    assert list(side_by_side(root)) == list(COMPARED) and len(root.all("ol.todo li")) == 3
    with open("s.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"row-{i}" for i in suspects.order.tolist()]
    assert [row["given_label"] for row in rows] == [names[y] for y in suspects.labels[suspects.order]]
    assert rows[0]["opponents"] == " ".join(f"row-{n}" for n in result.opponents[issues[0]])
    assert sum(row["is_label_issue"] == "True" for row in rows) == len(issues)
    frame = pd.read_parquet("s.parquet")
    assert frame.label_quality.tolist() == [float(row["label_quality"]) for row in rows]
    assert frame["index"].tolist() == suspects.order.tolist()


def test_known_labels_give_an_area(built):
    run("build", f"{built}:known", "--out", "wrong", "--projection", "none", "--method", "tracin")
    run(f"audit {built}:known --index wrong --out p.html")
    root, setup = parse(Path("p.html").read_text()), Recipe(f"{built}:known").make()
    rankings = label_rankings(opened(f"{built}:known", "wrong"), names=COMPARED)
    areas = {by: f"{found.auc(setup.true_labels):.3f}" for by, found in rankings.items()}
    assert [words(one) for one in root.all(".areas dd")] == [areas["loss"], areas["quality"]]
    assert areas["quality"] in words(root.one("dl.cards"))
    wrong = {by: found.wrong(setup.true_labels)[found.order[:48]] for by, found in rankings.items()}
    assert side_by_side(root) == {by: [areas[by], str(int(wrong[by].sum()))] for by in rankings}
    assert "3 of 60 labels are wrong (5.0%)" in words(root.all("p.lead")[0])
    wrong = [c for c in root.all("#mislabelled li.example") if "hit" in c.classes]
    assert all("really" in facts(card) for card in wrong)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("audit {}:squared", "this is Squared"),
        ("audit {}:few", "has 2 names, the model has 3 classes"),
        ("audit {}:make --csv nowhere/s.csv", "no folder nowhere"),
        ("report {}:make --labels", "unde audit --index idx"),
    ],
)
def test_refusals(built, command, says):
    refused(says, run, f"{command.format(built)} --index idx --out p.html")
    assert not Path("p.html").exists()
