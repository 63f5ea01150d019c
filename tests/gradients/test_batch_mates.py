"""Losses under which examples of a batch meet are refused, also where only some of them do."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles import check, plan
from unde.data import Rows, evenly
from unde.errors import UndeError
from unde.gradients.coverage import find_mates
from unde.gradients.feature_pass import SAMPLED, largest
from unde.tasks import Classification, Task

REFUSED = r"the loss of example \d+ is \S+ alone but \S+ in a batch.*contrastive"


def encoder(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 5)).double()


class Similar(Task):
    """A loss on the cosines (B, B) of a batch, without those of an example with itself."""

    def loss(self, model, batch) -> Tensor:
        z = F.normalize(model(batch[0]), dim=1)
        return self.of(z, batch[1], z @ z.T)

    def of(self, z: Tensor, labels: Tensor, cosines: Tensor) -> Tensor:
        raise NotImplementedError


class InBatch(Similar):
    """InfoNCE of two noisy views: all others of the batch are negatives."""

    def of(self, z, labels, cosines):
        return F.cross_entropy(cosines / 0.1, torch.arange(len(z)), reduction="none")


class EqualLabels(Similar):
    """Supervised contrastive: an example meets those of its own label alone, beside a loss of its own."""

    def of(self, z, labels, cosines):
        mates = (labels[:, None] == labels[None]) & ~torch.eye(len(z), dtype=torch.bool)
        return z.square()[:, 0] + torch.where(mates, 1 - cosines, 0.0).sum(1)


class NearOthers(Similar):
    """A hinge that pushes near examples of other labels apart."""

    margin = 0.97

    def of(self, z, labels, cosines):
        others = labels[:, None] != labels[None]
        return z.square()[:, 0] + torch.where(others, (cosines - self.margin).relu(), 0.0).sum(1)


class EqualLabelsSoftmax(Similar):
    """As EqualLabels, in the usual form: no value without a mate of equal label."""

    def of(self, z, labels, cosines):
        itself = torch.eye(len(z), dtype=torch.bool)
        mates = (labels[:, None] == labels[None]) & ~itself
        shares = (cosines / 0.1).masked_fill(itself, -torch.inf).log_softmax(1) if len(z) > 1 else cosines
        return z.square()[:, 0] - torch.where(mates, shares, 0.0).sum(1)


def clusters(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around a centre for each class, in random order; of the examples that are spread over the data three have
    different labels."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    labels[evenly(n, 3)] = torch.arange(3)
    centres = 3 * torch.randn(classes, 6, generator=g)
    return (centres[labels] + 0.3 * torch.randn(n, 6, generator=g)).double(), labels


@pytest.mark.parametrize(
    "task", [InBatch(), EqualLabels(), EqualLabelsSoftmax()], ids=lambda t: type(t).__name__
)
@pytest.mark.parametrize("classes", [3, 10, 40])
def test_contrastive_losses_are_refused(task, classes):
    with pytest.raises(UndeError, match=REFUSED):
        plan(encoder(), task, Rows(clusters(200, classes)))


def test_equal_labels_of_sorted_data():
    """A thousand classes, ten examples in a row of each: few of those that are spread over the data have a mate."""
    x, _ = clusters(10_000, 4)
    with pytest.raises(UndeError, match=REFUSED):
        plan(encoder(), EqualLabels(), Rows((x, torch.arange(1000).repeat_interleave(10))))


def test_near_examples_of_other_labels():
    x, y = clusters(200, 4)
    at = evenly(200, SAMPLED)[40]
    x[7], y[7] = x[at] + 0.01, (y[at] + 1) % 4
    rows = Rows((x, y))
    z = F.normalize(encoder()(x), dim=1)[evenly(200, 3)]
    # those that are tried first do not meet
    assert not ((z @ z.T).fill_diagonal_(0) > NearOthers.margin).any()
    with pytest.raises(UndeError, match=REFUSED):
        plan(encoder(), NearOthers(), rows)


def test_gradients_that_depend_on_a_batch_where_values_do_not():
    """The coverage is decided anew, and gives what single examples have."""

    class Meeting(Similar):
        def of(self, z, labels, cosines):
            met = torch.where(labels[:, None] == labels[None], cosines, 0.0).sum(1)
            return z[:, 0] + met - met.detach()

    _, coverage = check(encoder(), Meeting(), Rows(clusters(40, 4)), tolerance=1e-8, batch_size=8)
    assert not coverage.modules


def test_losses_of_single_examples_pass():
    x, y = clusters(30, 3)
    for data in ((x, y), (x[:1].repeat(30, 1), y[:1].repeat(30)), (x[:2], y[:2]), (x[:1], y[:1])):
        _, coverage = plan(encoder(), Classification(), Rows(data))
        assert len(coverage.modules) == 2
    x, y = clusters(20, 3)
    y[5] = 99
    plan(encoder(), Classification(), Rows((x, y)))


def test_mates_are_those_of_all_pairs():
    x, y = clusters(50, 6)
    rows, n = Rows((x, y)), 50
    found = find_mates(rows)
    pairs = [(float((x[i] - x[j]).norm()), i, j) for i in range(n) for j in range(n) if i != j]
    _, first, second = min(p for p in pairs if y[p[1]] == y[p[2]])
    other = min(p for p in pairs if p[1] == first and y[p[2]] != y[first])[2]
    far = max(p for p in pairs if y[p[1]] == y[p[2]])[1:]
    strangers = min(p for p in pairs if y[p[1]] != y[p[2]])[1:]
    assert found.triple == [first, second, other]
    assert set(found.equal[:2]) == set(far) and len(set(found.equal)) == 3
    assert len(set(y[found.equal].tolist())) == 1
    assert set(found.near) == set(strangers)


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 500])
def test_any_number_of_examples(n):
    rows = Rows(clusters(max(n, 3), 3)) if n >= 3 else Rows(tuple(c[:n] for c in clusters(3, 3)))
    found = find_mates(rows)
    assert found.largest == largest(rows)
    assert 2 <= len(found.triple) <= 3 and 2 <= len(found.equal) <= 3 and len(found.near) == 2
    assert all(0 <= i < n for i in [*found.triple, *found.equal, *found.near])


def test_without_two_of_equal_labels_an_example_meets_its_copy():
    x, _ = clusters(20, 3)
    first, second, third = find_mates(Rows((x, torch.arange(20)))).triple
    assert first == second != third


def test_each_example_is_read_once():
    reads = []

    class Noted:
        def __len__(self):
            return 1000

        def __getitem__(self, i):
            reads.append(i)
            return torch.zeros(3), i % 2

    find_mates(Rows(Noted()))
    assert len(reads) == len(set(reads)) <= SAMPLED + 8


@pytest.mark.parametrize(
    "example",
    [
        lambda i: {"input_ids": torch.tensor([i % 3, 1, 2] * (1 + i % 2)), "text": "né" * (i % 4)},
        lambda i: {
            "image": np.full((4, 4), i, np.uint8),
            "label": np.int64(i % 2),
            "weight": 0.5,
            "none": None,
        },
        lambda i: [i % 2, [float(i)] * 20, "\ud800"],
        lambda i: torch.tensor([float("nan"), float("inf"), i]).bfloat16(),
        lambda i: (torch.tensor(i % 2), torch.tensor(i * 1.0), np.array(["text"], dtype=object)),
    ],
)
def test_examples_of_all_kinds(example):
    found = find_mates(Rows([example(i) for i in range(10)]))
    assert len(found.triple) == 3
