"""Rankings of labels against autograd, influential examples, the audit with its cut-off, and what is refused."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

import models
from unde import Index, UndeError
from unde.data import Rows
from unde.index.audit import file_names
from unde.index.labels import (
    BASELINE,
    DEFAULT,
    RANKINGS,
    influential_examples,
    label_rankings,
    predict_labels,
)
from unde.methods import TracIn
from unde.tasks import Classification, Task, TokenClassification

N, M = 160, 4  # examples, and how many the rankings sum over
K = 10  # neighbours


def wrong_labels(index, by=DEFAULT, top=10):
    return label_rankings(index, names=[by], top=top)[by]


def data(n=N, seed=0):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.fixture(scope="module")
def trained():
    """A small classifier, the labels it was trained on, four of which are wrong, and the right ones."""
    x, true = data()
    given = true.clone()
    given[[3, 11, 20, 33]] = (true[[3, 11, 20, 33]] + 1) % 3
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(25):
        optimizer.zero_grad()
        F.cross_entropy(model(x), given).backward()
        optimizer.step()
    return model, x, given, true


@pytest.fixture
def index(trained, tmp_path):
    model, x, given, _ = trained
    ids = [f"row-{i}" for i in range(N)]
    return Index.build(
        model, Classification(), (x, given), tmp_path / "idx", method=TracIn("none"), ids=ids, progress=False
    )


@pytest.fixture(scope="module")
def products(trained):
    """(N, N) inner products of gradients, one backward pass for each example."""
    model, x, given, _ = trained
    rows = []
    for i in range(N):
        loss = F.cross_entropy(model(x[i : i + 1]), given[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]).double())
    features = torch.stack(rows)
    return features @ features.T


def confidence(model, x, given):
    """Loss and margin of each example, one pass each, in Python numbers."""
    losses, margins = [], []
    for i in range(len(x)):
        p = model(x[i : i + 1])[0].detach().double().softmax(0).tolist()
        label = int(given[i])
        losses.append(-math.log(p[label]))
        margins.append(max(q for c, q in enumerate(p) if c != label) - p[label])
    return torch.tensor(losses).double(), torch.tensor(margins).double()


def test_rankings_are_what_they_say(index, products, trained):
    own, sums = products.diagonal(), products.sort(1, descending=True).values
    given, (loss, margin) = trained[2], confidence(*trained[:3])
    hard = [torch.stack([loss[j] for j in range(N) if given[j] == given[i]]).mean() for i in range(N)]
    states = F.normalize(trained[0][:2](trained[1]).detach(), dim=1)
    nearest = [
        [j for j in row if j != i][:K] for i, row in enumerate((-states @ states.T).argsort(1).tolist())
    ]
    shares = torch.tensor(
        [(sum(given[j] == given[i] for j in row) + 1 / 3) / (K + 1) for i, row in enumerate(nearest)]
    )
    wanted = {
        "quality": -((-loss).exp() * shares.double()).sqrt().log(),
        "adjusted-loss": torch.stack([loss[i] / hard[i] ** 0.5 for i in range(N)]),
        "loss": loss,
        "margin": margin,
        "self-influence": own,
        "normalised": own / sums[:, :M].sum(1),
        "opposition": -sums[:, -M:].sum(1),
    }
    assert set(wanted) == set(RANKINGS)
    together = label_rankings(index, top=M)
    for by, scores in wanted.items():
        found = wrong_labels(index, by=by, top=M)
        assert torch.equal(found.scores, together[by].scores) and together[by].ranking == by
        torch.testing.assert_close(found.scores.double(), scores, rtol=1e-4, atol=1e-6)
        assert found.order.tolist() == scores.argsort(descending=True).tolist()


def test_the_model_runs_once_for_all_rankings(index, trained, monkeypatch):
    seen = []
    handle = trained[0].register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    label_rankings(index, names=["loss", "margin", "self-influence"])
    handle.remove()
    assert sum(seen) == N
    assert list(label_rankings(index, names=["margin", "loss"])) == ["margin", "loss"]


def test_margins_of_a_fitted_model_differ(trained):
    class Certain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * x

    x = torch.tensor([[20.0, 0, 0], [22.0, 0, 0], [24.0, 0, 0], [24.0, 0, 0]])
    found = predict_labels(Certain(), Classification(), Rows((x, torch.tensor([0, 0, 0, -100]))))
    assert found.margin[0] > found.margin[1] > found.margin[2] > -1
    assert found.loss[0] > found.loss[1] > found.loss[2] > 0
    assert found.loss[3] == 0 and found.margin[3] == -1  # no label, no doubt


def test_answers_are_the_models_and_the_baseline_is_one_line(index, trained):
    model, x, given, _ = trained
    found = wrong_labels(index)
    assert torch.equal(found.labels, given) and torch.equal(found.predicted, model(x).argmax(1))
    assert found.classes == 3 and bool((found.token == -1).all())
    one_line = (1 - model(x).softmax(1).gather(1, given[:, None])[:, 0]).argsort(descending=True).tolist()
    found = wrong_labels(index, by=BASELINE)
    assert found.order.tolist() == one_line and wrong_labels(index).ranking == DEFAULT
    assert [found.rank()[i] for i in one_line] == list(range(1, N + 1))
    true = trained[3]
    for by in RANKINGS:
        found = wrong_labels(index, by=by)
        wrong, right = found.scores[found.labels != true], found.scores[found.labels == true]
        pairs = (wrong[:, None] > right).double().mean()  # all pairs, one by one
        assert found.auc(true) == pytest.approx(float(pairs)) and found.auc(true) > 0.7


def test_influential_examples_leave_out_the_example_itself(index, products):
    where = [3, 0, 17]
    along, against = influential_examples(index, where, 5)
    for i, some, others in zip(where, along, against, strict=True):
        order = [n for n in products[i].argsort(descending=True).tolist() if n != i]
        assert some == order[:5] and others == order[::-1][:5]
    assert len(influential_examples(index, [3], 500)[0][0]) == N - 1


def test_the_audit_is_a_row_for_each_example(index, trained):
    frame = index.audit_labels(progress=False)
    given, true = trained[2], trained[3]
    assert frame.id.tolist() == [f"row-{i}" for i in range(N)]
    assert frame.given_label.tolist() == given.tolist()
    assert frame.predicted_label.tolist() == trained[0](trained[1]).argmax(1).tolist()
    quality, flagged = frame.label_quality, frame.is_label_issue
    torch.testing.assert_close(torch.tensor(quality), (-wrong_labels(index).scores.double()).exp())
    count = int(flagged.sum())
    assert set(frame.index[flagged]) == set(quality.sort_values().index[:count])  # a cut-off
    assert {3, 11, 20, 33} & set(frame.index[flagged]) and count < 10
    assert (frame.suggested_label[flagged] != frame.given_label[flagged]).all()
    assert (frame.suggested_label[~flagged] == frame.given_label[~flagged]).all()
    right = [i for i in frame.index[flagged] if given[i] != true[i]]
    assert sum(frame.suggested_label[i] == int(true[i]) for i in right) > len(right) / 2
    assert frame.confidence.between(0, 1).all()
    along, against = influential_examples(index, frame.index[flagged].tolist(), 5)
    assert frame.opponents[flagged].tolist() == [[f"row-{n}" for n in row] for row in against]
    assert frame.proponents[flagged].tolist() == [[f"row-{n}" for n in row] for row in along]
    assert not any(frame.opponents[~flagged])
    assert 0 < frame.attrs["expected_precision"] <= 1
    assert frame.attrs["expected_wrong"] == pytest.approx(frame.attrs["expected_precision"] * count)
    named = index.audit_labels(classes=["a", "b", "c"], progress=False)
    assert named.given_label.tolist() == ["abc"[y] for y in given]
    with pytest.raises(UndeError, match="2 names of classes, the model tells 3 apart"):
        index.audit_labels(classes=["a", "b"], progress=False)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3])
def test_the_expected_number_is_about_right(tmp_path, rate):
    """Three well separated classes: the count is within a third, and hardly a right label is flagged."""
    g = torch.Generator().manual_seed(1)
    true = torch.arange(600) % 3
    x = 5 * F.one_hot(true, 4).float() + torch.randn(600, 4, generator=g)
    given, wrong = true.clone(), torch.randperm(600, generator=g)[: round(600 * rate)]
    given[wrong] = (given[wrong] + torch.randint(1, 3, (len(wrong),), generator=g)) % 3
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), given).backward()
        optimizer.step()
    index = Index.build(
        model, Classification(), (x, given), tmp_path / "i", method=TracIn("none"), progress=False
    )
    frame = index.audit_labels(progress=False)
    flagged = torch.tensor(frame.is_label_issue.tolist())
    assert abs(int(flagged.sum()) - len(wrong)) <= len(wrong) / 3
    assert int((flagged & (given == true)).sum()) <= 0.1 * len(wrong)
    assert frame.attrs["expected_precision"] > 0.7 or not len(wrong)


def test_files_of_examples_are_known():
    class Folder(list):
        samples = (("cat/1.png", 0), ("dog/2.png", 1))

    folder = Folder([(torch.zeros(2), 0), (torch.zeros(2), 1)])
    folder.samples = list(Folder.samples)
    assert file_names(Rows(folder)) == ["cat/1.png", "dog/2.png"]
    assert file_names(Rows({"path": ["a", "b"], "label": [0, 1]})) == ["a", "b"]
    assert file_names(Rows((torch.zeros(2, 2), torch.zeros(2)))) is None


def test_a_missing_pandas_is_named_before_anything_is_computed(index, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UndeError, match=r"needs pandas: pip install 'unde\[tables\]'"):
        index.audit_labels()


def test_examples_that_were_skipped_are_not_ranked(trained, tmp_path):
    model, x, given, true = trained
    x = x.clone()
    x[7] = torch.nan
    index = Index.build(
        model, Classification(), (x, given), tmp_path / "idx", method=TracIn("none"), on_bad="skip"
    )
    for by in RANKINGS:
        found = wrong_labels(index, by=by)
        assert sorted(found.order.tolist()) == [i for i in range(N) if i != 7]
        assert 0.7 < found.auc(true) <= 1
    assert all(7 not in some for some in influential_examples(index, [3], 500)[0])


class Squared(Task):
    def loss(self, model, batch):
        return model(batch[0]).square().sum(1)


def test_of_tokens_the_least_likely_one_is_told(tmp_path):
    model, g = models.Tokens(9, 6, 3), torch.Generator().manual_seed(0)
    ids, labels = torch.randint(9, (10, 5), generator=g), torch.randint(3, (10, 5), generator=g)
    labels[:, 0] = -100  # as special tokens have
    task = TokenClassification()
    rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]
    index = Index.build(model, task, rows, tmp_path / "idx", method=TracIn("none"), progress=False)
    found = wrong_labels(index, by="self-influence")
    frame = index.audit_labels(progress=False)
    assert frame.token.tolist() == found.token.tolist() and frame.label_quality.between(0, 1).all()
    for n in range(10):
        logits = model(ids[n : n + 1])[0].detach().log_softmax(-1)
        at = min(range(1, 5), key=lambda t: float(logits[t, labels[n, t]]))
        assert int(found.token[n]) == at and int(found.labels[n]) == int(labels[n, at])
        assert int(found.predicted[n]) == int(logits[at].argmax())


def test_what_has_no_labels_is_refused(index, trained, tmp_path):
    model, x, given, true = trained
    other = Index.build(model, Squared(), (x, given), tmp_path / "other", method="tracin")
    model_only = Index.open(index.folder, model=model, task=Classification())
    for which, said in (
        (other, r"this is Squared. index.self_influence\(\) ranks the examples of any"),
        (Index.open(index.folder), "opened without its model, task, train_data"),
        (model_only, "opened without its train_data: pass"),
    ):
        with pytest.raises(UndeError, match=said):
            wrong_labels(which)
    with pytest.raises(UndeError, match="unknown ranking of labels 'size'"):
        wrong_labels(index, by="size")
    for bad in (true[:3], true.float()):
        with pytest.raises(UndeError, match="expected a class number for each of the 160"):
            wrong_labels(index).auc(bad)
