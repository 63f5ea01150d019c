"""k="auto" and weight_decay="auto": who judges, and what happens when nobody does."""

from dataclasses import dataclass

import pytest
import torch
from weights_fakes import FakeScores, random_scores, signal_model

from unde.errors import NotRetrievable, UndeError
from unde.scoring.arrays import ArrayScores
from unde.weights import learn_weights, retrieval
from unde.weights.retrieval import Copies, StrengthSearch, Trial


def copies(signal: float, seed: int = 0, noise: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Copies:
    """40 copies of 200 examples: the original stands out by `signal`, in the first group alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 200, 3, generator=generator) * torch.tensor(noise)
    originals = torch.randperm(200, generator=generator)[:40]
    values[torch.arange(40), originals, 0] += signal
    return Copies(ArrayScores(values, groups=["g0", "g1", "g2"]), originals, torch.arange(200))


@dataclass
class Judge:
    """Judges all scores by the same trials, and gains `reachable` with weights learned from copies."""

    trials: list[Trial]
    reachable: float = 0.0

    def self_retrieval(self, scores):
        return self

    @property
    def candidates(self) -> list:
        gains = retrieval.Gains("noise", self.reachable, 9.0, self.reachable, 9.0)
        return [retrieval.JudgedWeights({}, torch.ones(3), [gains])]


class Unasked:
    def self_retrieval(self, scores):
        raise AssertionError("asked")


def queries(favoured: int) -> torch.Tensor:
    """Contributions whose top scores come from one group."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(30, 200, 3, generator=generator)
    values[:, :, favoured] += 3 * torch.randn(30, 200, generator=generator).relu() ** 3
    return values


def judge(signal: float, reachable: float = 0.0) -> Judge:
    hard = copies(signal)
    return Judge([Trial("noise", StrengthSearch(1.0, []), hard, hard)], reachable)


def test_candidates_that_the_judge_confirms_are_taken_and_no_others():
    weights = learn_weights(FakeScores(queries(favoured=0)), judge=judge(signal=6.0))
    assert weights.provenance["confirmed"]
    assert weights.values[0] > 1.2 > 1 > weights.values[1:].max()
    judged = weights.provenance["candidates"]
    assert {c["k"] for c in judged} == {2, 3, 10}  # 1 % and 5 % of 200 are 2 and 10
    assert {c["weight_decay"] for c in judged} == {0.1, 1.0}
    best = max((c for c in judged if c["refused"] is None), key=lambda c: c["gains"][0]["gain"])
    assert (best["k"], best["weight_decay"]) == (weights.provenance["k"], weights.provenance["weight_decay"])
    weights = learn_weights(FakeScores(queries(favoured=1)), judge=judge(signal=6.0))
    assert torch.equal(weights.values, torch.ones(3))
    assert weights.provenance["confirmed"] is False
    assert all(c["refused"] for c in weights.provenance["candidates"])


def test_weights_are_uniform_where_self_retrieval_gains_far_more():
    scores = FakeScores(queries(favoured=0))
    gained = learn_weights(scores, judge=judge(signal=6.0)).provenance["candidates"]
    most = max(c["gains"][0]["gain"] for c in gained if c["refused"] is None)
    for reachable, confirmed in ((most / 0.7, True), (most / 0.6, False)):  # the line is at two thirds
        weights = learn_weights(scores, judge=judge(6.0, reachable))
        assert weights.provenance["confirmed"] is confirmed
        assert torch.equal(weights.values, torch.ones(3)) is not confirmed


def test_numbers_are_taken_as_they_are_and_one_leaves_the_other_to_the_judge():
    weights = learn_weights(FakeScores(queries(favoured=1)), k=4, weight_decay=0.0, judge=Unasked())
    assert weights.values[1] > 1.5
    assert (weights.provenance["k"], weights.provenance["weight_decay"]) == (4, 0.0)
    weights = learn_weights(FakeScores(queries(favoured=0)), k=4, judge=judge(signal=6.0))
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
    class Few:
        def self_retrieval(self, scores):
            raise NotRetrievable("12 different training examples are too few")

    scores = queries(favoured=1)
    weights = learn_weights(FakeScores(scores), judge=Few())
    assert torch.equal(weights.values, learn_weights(FakeScores(scores)).values)
    assert "not judged by self-retrieval" in capsys.readouterr().err


def test_concepts_are_judged_on_their_own_held_out_queries():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(30, 200, 3, generator=generator)
    found = learn_weights(
        {"subject": FakeScores(queries(favoured=0)), "style": FakeScores(noise)}, judge=Unasked()
    )
    assert found["subject"].values[0] > 1.2
    assert found["subject"].provenance["held-out gain"] > 1
    assert (found["style"].values - 1).abs().max() < 0.5


@pytest.mark.parametrize("wrong", [{"k": "best"}, {"weight_decay": "none"}])
def test_other_words_are_refused(wrong):
    with pytest.raises(UndeError, match="expected a number, or 'auto'"):
        learn_weights(FakeScores(random_scores()), **wrong)
