"""The chance that a label is wrong against a loop, and its sums against the truth where labels were replaced."""

import pytest
import torch
import torch.nn.functional as F
from sklearn import datasets

from unde import Index
from unde.index.audit import audit
from unde.index.label_errors import wrong_probability
from unde.methods import TracIn
from unde.tasks import Classification


def by_a_loop(neighbours, labels, classes):
    """e, and P(wrong) at the quarter of the pairs with the fewest votes, whole groups of equal votes."""
    pairs = []
    for row, label in zip(neighbours.tolist(), labels.tolist()):
        votes = [row.count(c) for c in range(classes)]
        top = votes.index(max(votes))
        pairs += [(votes[c], c == label) for c in range(classes) if c != top]
    pairs.sort()
    border = pairs[max(0, -(-len(pairs) // 4) - 1)][0]
    least = [hit for votes, hit in pairs if votes <= border]
    e = sum(least) / len(least)
    out = []
    for row, label in zip(neighbours.tolist(), labels.tolist()):
        m = row[:10].count(label)
        same = [
            y == c
            for near, y in zip(neighbours.tolist(), labels.tolist())
            for c in range(classes)
            if near[:10].count(c) == m
        ]
        share = sum(same) / len(same)
        right = min(1.0, max(0.0, (share - e) / (1 - classes * e)))
        out.append(min(1.0, e * (1 - right) / share))
    return torch.tensor(out, dtype=torch.float64)


def test_against_a_loop():
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (60,), generator=g)
    copied = torch.rand(60, 14, generator=g) < 0.7
    neighbours = torch.where(
        copied, ((labels + (torch.arange(60) % 9 == 0)) % 4)[:, None], torch.randint(4, (60, 14), generator=g)
    )
    p, low = wrong_probability(neighbours, labels, 4)
    torch.testing.assert_close(p, by_a_loop(neighbours, labels, 4))
    assert float(p.sum()) > 1 and bool((low <= p).all())


def train(x, y, classes, seed=0, epochs=15):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 32), torch.nn.ReLU(), torch.nn.Linear(32, classes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def overlapping():
    """Ten classes of which a linear model tells two thirds apart."""
    g = torch.Generator().manual_seed(5)
    centres, y = 0.7 * torch.randn(10, 8, generator=g), torch.randint(10, (2000,), generator=g)
    return centres[y] + torch.randn(2000, 8, generator=g), y


def load(name):
    if name == "overlapping":
        return overlapping()
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return torch.from_numpy((x - x.mean(0)) / (x.std(0) + 1e-9)).float(), torch.from_numpy(y).long()


def audited(folder, x, given, classes):
    model = train(x, given, classes)
    index = Index.build(model, Classification(), (x, given), folder, method=TracIn("none"), progress=False)
    return audit(index, count=1, progress=False)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("name", ["digits", "wine", "breast_cancer", "overlapping"])
def test_the_truth_is_within_the_bounds(tmp_path, name, rate):
    """At least so many are wrong as the bound says, and the expected number is not far above the truth."""
    x, true = load(name)
    classes, g = int(true.max()) + 1, torch.Generator().manual_seed(1)
    given, count = true.clone(), round(rate * len(true))
    where = torch.randperm(len(true), generator=g)[:count]
    given[where] = (true[where] + torch.randint(1, classes, (count,), generator=g)) % classes
    result = audited(tmp_path / "idx", x, given, classes)
    wrong, flagged = int((given != true)[result.flagged].sum()), len(result.issues)
    assert 0.4 * count <= flagged <= 1.8 * count
    assert result.at_least <= wrong
    assert 0.4 * wrong <= result.precision * flagged <= wrong + 0.2 * flagged + 1


def test_right_labels_of_overlapping_classes_are_not_said_to_be_wrong(tmp_path):
    x, y = overlapping()
    result = audited(tmp_path / "idx", x, y, 10)
    opposed = (result.evidence.nearest == y[:, None]).sum(1) == 0
    assert int(opposed.sum()) > 100 and len(result.issues) < 0.06 * len(y)
    assert result.at_least < 0.005 * len(y)
