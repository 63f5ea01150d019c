"""The trust curve: shares against a slow loop, on examples that nothing else has used, at fixed strengths."""

import json
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import toy
from unde import Index, UndeError, Weights, methods
from unde.index.retrieval_curve import Trust, wilson
from unde.index.self_retrieval import EXAMPLES, Copier, Parts
from unde.tasks import Classification
from unde.tasks.perturb import InputNoise

COSINE = methods.TracIn(projection="none", cosine=True)


def made(folder, n, **options):
    x, _ = toy.data(n)
    return toy.build(folder, train_data=(x, (x[:, 0] > 0).long()), batch_size=64, **options)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return made(tmp_path_factory.mktemp("trust") / "idx", 700, method=COSINE)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return made(tmp_path_factory.mktemp("trust") / "few", 300, method=COSINE)


@pytest.fixture(scope="module")
def skewed(index):
    return Weights(torch.tensor([0.2, 1.8]), list(index.groups.names))


@pytest.fixture
def asked():
    """The training examples that copies are made of."""
    seen, real = [], Copier.copies

    def copies(self, kind, which, strength):
        seen.append(set(which.tolist()))
        return real(self, kind, which, strength)

    with mock.patch.object(Copier, "copies", copies):
        yield seen


def test_shares_are_those_of_a_slow_loop(index, skewed):
    told = index.trust(skewed, examples=12, seed=4)
    [curve] = told.curves
    copier = Copier(index._state, COSINE, None, 4)
    which = Parts.draw(index._state, copier.content, EXAMPLES, 1, 4).rest[:12].tolist()
    x, y = index.train_data.data
    for i, strength in enumerate(curve.strengths):
        for shares, weights in ((curve.before, None), (curve.after, skewed)):
            found = 0
            for n in which:
                copy = InputNoise()((x[n], y[n]), strength, np.random.default_rng([4, 1, n]))
                total = index.score([copy]).total(weights)[0]
                found += int(total.argmax()) == n
            assert shares[i] == pytest.approx(found / 12)
    assert told.before == pytest.approx(np.mean(curve.before))
    assert told.after == pytest.approx(np.mean(curve.after))
    assert told.gain == pytest.approx(told.after - told.before)
    assert curve.before[0] > curve.before[-1]  # what is changed more is harder to find
    assert curve.before != curve.after


def test_strengths_are_fixed_and_even_in_the_logarithm(index):
    one, other = index.trust(examples=10), index.trust(method="tracin", examples=10)
    steps = np.diff(np.log(one.curves[0].strengths))
    assert one.curves[0].strengths == other.curves[0].strengths
    assert steps == pytest.approx([steps[0]] * 4)
    assert (one.curves[0].strengths[0], one.curves[0].strengths[-1]) == pytest.approx((0.05, 2.0))
    assert one.before > other.before  # the cosine finds copies that raw products cannot
    assert one.method != other.method


@pytest.mark.parametrize("seed", [0, 1])
def test_examples_that_nothing_else_has_used(index, asked, seed):
    weights = index.learn_weights(method="tracin", seed=1)
    asked.clear()
    told = index.trust(weights, examples=10, seed=seed)
    used = {i for part in weights.provenance["examples"].values() for i in part}
    assert len(asked) == 5 and all(which == asked[0] for which in asked)
    assert told.examples == 10 and told.held_out
    assert len(used) == 608 and not asked[0] & used
    free = Parts.draw(index._state, Copier(index._state, COSINE, None, seed).content, EXAMPLES, 1, seed).rest
    assert asked[0] <= set(free.tolist())


def test_examples_that_weights_saw_as_queries_are_left_out(index, asked, skewed):
    index.trust(examples=20)
    digests = index.train_data.digests(sorted(asked[0]))
    asked.clear()
    index.trust(Weights(skewed.values, skewed.groups, digests), examples=20)
    assert asked[0] & set(range(700)) and not set(index.train_data.digests(asked[0])) & set(digests)


