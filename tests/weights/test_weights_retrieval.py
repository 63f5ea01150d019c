"""Self-retrieval and hubs against plain loops, and signal that was planted."""

import math

import pytest
import torch
from experiments.shared.label_free_objectives import divide_hubs, learn_retrieval, retrieval_objective
from torch import nn
from torch.testing import assert_close
from weights_fakes import CosineScores, FakeScores, random_scores

from unde import Groups, Index, Task
from unde.methods import DAS, TRAK, TracIn
from unde.scoring.arrays import ArrayScores
from unde.weights.retrieval import Copies, StrengthSearch, describe, search_strength


def names(values):
    return [f"g{j}" for j in range(values.shape[2])]


def copies_of(values, originals=None, content=None, **options):
    originals = torch.arange(len(values)) if originals is None else originals
    content = torch.arange(values.shape[1]) if content is None else content
    return Copies(ArrayScores(values, names(values), **options), originals, content)


def found_by_hand(values, originals, content, weights):
    """Whether no example that is not equal to the original scores as high or higher."""
    out = []
    for q in range(values.shape[0]):
        scores = [sum(float(w) * float(c) for w, c in zip(weights, row)) for row in values[q]]
        own = scores[int(originals[q])]
        rivals = [s for n, s in enumerate(scores) if content[n] != content[int(originals[q])]]
        out.append(all(own > s for s in rivals))
    return out


