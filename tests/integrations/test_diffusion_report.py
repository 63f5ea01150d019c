"""From a Stable Diffusion pipeline and images with known contributors to one page, on the command line."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import sd_toy
from commands import run

from unde import Index, Weights
from unde.setup import Recipe

pytest.importorskip("diffusers")
pytest.importorskip("peft")
if find_spec("robohash") is None:  # only its files are read
    pytest.skip("robohash is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PROJECT = """
from functools import cache

import numpy as np
import sd_toy
from experiments.datasets import robots
from unde.integrations.diffusers import diffusion_setup, sample_pipeline

@cache
def data():
    drawn = robots(size=32)
    return drawn.take(np.arange(0, len(drawn), 20))  # one image of each category

def make(target="style"):
    pipeline = sd_toy.load("saved")
    pipeline.unet = sd_toy.unet(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
    sd_toy.trained(pipeline)
    pictures = data().images[:, ::4, ::4].transpose(0, 3, 1, 2)  # 8 x 8 pixels
    ask = lambda prompts, seeds: sample_pipeline(pipeline, prompts, seeds, steps=2, progress=False)
    learn = data().queries("train", [target], repeats=1).prompts
    test = data().queries("validation", repeats=1)
    setup = diffusion_setup(
        pipeline, pictures, data().prompts, timesteps=2,
        learn_queries=ask(learn, range(100, 105) if target == "style" else range(200, 205)),
        eval_queries=ask(test.prompts[:3], range(3)),
    )
    setup.contributors = {a: data().contributors(test.labels, a)[:3] for a in data().categories}
    return setup

def subject():
    return make("subject")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("robots")
    sd_toy.save(folder)
    (folder / "robot_project.py").write_text(PROJECT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        run("build robot_project:make --out d-trak --method d-trak --projection", "kron(2)")
        for target in ("make", "subject"):
            run(
                f"learn robot_project:{target} --index d-trak --out {target}.json --queries learn --k 2 "
                "--weight-decay 0.1"
            )
        yield folder


def row_of(page, query, name):
    """The part of the page with one row of one query."""
    article = page.split('<article class="query')[query + 1].split("</article>")[0]
    return next(r for r in article.split('<section class="row">') if f"<h4>{name}</h4>" in r)


def test_a_page_with_prompts_marks_and_sets_of_weights(built):
    weights = "--weights style=make.json --weights subject=subject.json"
    run(f"report robot_project:make --index d-trak --out page.html --top 4 {weights}")
    page = Path("page.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)  # one file, nothing beside it
    setup = Recipe("robot_project:make").make()
    scores = Index.open("d-trak", model=setup.model, task=setup.task).score(setup.eval_queries)
    ways = {"unweighted": None, "style": Weights.load("make.json"), "subject": Weights.load("subject.json")}
    letters = {"subject": "P", "style": "S", "background": "B"}
    marked = 0
    for q, prompt in enumerate(setup.eval_queries["text"]):
        article = page.split('<article class="query')[q + 1]
        assert (
            f'<div class="prompt"><h4 class="note">Prompt</h4><p class="passage" dir="auto">{prompt}</p>'
            in article
        )
        for name, weights in ways.items():
            row, total = row_of(page, q, name), scores.total(weights)[q].numpy()
            order = [*np.argsort(-total, kind="stable")[:4], *np.argsort(total, kind="stable")[:4]]
            tiles = row.split("<li")[1:]
            assert [
                re.search(r'(?:alt|aria-label)="training example #(\d+), prompt', t)[1] for t in tiles
            ] == [*map(str, order)]
            for tile, n in zip(tiles, order):
                known = [letters[a] for a, flags in setup.contributors.items() if flags[q, n]]
                assert re.findall(r'aria-hidden="true">([PSB])<', tile) == known
                marked += len(known)
    assert marked  # else nothing was tested
    assert page.count('<article class="weight-set">') == 2
    assert re.findall(r'class="block-label"[^>]*>(\w+)<', page) == ["Down", "Mid", "Up"] * 2