def test_where_there_are_few_the_reported_ones_are_taken(small, asked):
    weights = small.learn_weights(method="tracin")
    asked.clear()
    told = small.trust(weights, examples=40)
    parts = weights.provenance["examples"]
    assert asked[0] == set(parts["report"][:40])
    assert not told.held_out and "there are few" in str(told)
    learned = {i for name in ("search", "learn", "judge") for i in parts[name]}
    # the parts of another seed overlap with those of the weights
    other = small.trust(weights, examples=40, seed=9)
    assert other.examples < 40 and not asked[-1] & learned
    assert small.trust(examples=40).held_out is False


def test_uniform_weights_change_nothing(index):
    told = index.trust(Weights.uniform(list(index.groups.names)), examples=15)
    assert (told.after, told.gain, told.gain_ci95) == (told.before, 0.0, 0.0)
    assert told.curves[0].after == told.curves[0].before == index.trust(examples=15).curves[0].before


def test_several_sets_share_their_copies(index, skewed, asked):
    other = Weights(torch.tensor([1.9, 0.1]), skewed.groups)
    both = index.trust_of({"a": skewed, "b": other}, examples=20)
    assert len(asked) == 5
    assert both["a"].curves[0].before == both["b"].curves[0].before
    assert both["b"] == index.trust(other, examples=20) != both["a"]


class TwoKinds(Classification):
    def perturbations(self, model, examples):
        return [InputNoise(), Zeroed()]


@dataclass(frozen=True)
class Zeroed:
    """The same copy for everything: nothing can be found."""

    name: str = "zeroed"
    least: float = 0.1
    most: float = 1.0

    def __call__(self, example, strength, random):
        return (torch.zeros_like(example[0]), example[1])


def test_two_kinds_halve_the_examples_and_the_mean_is_over_both(tmp_path, asked):
    index = made(tmp_path / "idx", 700, method=COSINE, task=TwoKinds())
    told = index.trust(examples=40)
    noise, zeroed = told.curves
    assert (noise.kind, zeroed.kind) == ("noise", "zeroed") and noise.examples == zeroed.examples == 20
    assert not asked[0] & asked[-1]
    assert zeroed.before == [0.0] * 5 and told.before == pytest.approx(np.mean(noise.before) / 2)


def test_noise_on_the_weights_of_the_model(index):
    before = {k: v.clone() for k, v in index.model.state_dict().items()}
    told = index.trust(examples=15, perturb="weights")
    assert told.curves[0].kind == "noise on the model's weights"
    assert told.curves[0].before[0] > 0.9  # hardly any noise: a copy is its original
    assert all(torch.equal(v, before[k]) for k, v in index.model.state_dict().items())


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_interval_is_wilsons(share):
    expected = binomtest(round(share * 60), 60).proportion_ci(method="wilson")
    assert wilson(share, 60) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_it_reads_as_a_table_and_as_json(index, skewed):
    told = index.trust(skewed, examples=10)
    text = str(told)
    assert all(f"{s:.2g}" in text for s in told.curves[0].strengths)
    assert f"{100 * told.before:.0f} % before weights, {100 * told.after:.0f} % after" in text
    assert "after" not in str(index.trust(examples=10))
    again = json.loads(json.dumps(told.as_dict()))
    assert again["curves"][0]["before"] == told.curves[0].before and again["after"] == told.after
    assert isinstance(told, Trust)


def test_what_cannot_be_told(index, skewed, tmp_path, small):
    with pytest.raises(UndeError, match="examples is 9: expected at least 10"):
        index.trust(examples=9)
    with pytest.raises(UndeError, match=r"opened without its model, task, train_data: pass model="):
        Index.open(index.folder).trust()
    with pytest.raises(UndeError, match="weights do not match the groups"):
        index.trust(Weights.uniform(["x"]))
    with pytest.raises(UndeError, match="no trust curve: 40 different training examples are too few"):
        made(tmp_path / "idx", 40).trust()
    everything = Weights(torch.tensor([0.5, 1.5]), list(small.groups.names), small.train_data.digests())
    with pytest.raises(UndeError, match=r"no trust curve: 0 training examples are left .*pass the seed="):
        small.trust(everything)
