"""`unde report --query`: a page on one query, by its number or from the file of an image."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import extend_project, invoke, run

from refusals import refused
from report_dom import parse, words
from unde import Index, UndeError
from unde.setup import Recipe

Image = pytest.importorskip("PIL.Image")

PICTURES = """

def pictures(low=0.0, high=1.0):
    generator = torch.Generator().manual_seed(0)
    x = low + (high - low) * torch.rand(40, 1, 4, 4, generator=generator)
    y = (x.mean((1, 2, 3)) > (low + high) / 2).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    return unde.Setup(model, unde.tasks.Classification(), (x[:30], y[:30]), eval_queries=(x[30:], y[30:]),
                      classes=["dark", "light"])

def normalised():
    return pictures(-2.0, 2.5)

def asked():
    setup = pictures()
    x, y = setup.eval_queries
    one = lambda i: (x[i : i + 1], y[i : i + 1])
    setup.ask = unde.setup.Ask(text=lambda text: one(int(text.split()[1])), picture=lambda p, _: one(p.size[0]))
    return setup
"""


@pytest.fixture
def built(project):
    return extend_project(project, PICTURES, "pictures", "--method", "tracin")


def page(*arguments):
    run("report", *arguments, "--index", "idx", "--out", "p.html")
    return parse(Path("p.html").read_text())


def shown(root):
    """Training examples of each row, by the words of their pictures."""
    words = [n.attributes.get("alt") or n.attributes.get("aria-label") for n in root.all(".rows .picture")]
    return [int(re.search(r"#(\d+)", w)[1]) for w in words]


def test_a_page_on_just_that_query(built):
    root, setup = page(built, "--query", 7, "--top", 3), Recipe(built).make()
    [article] = root.all("article")
    assert words(article.one("h3")) == "Query #7"
    x, y = setup.eval_queries
    scores = Index.open("idx", model=setup.model, task=setup.task).score((x[7:8], y[7:8])).total()[0]
    order = scores.argsort(descending=True).tolist()
    assert shown(article) == order[:3] + order[::-1][:3]
    rows = json.loads(run("attribute", built, "--index", "idx", "--query", 7, "--top", 3, "--format", "json"))
    assert [r["index"] for r in rows] == order[:3] and {r["query_id"] for r in rows} == {7}
    both = page(built, "--query", 7, "--query", 2).all("article")
    assert [words(a.one("h3")) for a in both] == ["Query #7", "Query #2"]


def test_the_file_of_an_image_is_asked_about_as_the_model_sees_it(built):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4), dtype=np.uint8)
    Image.fromarray(pixels).save("some.png")
    root, setup = page(built, "--query", "some.png", "--top", 3), Recipe(built).make()
    x = torch.from_numpy(pixels)[None, None] / 255
    predicted = int(setup.model(x).argmax())
    index = Index.open("idx", model=setup.model, task=setup.task)
    scores = index.score((x, torch.tensor([predicted]))).total()[0]
    order = scores.argsort(descending=True).tolist()
    assert shown(root.one("article")) == order[:3] + order[::-1][:3]
    name = ["dark", "light"][predicted]
    assert [words(f) for f in root.all(".facts div")] == [f"predicted{name}", f"asked about{name}"]
    assert words(root.one("h3")) == "Query some.png"


def test_refusals(built, project):
    Path("text.png").write_text("no image")
    for asked, says in (
        ("99", "there are 10 queries, numbered from 0 to 9"),
        ("a text", "is no file: expected the file of an image, or a number"),
        ("text.png", "--query text.png: this file is no PNG or JPEG picture"),
    ):
        refused(says, page, built, "--query", asked)
    with pytest.raises(
        UndeError, match=r"brings its own queries, eval and learn. A folder of samples is for"
    ):
        page(built, "--queries", ".")
    Image.new("L", (4, 4)).save("dark.png")
    run("build", f"{project}:normalised", "--out", "other", "--projection", "none", "--method", "tracin")
    said = invoke(f"report {project}:normalised --index other --query dark.png --out q.html")
    assert "brought to the range of the training pictures, -1.99 to 2.5" in " ".join(said.split())
    run("build", f"{project}:make", "--out", "rows", "--projection", "none", "--method", "tracin")
    with pytest.raises(UndeError, match="training examples are not images"):
        run("report", f"{project}:make", "--index", "rows", "--query", "dark.png", "--out", "p.html")
    assert not Path("p.html").exists()


def test_a_setup_says_how_to_read_texts_and_images(built, project):
    numbered = shown(page(built, "--query", 3, "--top", 3))
    assert shown(page(f"{project}:asked", "--query", "number 3", "--top", 3)) == numbered
    Image.new("L", (3, 1)).save("three.png")
    assert shown(page(f"{project}:asked", "--query", "three.png", "--top", 3)) == numbered
    assert numbered != shown(page(built, "--query", 4, "--top", 3))
    refused("'number 3' is no file", page, f"{project}:asked", "--query", "number 3", "--query", "three.png")
