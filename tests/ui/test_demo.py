"""The demo does what it says: real digits in disjoint roles, and a page that shows what weights changed."""

import json
import re

import numpy as np
import pytest
import torch

from unde import Weights
from unde.data import Rows
from unde.ui.demo import finetuned, run
from unde.ui.demo.finetuned import digits

pytest.importorskip("sklearn")
pytest.importorskip("transformers")


def test_roles_are_disjoint_and_a_tenth_of_the_labels_is_wrong():
    data = digits(seed=3)
    roles = [set(Rows((x,)).digests()) for x, _ in (data.pretrain, data.train, data.calibrate, data.evaluate)]
    assert len(set.union(*roles)) == sum(map(len, roles))
    assert set(data.pretrain[1].tolist()) == set(range(5)) and set(data.true_labels.tolist()) == set(
        range(5, 10)
    )
    assert int((data.train[1] != data.true_labels).sum()) == 60
    assert torch.equal(digits(3).train[1], data.train[1])


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo with a short training and few halves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "PROCESSES", 1)
        patch.setattr(run, "CALIBRATE", 12)
        patch.setattr(run, "JUDGE", 8)
        patch.setattr(finetuned, "PRETRAIN_EPOCHS", 2)
        patch.setattr(finetuned, "EPOCHS", 1)
        folder = tmp_path_factory.mktemp("demo")
        return folder, run.run(folder).read_text()


def test_demo_ends_in_a_page(demo):
    folder, page = demo
    weights = Weights.load(folder / "weights.json")
    assert weights.values.mean() == pytest.approx(1, abs=1e-5)
    calibration = json.loads((folder / "index" / "calibration.json").read_text())
    assert calibration["halves"] == 12
    pictures = re.findall(r'"(data:image/png;base64,[^"]*)"', page)
    assert len(pictures) == len(set(pictures)) > 50  # each once, however often it is shown
    assert 'src="http' not in page and 'href="http' not in page
    for step in (
        "Fine-tune it",
        "Build the index",
        "Retrain on random halves",
        "Calibrate",
        "Look for wrong labels",
    ):
        assert step in page
    first = page.index('id="summary"')
    assert first < page.index("How to read this page")
    for part in (
        "The answers",
        "Do they predict retrained models?",
        "What weights changed",
        "<h3>weighted</h3>",
    ):
        assert first < page.index(part) < page.index("How to read this page")


def test_what_judges_was_not_chosen_by(demo):
    folder, _ = demo
    from unde.evaluate import Bank

    bank = Bank.open(folder / "halves.npz")
    assert bank.masks.shape == (20, 600)
    calibration = json.loads((folder / "index" / "calibration.json").read_text())
    data = digits(0)
    assert calibration["query_digests"] == Rows(data.calibrate).digests()
    assert not set(Rows(data.evaluate).digests()) & set(calibration["query_digests"])
    judging = {mask.tobytes() for mask in bank.masks[12:]}
    assert not judging & {mask.tobytes() for mask in bank.masks[:12]} and len(judging) == 8
    assert np.ptp(bank.utility["evaluate"], axis=0).any()
