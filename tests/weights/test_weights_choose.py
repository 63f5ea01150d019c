import pytest
import torch
from weights_fakes import CosineScores, FakeScores, random_scores, signal_model

from unde.errors import UndeError
from unde.weights import choose, learn_weights
from unde.weights.objective import objective


def test_strong_signal_is_given_its_weights_and_noise_is_not():
    values, _ = signal_model()
    free = choose(FakeScores(values), ks=[5, 10], weight_decays=[0.01, 100.0])
    assert free.weight_decay == 0.01
    assert free.gain > 1.05
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(6, 300, 12, generator=generator)  # few queries, many groups, nothing to find
    kept = choose(FakeScores(noise), ks=[5, 10], weight_decays=[0.0, 100.0])
    assert kept.weight_decay == 100.0
    assert kept.gain == pytest.approx(1, abs=0.01)


def test_candidates_are_judged_on_queries_left_out():
    values, k = random_scores(queries=9), 6
    chosen = choose(FakeScores(values), ks=[3, k], weight_decays=[0.5], folds=3, seed=4)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(4))
    own = unweighted = neutral = 0.0
    for fold in range(3):
        out = order[fold::3]
        rest = torch.tensor([q for q in range(9) if q not in out.tolist()])
        w = learn_weights(FakeScores(values[rest]), k=3, weight_decay=0.5).values
        scores, plain = values[out] @ w, values[out].sum(2)
        own += objective(scores, k).sum().item()
        neutral += objective(plain, k).sum().item()
        picked = scores.gather(1, plain.topk(k).indices).mean(1)
        unweighted += (picked / scores.norm(dim=1)).sum().item()
    first = chosen.candidates[0]
    assert (first.k, first.weight_decay) == (3, 0.5)
    assert first.weighted == pytest.approx(own / neutral, rel=1e-4)
    assert first.unweighted == pytest.approx(unweighted / neutral, rel=1e-4)
    assert first.gain == pytest.approx((own * unweighted) ** 0.5 / neutral, rel=1e-4)
    assert chosen.gain == max(c.gain for c in chosen.candidates)


def test_unweighted_is_exactly_one():
    only = choose(FakeScores(random_scores()), ks=[5], weight_decays=[1e9]).candidates[0]
    assert only.weighted == pytest.approx(1, abs=1e-6)
    assert only.unweighted == pytest.approx(1, abs=1e-6)


def test_streamed_choice_is_the_one_in_memory():
    values = random_scores(queries=8)
    options = {"ks": [3, 6], "weight_decays": [0.1, 1.0]}
    whole = choose(FakeScores(values), **options)
    tight = choose(FakeScores(values, memory=4 * 60 * 5 * 2, rows=13), **options)
    for a, b in zip(whole.candidates, tight.candidates):
        assert (a.weighted, a.unweighted) == pytest.approx((b.weighted, b.unweighted), rel=1e-4)


def test_methods_that_are_not_sums_can_be_chosen_for():
    chosen = choose(CosineScores(random_scores(queries=4)), ks=[5], weight_decays=[0.1, 1.0])
    assert len(chosen.candidates) == 2
    assert chosen.gain > 0


def test_table_marks_the_best():
    chosen = choose(FakeScores(random_scores()), ks=[5, 10], weight_decays=[0.1, 10.0])
    marked = [line for line in chosen.table().split("\n") if line.endswith("*")]
    assert len(marked) == 1
    assert marked[0].split()[:2] == [str(chosen.k), f"{chosen.weight_decay:g}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ks": []}, "nothing to choose from"),
        ({"weight_decays": []}, "nothing to choose from"),
        ({"ks": [5, 100]}, "k is 100"),
        ({"ks": [5], "folds": 1}, "folds is 1: expected 2 to 12"),
        ({"ks": [5], "folds": 13}, "folds is 13"),
    ],
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(UndeError, match=message):
        choose(FakeScores(random_scores()), **options)


def test_scores_without_proponents_are_refused():
    with pytest.raises(UndeError, match="highest unweighted scores are negative"):
        choose(FakeScores(-random_scores().abs() - 1), ks=[5], weight_decays=[1.0])
