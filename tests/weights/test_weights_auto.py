"""k="auto" and weight_decay="auto": who judges, and what happens when nobody does."""

from dataclasses import dataclass

import pytest
import torch
from weights_fakes import FakeScores, random_scores, signal_model

from unde.errors import NotRetrievable, UndeError
from unde.weights import learn_weights, retrieval
from unde.weights.protocol import TensorScores
from unde.weights.retrieval import Copies, Search, Trial


def copies(signal: float, seed: int = 0, noise: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Copies:
    """40 copies of 200 examples: the original stands out by `signal`, in the first group alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 200, 3, generator=generator) * torch.tensor(noise)
    originals = torch.randperm(200, generator=generator)[:40]
    values[torch.arange(40), originals, 0] += signal
    return Copies(TensorScores(values, groups=["g0", "g1", "g2"]), originals, torch.arange(200))


@dataclass
class Judge:
    trials: list[Trial]
    own: list


def own(gain: float) -> list:
    """What self-retrieval gains with weights of its own."""
    return [retrieval.Judged({}, torch.ones(3), [retrieval.Gains("noise", gain, 9.0, gain, 9.0)])]


@dataclass
class Judged(FakeScores):
    """Scores that know a judge."""

    trials: list = None  # type: ignore[assignment]
    reachable: float = 0.0

    def judge(self) -> Judge:
        return Judge(self.trials, own(self.reachable))


def queries(favoured: int) -> torch.Tensor:
    """Contributions whose top scores come from one group."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(30, 200, 3, generator=generator)
    values[:, :, favoured] += 3 * torch.randn(30, 200, generator=generator).relu() ** 3
    return values


def trial(signal: float) -> list[Trial]:
    hard = copies(signal)
    return [Trial("noise", Search(1.0, []), hard, hard)]


def test_candidates_that_the_judge_confirms_are_taken():
    weights = learn_weights(Judged(queries(favoured=0), trials=trial(signal=6.0)))
    assert weights.provenance["confirmed"]
    assert weights.values[0] > 1.2 > 1 > weights.values[1:].max()
    judged = weights.provenance["candidates"]
    assert {c["k"] for c in judged} == {2, 3, 10}  # 1 % and 5 % of 200 are 2 and 10
    assert {c["weight_decay"] for c in judged} == {0.1, 1.0}
    best = max((c for c in judged if c["refused"] is None), key=lambda c: c["gains"][0]["gain"])
    assert (best["k"], best["weight_decay"]) == (
        weights.provenance["k"],
        weights.provenance["weight_decay"],
    )


def test_weights_are_uniform_where_self_retrieval_gains_far_more():
    scores, trials = queries(favoured=0), trial(signal=6.0)
    gained = learn_weights(Judged(scores, trials=trials)).provenance["candidates"]
    most = max(c["gains"][0]["gain"] for c in gained if c["refused"] is None)
    for reachable, confirmed in ((most / 0.7, True), (most / 0.6, False)):  # the line is at two thirds
        weights = learn_weights(Judged(scores, trials=trials, reachable=reachable))
        assert weights.provenance["confirmed"] is confirmed
        assert torch.equal(weights.values, torch.ones(3)) is not confirmed


def test_weights_are_uniform_if_the_judge_refuses_all():
    weights = learn_weights(Judged(queries(favoured=1), trials=trial(signal=6.0)))
    assert torch.equal(weights.values, torch.ones(3))
    assert weights.provenance["confirmed"] is False
    assert all(c["refused"] for c in weights.provenance["candidates"])


def test_numbers_are_taken_as_they_are_and_nobody_is_asked():
    class Unasked(Judged):
        def judge(self):
            raise AssertionError("asked")

    weights = learn_weights(Unasked(queries(favoured=1)), k=4, weight_decay=0.0)
    assert weights.values[1] > 1.5
    assert (weights.provenance["k"], weights.provenance["weight_decay"]) == (4, 0.0)


def test_one_number_leaves_the_other_to_the_judge():
    weights = learn_weights(Judged(queries(favoured=0), trials=trial(signal=6.0)), k=4)
    assert {c["k"] for c in weights.provenance["candidates"]} == {4}
    assert {c["weight_decay"] for c in weights.provenance["candidates"]} == {0.1, 1.0}


def test_without_a_judge_weights_stay_near_uniform():
    values, _ = signal_model()
    scores = FakeScores(values)
    weights = learn_weights(scores)
    assert weights.provenance["k"] == values.shape[1] // 20
    assert weights.provenance["weight_decay"] == 1.0
    bold = learn_weights(scores, k=values.shape[1] // 20, weight_decay=0.1)
    assert (weights.values - 1).norm() < 0.7 * (bold.values - 1).norm()


def test_data_that_cannot_be_judged_is_as_without_a_judge(capsys):
    class Few(Judged):
        def judge(self):
            raise NotRetrievable("12 different training examples are too few")

    scores = queries(favoured=1)
    weights = learn_weights(Few(scores))
    assert torch.equal(weights.values, learn_weights(FakeScores(scores)).values)
    assert "not judged by self-retrieval" in capsys.readouterr().err


def test_concepts_are_judged_on_their_own_held_out_queries():
    class Unasked(Judged):
        def judge(self):
            raise AssertionError("concepts are no whole examples")

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(30, 200, 3, generator=generator)
    found = learn_weights({"subject": Unasked(queries(favoured=0)), "style": Unasked(noise)})
    assert found["subject"].values[0] > 1.2
    assert found["subject"].provenance["held-out gain"] > 1
    assert (found["style"].values - 1).abs().max() < 0.5


@pytest.mark.parametrize("wrong", [{"k": "best"}, {"weight_decay": "none"}])
def test_other_words_are_refused(wrong):
    with pytest.raises(UndeError, match="expected a number, or 'auto'"):
        learn_weights(FakeScores(random_scores()), **wrong)
