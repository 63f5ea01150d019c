"""`unde report` on a project of one's own: ways, sets of weights, trust, and files it cannot use."""

import re
from pathlib import Path

import pytest
import torch
from commands import run

from refusals import refused
from unde import Index, UndeError, Weights
from unde.setup import Recipe


def test_a_report_of_several_named_sets(built):
    groups = Weights.load("w.json").groups
    for name, values in (("a.json", [0.5, 1.5]), ("b.json", [1.9, 0.1])):
        Weights(torch.tensor(values), groups).save(name)
    options = ["--index", "idx", "--out", "page.html", "--first", 2, "--top", 3]
    run("report", built, *options, "--weights", "left=a.json", "--weights", "right=b.json")
    page = Path("page.html").read_text()
    first, second = page.split('<article class="query')[1:3]
    for article in (first, second.partition("</article>")[0]):
        assert re.findall("<h4>(.*?)</h4>", article) == ["unweighted", "left", "right"]
    assert re.findall('"weight-set"><h3>(.*?)</h3>', page) == ["left", "right"]
    setup = Recipe(built).make()
    scores = Index.open("idx", model=setup.model, task=setup.task).score(setup.eval_queries)
    best = scores.top(3, Weights.load("b.json")).ids[0]
    assert re.findall('class="id">(.*?)<', first.partition("<h4>right")[2])[:3] == best


def test_one_named_set_and_paths_with_an_equals_sign(built):
    Path("lr=0.1").mkdir()
    for path in ("k=5.json", "lr=0.1/w.json"):  # paths, as they always were
        Path(path).write_text(Path("w.json").read_text())
        run("report", built, "--index", "idx", "--weights", path, "--out", "page.html", "--first", 1)
        assert "<h4>weighted</h4>" in Path("page.html").read_text()
    run("report", built, "--index", "idx", "--weights", "late=w.json", "--out", "page.html", "--first", 1)
    assert "<h4>late</h4>" in Path("page.html").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a=w.json", "a=w.json"], "--weights a=… is given twice"),
        (["a=w.json", "w.json"], "--weights w.json has no name: .* --weights subject=w.json"),
        (["unweighted=w.json"], "'unweighted' names the scores without weights"),
        (["=w.json"], "cannot read --weights =w.json: expected FILE or NAME=FILE"),
        (["a="], "cannot read --weights a=:"),
        (["a=nowhere.json"], "no weights file at 'nowhere.json'"),
        (["runs/lr=0.1/w.json"], "no weights file at 'runs/lr=0.1/w.json'"),
        (["a=idx"], "idx is a folder: expected a file of weights"),
        (["a=w.json", "b=other.json"], "other.json: weights do not match the groups: no weight for '0'"),
    ],
)
def test_weights_that_a_report_cannot_use(built, given, says):
    Weights.uniform(["x", "y"]).save("other.json")
    arguments = [part for text in given for part in ("--weights", text)]
    refused(says, run, "report", built, "--index", "idx", "--out", "page.html", *arguments)
    assert not Path("page.html").exists()


def test_contributors_of_another_shape_are_refused(built, project):
    with pytest.raises(
        UndeError, match=r"contributors 'style' are bool of shape \(3, 60\): expected .*\(15, 60\)"
    ):
        run("report", f"{project}:marked", "--index", "idx")