@pytest.mark.parametrize("seed", range(4))
def test_found(seed):
    """Whole numbers, so that there are ties; every content occurs about three times."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (25, 18, 3), generator=g).float()
    content = torch.randint(6, (18,), generator=g)
    originals = torch.randint(18, (25,), generator=g)
    for q, n in enumerate(originals[:15]):
        values[q, n] = 2.0  # most often as high as any
    weights = torch.tensor([1.0, 2.0, 0.0])
    copies = copies_of(values, originals, content)
    for w, given in ((torch.ones(3), None), (weights, weights)):
        expected = found_by_hand(values, originals, content, w)
        assert copies.retrieved(given).tolist() == expected
        assert True in expected and False in expected


def test_a_duplicate_counts_as_the_original_and_a_tie_with_another_does_not():
    values = torch.tensor([3.0, 3.0, 1.0]).view(1, 3, 1)
    assert copies_of(values, content=torch.tensor([0, 0, 1])).retrieved().tolist() == [True]
    assert copies_of(values, content=torch.tensor([0, 1, 2])).retrieved().tolist() == [False]
    higher = torch.tensor([3.0, 3.5, 1.0]).view(1, 3, 1)  # a twin that rounding put in front
    assert copies_of(higher, content=torch.tensor([0, 0, 1])).retrieved().tolist() == [True]
    # nothing else there
    assert copies_of(values, content=torch.tensor([0, 0, 0])).retrieved().tolist() == [True]


def objective_of(copies, weights=None):
    return retrieval_objective(copies, torch.ones(len(copies.scores.groups)) if weights is None else weights)


def objective_by_hand(values, originals, weights):
    out = []
    for q in range(len(values)):
        scores = [float(row.double() @ weights.double()) for row in values[q]]
        norm = math.sqrt(sum(s * s for s in scores))
        out.append(scores[int(originals[q])] / norm if norm else 0.0)
    return torch.tensor(out, dtype=torch.float64)


def test_the_objective_is_the_share_of_the_original_in_the_norm():
    values, originals = random_scores(9, 30, 4), torch.arange(9) * 3
    values[4] = 0.0  # a copy without a gradient counts 0
    copies, weights = copies_of(values, originals), torch.tensor([0.2, 3.0, 0.0, 0.8])
    for w, given in ((torch.ones(4), None), (weights, weights)):
        assert_close(
            objective_of(copies, given), objective_by_hand(values, originals, w), rtol=1e-5, atol=1e-6
        )
    assert_close(objective_of(copies, 5 * weights), objective_of(copies, weights))  # no scale


@pytest.mark.parametrize("scores", [FakeScores, CosineScores])
@pytest.mark.parametrize("memory", [1, 700, 5000])
def test_streaming_gives_the_same(scores, memory):
    values, originals = random_scores(11, 40, 4), torch.arange(11) * 2 + 5
    content = torch.arange(40) // 2
    weights = torch.tensor([0.2, 2.0, 0.5, 1.3])
    whole, small = (
        Copies(scores(values, **options), originals, content)
        for options in ({}, {"memory": memory, "rows": 7})
    )
    for w in (None, weights):
        assert torch.equal(whole.retrieved(w), small.retrieved(w))
        assert_close(objective_of(whole, w), objective_of(small, w))
    assert_close(learn_retrieval(whole), learn_retrieval(small), rtol=1e-4, atol=1e-5)
    assert small.scores.passes > 2 and whole.scores.passes == 0  # these were read once and kept
    assert small.scores.largest < 4 * values.numel()


def test_a_cosine_is_found_and_judged_by_its_final_scores():
    values, originals = random_scores(10, 30, 4, seed=3), torch.arange(10)
    values[originals, originals] += values.abs().amax((1, 2))[:, None]
    source = CosineScores(values)
    source.train_squares[20:] *= 1e-4  # short ones, which only the norm puts in front
    copies, w = Copies(source, originals, torch.arange(30)), torch.tensor([0.5, 2.0, 0.5, 1.0])
    final = source.finish(values @ w, w, slice(0, 10), slice(0, 30))
    others = final.clone()
    others[originals, originals] = -torch.inf
    assert torch.equal(copies.retrieved(w), final[originals, originals] > others.amax(1))
    linear = copies_of(values, originals)
    assert not torch.equal(copies.retrieved(w), linear.retrieved(w))
    expected = final[originals, originals] / final.norm(dim=1)
    assert_close(objective_of(copies, w), expected.double(), rtol=1e-5, atol=1e-6)


class Counted:
    """A share that falls with the strength, and a record of what was asked."""

    def __init__(self, share):
        self.share, self.asked = share, []

    def __call__(self, strength):
        self.asked.append(strength)
        return self.share(strength)


@pytest.mark.parametrize(("found", "strength", "asked"), [(0.2, 0.05, [0.05]), (0.9, 2.0, [0.05, 2.0])])
def test_too_hard_from_the_start_and_too_easy_to_the_end(found, strength, asked):
    share = Counted(lambda s: found)
    assert search_strength(share, 0.05, 2.0, target=0.25).strength == strength
    assert share.asked == asked


@pytest.mark.parametrize("steps", [3, 4, 5, 9])
@pytest.mark.parametrize("edge", [0.06, 0.2, 0.7, 1.9])
def test_bisection(steps, edge):
    """A share that falls through the target at `edge`."""
    share = Counted(lambda s: 1 / (1 + (s / edge) ** 2))
    result = search_strength(share, 0.05, 2.0, target=0.5, steps=steps)
    assert len(share.asked) == len(set(share.asked)) == steps
    assert result.shares == [(s, share.share(s)) for s in share.asked]
    distance = {s: abs(f - 0.5) for s, f in result.shares}
    assert distance[result.strength] == min(distance.values())
    # Each step after the two ends halves the logarithm of what is left, and the edge stays inside.
    low, high = 0.05, 2.0
    for asked in share.asked[2:]:
        assert asked == pytest.approx(math.sqrt(low * high))
        low, high = (asked, high) if asked < edge else (low, asked)
    assert low <= edge <= high
    assert math.log(high / low) == pytest.approx(math.log(40) / 2 ** (steps - 2))


def test_of_two_strengths_as_good_the_weaker():
    shares = {1.0: 0.9, 4.0: 0.1, 2.0: 0.3}
    result = search_strength(shares.__getitem__, 1.0, 4.0, target=0.2, steps=3)
    assert result.strength == 2.0
    assert search_strength(lambda s: 0.9, 0.3, 0.3) == StrengthSearch(0.3, [(0.3, 0.9)])


def planted_values(alphas, sigmas, queries=80, examples=120, seed=0):
    """Contributions of noise sigma_j, and alpha_j more to the original: (Q, N, M) and the originals."""
    g = torch.Generator().manual_seed(seed)
    values = torch.tensor(sigmas) * torch.randn(queries, examples, len(alphas), generator=g)
    originals = torch.randperm(examples, generator=g)[:queries]
    values[torch.arange(queries), originals] += torch.tensor(alphas)
    return values, originals


def planted(alphas, sigmas, **options):
    return copies_of(*planted_values(alphas, sigmas, **options))


SIGNAL, NOISE = ((2.0, 2.0, 0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0, 2.0, 2.0))


def test_planted_signal_is_found():
    learn, others = (planted(SIGNAL, NOISE, seed=s) for s in (1, 2))
    w = learn_retrieval(learn)
    assert float(w.mean()) == pytest.approx(1.0, abs=1e-5) and (w >= 0).all()
    assert w[:2].min() > 2 * w[2:].max()  # the planted groups
    assert objective_of(others, w).mean() > 1.3 * objective_of(others).mean()
    assert others.retrieved(w).float().mean() > others.retrieved().float().mean() + 0.1


@pytest.mark.parametrize("kind", [FakeScores, CosineScores])
@pytest.mark.parametrize("options", [{}, {"memory": 1, "rows": 7}])
def test_hubs_are_divided_by_the_size_of_their_scores(kind, options):
    values = random_scores()
    source, w = kind(values, **options), torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5])
    everything = slice(0, 12), slice(0, 60)
    final = source.finish(values.sum(2), torch.ones(5), *everything).double()
    size = final.square().mean(0).sqrt()
    size = size + 1e-3 * size.median()
    found = divide_hubs(source)
    assert_close(found.contributions(slice(0, 12)), (values / size[:, None]).float(), rtol=1e-5, atol=1e-6)
    blocks = [(train, block) for train, block in found.stream(slice(2, 4))]
    assert_close(
        torch.cat([b for _, b in blocks], 1), (values[2:4] / size[:, None]).float(), rtol=1e-5, atol=1e-6
    )
    for train, block in blocks:
        want = source.finish(values[2:4, train] @ w, w, slice(2, 4), train) / size[train]
        got = found.finish(block @ w, w, slice(2, 4), train)
        assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
    assert found.groups == source.groups and found.method is source.method


@pytest.mark.parametrize("options", [{}, {"memory": 1, "rows": 7}])
def test_what_weights_make_of_scores(options):
    values, w = random_scores(), torch.tensor([0.5, 2.0, 1.0, 0.0, 1.5])
    told = describe(FakeScores(values, **options), w)
    parts = w.double() * values.double().square().sum((0, 1)).sqrt()
    carried = (values.double() @ w.double()).square().sum(0)
    assert told["groups"] == pytest.approx(float(parts.sum() ** 2 / parts.square().sum()), rel=1e-5)
    assert told["examples"] == pytest.approx(float(carried.sum() ** 2 / carried.square().sum()), rel=1e-4)
    assert told["cancellation"] == pytest.approx(float(carried.sum().sqrt() / parts.sum()), rel=1e-4)


class Ridge(Task):
    """The prediction of a linear model as measurement, its residual as r."""

    def measure(self, model, batch, *, name="loss", ids=None):
        x, y = batch
        predicted = model(x)[:, 0]
        return {"mean": predicted, "residual": y - predicted, "loss": (y - predicted) ** 2}[name]


def test_das_with_its_sign(tmp_path):
    """C_j r / (1 − h), summed and squared the score of DAS, by explicit matrices."""
    g = torch.Generator().manual_seed(0)
    x, y, queries = (torch.randn(*shape, generator=g) for shape in ((20, 5), (20,), (6, 5)))
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    options = {"method": DAS(damping=0.7, relative=False, projection="none"), "progress": False}
    index = Index.build(model, Ridge(), (x, y), tmp_path / "i", groups=Groups.by_tensor(model), **options)
    das = index.score((queries, torch.zeros(6)))
    signed = index.score((queries, torch.zeros(6)), das.method.signed)
    assert signed.method.linear and not das.method.linear and signed.groups == ["weight", "bias"]

    phi, q = (torch.cat([rows, torch.ones(len(rows), 1)], 1).double() for rows in (x, queries))
    k = torch.linalg.inv(phi.T @ phi + 0.7 * torch.eye(6))
    parts = torch.stack([q[:, c] @ (phi @ k)[:, c].T for c in (slice(0, 5), slice(5, 6))], 2)  # (Q, N, 2)
    factor = (y - model(x)[:, 0]).detach().double() / (1 - (phi @ k * phi).sum(1))
    expected = parts * factor[:, None]
    assert_close(signed.by_group().double(), expected, rtol=1e-3, atol=1e-5)
    assert_close(signed.contributions(slice(2, 4)).double(), expected[2:4], rtol=1e-3, atol=1e-5)
    w = torch.tensor([0.4, 1.6])
    assert_close(signed.total(w).double(), expected @ w.double(), rtol=1e-3, atol=1e-5)
    assert_close(signed.total() ** 2, das.total(), rtol=1e-4, atol=1e-7)
    assert_close(signed.total(w) ** 2, das.total(w), rtol=1e-4, atol=1e-7)
    assert (signed.total() < 0).any()  # what the square loses


def test_the_other_methods_have_a_sign_already():
    for method in (TracIn(), TracIn(cosine=True), TRAK(), DAS(weigh="signed")):
        assert method.signed == method
    assert DAS(weigh="after", damping=3.0).signed == DAS(weigh="signed", damping=3.0)
